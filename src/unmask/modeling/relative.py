"""Relative positions from original positions, for the families that take them from the place in the tensor.

MPNet's and DeBERTa-v2's classes are replaced by subclasses that read the positions of the call; weights, names and what
a stock checkpoint computes stay as they are.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DisentangledSelfAttention,
    make_log_bucket_position,
    scaled_size_sqrt,
)
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from unmask.errors import UserError


class _MPNet(MPNetEncoder):
    """One table of biases [buckets, heads] for all layers (MAE-LM's encoder), by the distance of original positions."""

    positions: Tensor

    def compute_position_bias(self, x: Tensor, position_ids: Any = None, num_buckets: int = 32) -> Tensor:
        """[B, heads, n, n] for tokens at `positions` [B, n]."""
        distance = self.positions[:, None, :] - self.positions[:, :, None]
        bucket = self.relative_position_bucket(distance, num_buckets=num_buckets)
        return self.relative_attention_bias(bucket).permute(0, 3, 1, 2).contiguous()


class _DebertaV2(DebertaV2Encoder):
    """Hands its layers the distances of original positions."""

    positions: Tensor

    def get_rel_pos(self, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None) -> Tensor | None:
        """[B, n, n] query minus key, in buckets where the model has them."""
        if not self.relative_attention:
            return None
        distance = self.positions[:, :, None] - self.positions[:, None, :]
        if self.position_buckets > 0:
            distance = make_log_bucket_position(distance, self.position_buckets, self.max_relative_positions)
        return distance.long()


class _DisentangledAttention(DisentangledSelfAttention):
    """The stock bias for distances that differ from sequence to sequence."""

    def disentangled_attention_bias(
        self, query_layer: Tensor, key_layer: Tensor, relative_pos: Tensor, rel_embeddings: Tensor, scale_factor: int
    ) -> Tensor:
        """[B·H, n, n] from queries and keys [B·H, n, d_h] and distances [B, n, n]."""
        heads, span = self.num_attention_heads, self.pos_ebd_size
        queries, keys = (x.unflatten(0, (-1, heads)) for x in (query_layer, key_layer))
        table = rel_embeddings[: 2 * span]

        def score(x: Tensor, linear: nn.Linear, distance: Tensor) -> Tensor:
            """x·(projected table), [B, H, n, 2 span], looked up at each distance."""
            projected = linear(table).unflatten(-1, (heads, -1)).permute(1, 2, 0)
            index = (distance + span).clamp(0, 2 * span - 1)[:, None].expand(-1, heads, -1, -1)
            return (x @ projected).gather(-1, index) / scaled_size_sqrt(x, scale_factor).to(x.dtype)

        bias = torch.zeros((), dtype=query_layer.dtype, device=query_layer.device)
        if "c2p" in self.pos_att_type:
            bias = bias + score(queries, self.key_proj if self.share_att_key else self.pos_key_proj, relative_pos)
        if "p2c" in self.pos_att_type:
            linear = self.query_proj if self.share_att_key else self.pos_query_proj
            bias = bias + score(keys, linear, -relative_pos).transpose(-1, -2)
        return bias.flatten(0, 1)


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    MPNetEncoder: _MPNet,
    DebertaV2Encoder: _DebertaV2,
    DisentangledSelfAttention: _DisentangledAttention,
}


def install(encoder: PreTrainedModel, keep: bool = True) -> None:
    """Makes an encoder take relative positions from `at`; others are left alone.

    keep=False leaves MPNet's bias out (an ablation of MAE-LM): its table is zero and stays so. `UserError` for others.
    """
    for module in encoder.modules():
        if type(module) in REPLACEMENTS:
            module.__class__ = REPLACEMENTS[type(module)]
    if keep:
        return
    inner = getattr(encoder, "encoder", None)
    if not isinstance(inner, _MPNet):
        raise UserError(
            f"relative_positions=false leaves out a relative position bias, and {type(encoder).__name__} has none that "
            "can be left out: use it with MPNet."
        )
    nn.init.zeros_(inner.relative_attention_bias.weight)
    inner.relative_attention_bias.weight.requires_grad_(False)


def at(encoder: PreTrainedModel, positions: Tensor) -> None:
    """Sets the positions [B, n] of the next call."""
    inner = getattr(encoder, "encoder", None)
    if isinstance(inner, _MPNet | _DebertaV2):
        inner.positions = positions
