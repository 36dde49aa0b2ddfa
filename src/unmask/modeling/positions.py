"""Explicit positions: calling any transformers encoder on a subset of tokens in any order.

An encoder whose positions enter only through `position_ids` does not care in which order its tokens stand. Where a
family starts to count, and where it takes places in the tensor for positions, is put right here; `probe` proves it.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from unmask.errors import UserError
from unmask.modeling import relative

PROBE_TOLERANCE = 1e-4


def position_offset(encoder: PreTrainedModel) -> int:
    """The id of the first position: padding index + 1 for RoBERTa-like encoders, 0 for others."""
    embeddings: Any = getattr(encoder, "embeddings", None)
    if getattr(encoder.config, "position_embedding_type", "absolute") == "rotary":
        return 0
    create = getattr(embeddings, "create_position_ids_from_inputs_embeds", None)
    if create is not None:
        one_token = torch.zeros(1, 1, 1, device="cpu")  # also while a saved model is built on the meta device
        wants_padding = "padding_idx" in inspect.signature(create).parameters
        return int(create(one_token, embeddings.padding_idx) if wants_padding else create(one_token))
    return 0


def max_positions(encoder: PreTrainedModel) -> int | None:
    """How many tokens the encoder has positions for; None where nothing limits it."""
    limit = getattr(encoder.config, "max_position_embeddings", None)
    return None if limit is None else limit - position_offset(encoder)


def attention_window(encoder: PreTrainedModel) -> int | None:
    """The one-sided window of the encoder's sliding layers, in positions; None if every layer sees everything."""
    layer_types = getattr(encoder.config, "layer_types", None) or []
    return encoder.config.sliding_window if "sliding_attention" in layer_types else None


def encode(
    encoder: PreTrainedModel,
    positions: Tensor,
    mask: Tensor | None,
    offset: int,
    states: Tensor | None = None,
    **tokens: Tensor,
) -> Tensor:
    """Hidden states [B, n, d] of tokens that stand anywhere in the tensor.

    positions: [B, n] in the original sequence, from 0; mask: [B, n] True where real, None if all are; states: [B, n]
    numbers of states for an encoder with 2-D rotary positions, 0 where a token is not expanded, None if none is;
    tokens: `input_ids` [B, n] or `inputs_embeds` [B, n, e].
    """
    attention_mask: Any = mask if mask is None else mask.long()
    window = attention_window(encoder)
    if window is not None:
        attention_mask = _windows_by_position(encoder, positions, mask, window)
    relative.at(encoder, positions)
    position_ids = positions + offset
    if states is not None:
        position_ids = torch.stack([position_ids, states], dim=-1)
    return encoder(position_ids=position_ids, attention_mask=attention_mask, **tokens).last_hidden_state


def _windows_by_position(
    encoder: PreTrainedModel, positions: Tensor, mask: Tensor | None, window: int
) -> dict[str, Tensor | None]:
    """ModernBERT's masks per layer type, the window measured in original positions instead of places in the tensor."""
    distance = (positions[:, :, None] - positions[:, None, :]).abs()
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
    itself = torch.eye(positions.shape[1], dtype=torch.bool, device=positions.device)  # keeps padded rows finite
    near = ((distance <= window) & real[:, None, :]) | itself
    everywhere = None if mask is None else (real[:, None, :] | itself)[:, None]
    masks = {"full_attention": everywhere, "sliding_attention": near[:, None]}
    if encoder.config._attn_implementation == "eager":  # eager adds its mask: a boolean one would be silently wrong
        least = torch.finfo(encoder.dtype).min
        return {
            kind: None
            if m is None
            else torch.zeros(m.shape, dtype=encoder.dtype, device=m.device).masked_fill(~m, least)
            for kind, m in masks.items()
        }
    return masks


@torch.no_grad()
def probe(encoder: PreTrainedModel) -> None:
    """Proves that the encoder honours positions, or raises `UserError` with the reason.

    A copy with random weights (large enough that attention is not uniform) gets a sequence with gaps, longer than any
    window: once in order, once permuted and padded with hidden tokens. Its outputs must be permuted alike to 1e-4.
    """
    name = type(encoder).__name__
    parameters = inspect.signature(encoder.forward).parameters
    for keyword in ("position_ids", "attention_mask"):
        if keyword not in parameters:
            raise UserError(
                f"{name} takes no {keyword}, so it cannot be called on the visible tokens alone; use an encoder that "
                "does, such as BERT, RoBERTa, ELECTRA, ModernBERT or ESM."
            )
    limit = max_positions(encoder)
    spread = 2 * ((attention_window(encoder) or 0) + 32)
    spread = spread if limit is None else min(spread, limit)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        copied = copy.deepcopy(encoder).to(device="cpu", dtype=torch.float32).eval()
        for parameter in copied.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        kept = torch.randperm(spread)[: (3 * spread) // 4].sort().values
        ids = torch.randint(0, encoder.config.vocab_size, (1, spread))
        order = torch.randperm(spread)
        visible = torch.isin(order, kept)
        offset = position_offset(encoder)
        try:
            straight = encode(copied, kept[None], None, offset, input_ids=ids[:, kept])
            shuffled = encode(copied, order[None], visible[None], offset, input_ids=ids[:, order])
        except Exception as error:
            raise UserError(
                f"{name} could not be called with explicit positions ({type(error).__name__}: {error}); use an encoder "
                "that can, such as BERT, RoBERTa, ELECTRA, ModernBERT or ESM."
            ) from error
    reordered = shuffled[:, order.argsort()[kept]] if shuffled.shape[1] == spread else shuffled
    if reordered.shape != straight.shape:
        raise UserError(
            f"{name} does not return one hidden state per token (it pools or mixes them); use an encoder that does."
        )
    difference = (reordered - straight).abs().max().item()
    if not difference <= PROBE_TOLERANCE:
        raise UserError(
            f"{name} does not honour its position_ids: the same tokens, permuted with their positions and with others "
            f"hidden, gave hidden states that differ by {difference:.2g} (at most {PROBE_TOLERANCE:g} is rounding), so "
            "it takes positions from the place in the tensor; use an encoder that does not."
        )
