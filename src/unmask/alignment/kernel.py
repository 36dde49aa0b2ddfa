"""The recursion of state alignment on CUDA, in Triton: one program per sequence, forward and backward.

Log space and float64 throughout, so that there is one path for all scores and nothing to fall back to; α is kept
[B, T, S] and read again by the backward pass, which adds up ξ tile by tile. Step t looks at the vertices t ... S-T+t
alone. The interface is that of `recursion._scaled`: potentials that hold -inf wherever no path can be.

With TRITON_INTERPRET=1 in the environment it runs on a CPU, slowly, for the tests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 32  # vertices on a side of the tile of links that is held at once


@triton.jit
def _finite(x):  # type: ignore[no-untyped-def]
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _forward(match, links, targets, states, alpha, log_z, T, S, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """α_t(u) = match[t, u] + logsumexp_w(α_{t-1}(w) + links[w, u]), and log Z."""
    b = tl.program_id(0).to(tl.int64)
    match, alpha, links = match + b * T * S, alpha + b * T * S, links + b * S * S
    steps, last = tl.load(targets + b), tl.load(states + b) - 1
    place = tl.arange(0, TILE)
    tl.store(alpha, tl.load(match))  # every path begins at vertex 0
    width = last - steps + 2  # vertices that step t can be at: t ... t + width - 1
    for t in range(1, steps):
        tl.debug_barrier()  # the row before is written by other threads
        for first in range(t, t + width, TILE):
            u = first + place
            here = u < t + width
            peak = tl.full([TILE], float("-inf"), tl.float64)
            total = tl.zeros([TILE], tl.float64)
            for start in range(t - 1, tl.minimum(t - 1 + width, first + TILE), TILE):
                w = start + place
                there = w < t - 1 + width
                before = tl.load(alpha + (t - 1) * S + w, mask=there, other=float("-inf"))
                x = tl.load(
                    links + w[:, None] * S + u[None, :], mask=there[:, None] & here[None, :], other=float("-inf")
                )
                x += before[:, None]
                higher = tl.maximum(peak, tl.max(x, 0))
                shift = _finite(higher)
                total = total * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift[None, :]), 0)
                peak = higher
            summed = tl.where(total == 0, float("-inf"), _finite(peak) + tl.log(total))  # NaN stays NaN
            tl.store(alpha + t * S + u, summed + tl.load(match + t * S + u, mask=here, other=0.0), mask=here)
    tl.debug_barrier()
    tl.store(log_z + b, tl.load(alpha + (steps - 1) * S + last))


@triton.jit
def _backward(match, links, targets, states, alpha, log_z, beta, occupancy, link_use, T, S, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """γ and Σξ from α; β_t(w) = logsumexp_u(links[w, u] + match[t+1, u] + β_{t+1}(u)) in two rows that take turns."""
    b = tl.program_id(0).to(tl.int64)
    match, alpha, occupancy = match + b * T * S, alpha + b * T * S, occupancy + b * T * S
    links, link_use, beta = links + b * S * S, link_use + b * S * S, beta + b * 2 * S
    steps, last, z = tl.load(targets + b), tl.load(states + b) - 1, _finite(tl.load(log_z + b))
    place = tl.arange(0, TILE)
    width = last - steps + 2
    tl.store(beta + ((steps - 1) % 2) * S + last, tl.zeros([], tl.float64))  # every path ends at the last vertex
    tl.store(occupancy + (steps - 1) * S + last, tl.exp(tl.load(alpha + (steps - 1) * S + last) - z))
    for back in range(1, steps):
        t = steps - 1 - back
        tl.debug_barrier()
        for first in range(t, t + width, TILE):
            w = first + place
            here = w < t + width
            before = tl.load(alpha + t * S + w, mask=here, other=float("-inf"))
            peak = tl.full([TILE], float("-inf"), tl.float64)
            total = tl.zeros([TILE], tl.float64)
            for start in range(tl.maximum(t + 1, first), t + 1 + width, TILE):
                u = start + place
                there = u < t + 1 + width
                after = tl.load(beta + ((t + 1) % 2) * S + u, mask=there, other=float("-inf"))
                after += tl.load(match + (t + 1) * S + u, mask=there, other=float("-inf"))
                tile = w[:, None] * S + u[None, :]
                x = tl.load(links + tile, mask=here[:, None] & there[None, :], other=float("-inf")) + after[None, :]
                used = tl.load(link_use + tile, mask=here[:, None] & there[None, :], other=0.0)
                used += tl.exp(before[:, None] + x - z)
                tl.store(link_use + tile, used, mask=here[:, None] & there[None, :])
                higher = tl.maximum(peak, tl.max(x, 1))
                shift = _finite(higher)
                total = total * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
                peak = higher
            summed = tl.where(total == 0, float("-inf"), _finite(peak) + tl.log(total))  # NaN stays NaN
            tl.store(beta + (t % 2) * S + w, summed, mask=here)
            tl.store(occupancy + t * S + w, tl.exp(before + summed - z), mask=here)


def forward_backward(
    match: Tensor, links: Tensor, target_length: Tensor, state_length: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(log Z [B], γ [B, T, S], Σ_t ξ_t [B, S, S]), float64, from contiguous float64 potentials [B, T, S], [B, S, S].

    -inf stands wherever no path can be (`recursion._log_potentials`); a sequence without a path has log Z = -inf.
    """
    batch, steps, vertices = match.shape
    # -inf where no step comes: a row of α is read over the band of its own step alone.
    alpha = torch.full_like(match, float("-inf"))
    log_z, beta = match.new_empty(batch), match.new_full((batch, 2, vertices), float("-inf"))
    occupancy, link_use = torch.zeros_like(match), torch.zeros_like(links)
    lengths = target_length.contiguous(), state_length.contiguous()
    _forward[(batch,)](match, links, *lengths, alpha, log_z, steps, vertices, TILE=TILE)
    _backward[(batch,)](match, links, *lengths, alpha, log_z, beta, occupancy, link_use, steps, vertices, TILE=TILE)
    return log_z, occupancy, link_use
