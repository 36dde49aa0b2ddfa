"""Transitions between states (ExLM §3): the matrix E of the DAG, from hidden states alone.

    E[w, u] = Σ_h softmax_h(g_w) · softmax_u(q_w,h · k_u,h / √d_h + prior(w, u))        over the u > w that are allowed

q, k and the gates g are linear in [hidden state ; embedding of the vertex's place in the interleaved sequence].
The prior -λ |g(u) - g(w) - 1|, g the rank of a vertex's masked position, makes a step to the next masked position the
likeliest at first; λ is learned. The published method is without it.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from unmask.modeling.vertices import Vertices


class Transitions(nn.Module):
    """log E of a batch of sequences.

    size: width d of the hidden states; heads: mixture components; places: rows of the place embedding; prior: λ at the
    start, 0 for none; max_jump: how many vertices a link may go ahead, None for any number.
    """

    def __init__(self, size: int, heads: int, places: int, prior: float, max_jump: int | None) -> None:
        super().__init__()
        self.heads, self.max_jump = heads, max_jump
        self.places = nn.Embedding(places, size)
        self.query = nn.Linear(2 * size, size)
        self.key = nn.Linear(2 * size, size)
        self.gate = nn.Linear(2 * size, heads)
        self.prior = prior
        # λ = softplus(sharpness)
        self.sharpness = nn.Parameter(torch.zeros(())) if prior else None

    @torch.no_grad()
    def start(self) -> None:
        """Sets λ of a new model to the prior's start."""
        if self.sharpness is not None:
            self.sharpness.fill_(math.log(math.expm1(self.prior)))

    def forward(self, states: Tensor, vertices: Vertices) -> Tensor:
        """log E [B, S, S] in float32 from states [B, S, d]; -inf where no link is allowed."""
        features = torch.cat([states, self.places(vertices.places).to(states.dtype)], dim=-1)
        query = self.query(features).float().unflatten(-1, (self.heads, -1))
        key = self.key(features).float().unflatten(-1, (self.heads, -1))
        gates = self.gate(features).float().log_softmax(-1)
        with torch.autocast(states.device.type, enabled=False):
            return _Mixture.apply(query, key, gates, self._bias(vertices))

    def _bias(self, vertices: Vertices) -> Tensor:
        """[B, S, S]: the prior where a link is allowed, else -inf."""
        count = vertices.places.shape[1]
        ahead = torch.arange(count, device=vertices.places.device)
        jump = ahead - ahead[:, None]
        allowed = (jump > 0) if self.max_jump is None else (jump > 0) & (jump <= self.max_jump)
        allowed = allowed & (ahead < vertices.lengths[:, None])[:, None, :]
        bias = torch.zeros_like(allowed, dtype=torch.float32)
        if self.sharpness is not None:
            ranks = vertices.ranks
            bias = -nn.functional.softplus(self.sharpness) * (ranks[:, None, :] - ranks[:, :, None] - 1).abs()
        return bias.masked_fill(~allowed, -torch.inf)


class _Mixture(torch.autograd.Function):
    """log Σ_h gate_h · softmax_u(q_h·k_h / √d_h + bias), head by head: nothing of shape [S, S, heads] is ever held."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, gates: Tensor, bias: Tensor) -> Tensor:
        """query, key [B, S, H, d_h]; gates [B, S, H] in logs; bias [B, S, S] -> [B, S, S]."""
        query, key = (x.permute(2, 0, 1, 3).contiguous() for x in (query / math.sqrt(query.shape[-1]), key))
        nowhere = (bias == -torch.inf).all(2, keepdim=True)  # such a row has no softmax
        finite = bias.masked_fill(nowhere, 0.0)
        mixed = torch.full_like(bias, -torch.inf)
        for head in range(gates.shape[2]):
            mixed = torch.logaddexp(mixed, _component(query, key, finite, head).add_(gates[:, :, head, None]))
        mixed.masked_fill_(nowhere, -torch.inf)
        ctx.save_for_backward(query, key, gates, finite, mixed)
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, gates, bias, mixed = ctx.saved_tensors
        for_query, for_key, for_gates = torch.empty_like(query), torch.empty_like(key), torch.empty_like(gates)
        for_bias = torch.zeros_like(bias)
        nothing = mixed == -torch.inf
        mixed, gradient = mixed.masked_fill(nothing, 0.0), gradient.masked_fill(nothing, 0.0)
        for head in range(gates.shape[2]):
            component = _component(query, key, bias, head)
            share = _exp((component - mixed).add_(gates[:, :, head, None])).mul_(gradient)  # of the head in log E
            total = share.sum(2, keepdim=True)
            for_gates[:, :, head] = total[:, :, 0]
            for_logits = share.sub_(_exp(component).mul_(total))
            for_bias += for_logits
            torch.bmm(for_logits, key[head], out=for_query[head])
            torch.bmm(for_logits.mT, query[head], out=for_key[head])
        for_query /= math.sqrt(query.shape[-1])
        return for_query.permute(1, 2, 0, 3), for_key.permute(1, 2, 0, 3), for_gates, for_bias


def _component(query: Tensor, key: Tensor, bias: Tensor, head: int) -> Tensor:
    """log softmax_u of one head, [B, S, S], from scaled queries and keys [H, B, S, d_h]."""
    return torch.baddbmm(bias, query[head], key[head].mT).log_softmax(2)


def _exp(x: Tensor) -> Tensor:
    """exp, in place; on a CPU `exp2` takes a quarter of `exp`'s time, and far less where the result is zero."""
    return x.mul_(1 / math.log(2)).exp2_()
