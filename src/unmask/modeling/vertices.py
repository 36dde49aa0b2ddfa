"""The vertices of the DAG: which hidden states of the masked block they are, in order of (position, state).

The first and the last token of a sequence are its anchors: never masked, never expanded, the first and the last vertex,
with nothing to emit. With `expand_anchors`, as in the reference, both are in the masked block, expanded and predicted.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Vertices(NamedTuple):
    """Where S vertices stand; S = m k + 2, or m k with anchors in the masked block. Past `lengths` is padding."""

    silent_ends: bool
    """Whether the first and the last vertex are anchors that emit nothing."""

    where: Tensor
    """[B, S] place in the tensor [visible ; masked positions x k]."""
    places: Tensor
    """[B, S] place in the virtual sequence in which each masked position is interleaved with its k states."""
    ranks: Tensor
    """[B, S] number of the vertex's masked position, from 1; 0 and m + 1 for the anchors."""
    lengths: Tensor
    """[B] vertices of each sequence."""
    targets: Tensor
    """[B] targets of each sequence, T = m + 2, or m with anchors in the masked block."""

    def emitting(self, x: Tensor) -> Tensor:
        """Of something for each vertex [B, S, ...] that of the states that emit, [B, m k, ...]."""
        return x[:, 1:-1] if self.silent_ends else x

    def match(self, emissions: Tensor) -> Tensor:
        """Emissions [B, m, m k] of masked positions -> match [B, T, S]: a vertex with nothing to emit scores 0."""
        return F.pad(emissions, (1, 1, 1, 1)) if self.silent_ends else emissions


def expand(block: Tensor, k: int) -> Tensor:
    """[B, m] -> [B, m k]: each masked position's entry for its k states, which stand together."""
    return block.repeat_interleave(k, dim=1)


def state_numbers(block: Tensor, k: int) -> Tensor:
    """[B, m k] the states' numbers 1 ... k for a masked block [B, m]."""
    return torch.arange(1, k + 1, device=block.device).repeat(block.shape[1]).expand(len(block), -1)


def vertices_of(
    visible_positions: Tensor,
    masked_positions: Tensor,
    visible_mask: Tensor | None,
    masked_mask: Tensor | None,
    k: int,
    expand_anchors: bool,
) -> Vertices:
    """The vertices of a masked batch: positions [B, v] and [B, m], masks True where real (None: all are)."""
    (batch, v), m, device = visible_positions.shape, masked_positions.shape[1], visible_positions.device
    visible = torch.full((batch,), v, device=device) if visible_mask is None else visible_mask.sum(1)
    masked = torch.full((batch,), m, device=device) if masked_mask is None else masked_mask.sum(1)
    ranks = torch.arange(m, device=device).expand(batch, m)
    # Every masked position before this one has put k - 1 places more into the interleaved sequence.
    places = expand(masked_positions + ranks * (k - 1), k) + state_numbers(ranks, k) - 1
    index = v + torch.arange(m * k, device=device).expand(batch, -1)
    if expand_anchors:
        return Vertices(False, index, places, expand(ranks + 1, k), masked * k, masked)
    column = torch.arange(m * k + 2, device=device)
    last = column == (masked * k + 1)[:, None]
    end = visible_positions.gather(1, visible[:, None] - 1)

    def between(states: Tensor, final: Tensor) -> Tensor:
        """The first anchor's 0, the states', the last anchor's value right behind the sequence's own states."""
        return torch.where(last, final, F.pad(states, (1, 1)))

    return Vertices(
        True,
        between(index, visible[:, None] - 1),
        between(places, end + (masked * (k - 1))[:, None]),
        between(expand(ranks + 1, k), masked[:, None] + 1),
        masked * k + 2,
        masked + 2,
    )
