"""What PyTorch computes slowly on a CPU, computed faster: attention in bfloat16, and the random masks of dropout.

Its fused attention takes longer in bfloat16 than in float32, and its Bernoulli numbers come one at a time
(docs/speed.md). Everywhere else, the stock functions are what runs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "unmask"  # of the attention, among those of transformers
SCORES = 1 << 20  # attention scores that are held at once: of 2^17 ... 2^22 the fastest on 2 CPU cores


def install(model: PreTrainedModel) -> None:
    """Gives a model on stock SDPA this attention, and its dropout these masks; weights and results stay."""
    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        model.config._attn_implementation = NAME
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout


class Dropout(nn.Dropout):
    """Stock dropout, its masks drawn sixteen bits at a time on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and 0 < self.p < 1 and x.device.type == "cpu"):
            return super().forward(x)
        return x * _factor(_kept(x.shape, self.p), self.p, x.dtype)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(query · keyᵀ · scale) · value for query [B, H, q, d_h], key and value [B, H, n, d_h] -> [B, H, q, d_h].

    mask: bool, broadcast to [B, H, q, n], True: attend; dropout: share of the weights left out; scale: d_h^-1/2 if
    None. In bfloat16 on a CPU nothing of shape [B, H, q, n] is held but dropout's mask, a byte for each weight.
    """
    kind = query.device.type
    if kind == "cpu" and torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    if kind != "cpu" or query.dtype != torch.bfloat16 or dropout >= 1:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
    mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
    kept = _kept((*query.shape[:3], key.shape[2]), dropout) if dropout else None
    return _Blockwise.apply(query, key, value, mask, kept, query.shape[-1] ** -0.5 if scale is None else scale, dropout)


class _Blockwise(torch.autograd.Function):
    """A few heads of a few sequences at a time, weights computed again in backward: they stay in the cache."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kept: Tensor | None,
        scale: float,
        dropout: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask, kept)
        ctx.scale, ctx.dropout = scale, dropout
        out = _as_projected(query)
        with torch.autocast(query.device.type, enabled=False):
            for part in _parts(query, key):
                q, k, v = (_heads(x, part) for x in (query, key, value))
                weights = _softmax(part, q * scale, k, mask)
                if kept is not None:
                    weights = weights * _factor(_heads(kept, part), dropout, weights.dtype)
                out[part] = torch.bmm(weights, v).view_as(out[part])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, kept = ctx.saved_tensors
        for_query, for_key, for_value = (_as_projected(x) for x in (query, key, value))
        for part in _parts(query, key):
            q, k, v, g = (_heads(x, part) for x in (query, key, value, gradient))
            q = q * ctx.scale
            weights = softmax = _softmax(part, q, k, mask)
            for_weights = torch.bmm(g, v.mT)
            if kept is not None:
                factor = _factor(_heads(kept, part), ctx.dropout, softmax.dtype)
                weights, for_weights = softmax * factor, for_weights.mul_(factor)
            for_scores = torch.ops.aten._softmax_backward_data(for_weights, softmax, -1, softmax.dtype)
            for_value[part] = torch.bmm(weights.mT, g).view_as(for_value[part])
            for_query[part] = torch.bmm(for_scores, k).mul_(ctx.scale).view_as(for_query[part])
            for_key[part] = torch.bmm(for_scores.mT, q).view_as(for_key[part])
        return for_query, for_key, for_value, None, None, None, None


def _parts(query: Tensor, key: Tensor) -> list[tuple[slice, slice]]:
    """(sequences, heads) that make up all of [B, H], with at most `SCORES` scores each if one head has no more."""
    batch, heads, _, _ = query.shape
    count = max(1, SCORES // (query.shape[2] * key.shape[2]))
    many, few = max(1, count // heads), min(count, heads)
    return [
        (slice(b, b + many), slice(h, min(h + few, heads))) for b in range(0, batch, many) for h in range(0, heads, few)
    ]


def _heads(x: Tensor, part: tuple[slice, slice]) -> Tensor:
    """[b h, n, d_h] of x [B, H, n, d_h]."""
    return x[part].flatten(0, 1)


def _as_projected(x: Tensor) -> Tensor:
    """Room for x [B, H, n, d_h], laid out as linear layers take and give it, [B, n, H, d_h]."""
    return x.new_empty([x.shape[i] for i in (0, 2, 1, 3)]).transpose(1, 2)


def _softmax(part: tuple[slice, slice], query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Attention's weights [b h, q, n] of a part, before dropout, from its scaled queries and its keys."""
    scores = torch.bmm(query, key.mT)
    if mask is not None:
        own = mask[part[0] if len(mask) > 1 else slice(None), part[1] if mask.shape[1] > 1 else slice(None)]
        by_head = scores.unflatten(0, (-1, part[1].stop - part[1].start))
        by_head.masked_fill_(~own, torch.finfo(scores.dtype).min)
    return scores.softmax(-1)


def _kept(shape: tuple[int, ...] | torch.Size, dropout: float) -> Tensor:
    """uint8 [shape], 0 with probability `dropout` to 16 bits, else 1 (of bool, conversion is slow)."""
    count = torch.Size(shape).numel()
    bits = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-count // 4),)).view(torch.int16)
    below = min(round(dropout * (1 << 16)), (1 << 16) - 1) - (1 << 15)
    return (bits[:count].view(shape) >= below).view(torch.uint8)


def _factor(kept: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """0 where left out, 1 / (1 - dropout) where kept, so that the mean stays."""
    return kept.to(dtype).mul_(1 / (1 - dropout))


def _for_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attention` as the encoders of transformers call it; what it does not know goes to their own."""
    causal = kwargs.get("is_causal")
    unknown = (
        key.shape[1] != query.shape[1]
        or (getattr(module, "is_causal", True) if causal is None else causal)
        or kwargs.get("position_bias") is not None
        or (attention_mask is not None and attention_mask.dtype != torch.bool)
    )
    if unknown:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return attention(query, key, value, attention_mask, dropout, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _for_transformers)
AttentionMaskInterface.register(NAME, sdpa_mask)
