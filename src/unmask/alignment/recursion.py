"""The one recursion of state alignment: sum for the likelihood, max for the best path, backwards for the gradient.

A path visits T of the S vertices in increasing order, begins at vertex 0, ends at vertex S-1 and emits target t at its
t-th vertex. With match[t, u] = log P_u(y_t) and links[w, u] = log E[w, u]:

    α_0(u) = P_u(y_0) [u = 0]        α_t(u) = P_u(y_t) Σ_{w<u} α_{t-1}(w) E[w, u]        Z = α_{T-1}(S-1)
    β_{T-1}(u) = [u = S-1]           β_t(w) = Σ_{u>w} E[w, u] P_u(y_{t+1}) β_{t+1}(u)
    γ_t(u) = α_t(u) β_t(u) / Z = ∂log Z / ∂match[t, u]
    ξ_t(w, u) = α_{t-1}(w) E[w, u] P_u(y_t) β_t(u) / Z,        Σ_t ξ_t(w, u) = ∂log Z / ∂links[w, u]

At step t only the vertices t ... S-T+t can lie on a path; everything else is left out. Probabilities are float64 and
scaled at every step; a sequence in which rounding to zero could have lost anything is computed again in log space.

Shapes, for every function here: match [B, T, S]; links [B, S, S], -inf where a link is not allowed (only
what is strictly above the diagonal can be); target_length and state_length [B]: the rest of T and S is padding and is
ignored. Any floating type goes in, results are float64. `ValueError` names a sequence that has no path, or lengths that
do not fit.
"""

import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

NEGATIVE_INFINITY = float("-inf")
LEAST_SAFE = 1e-280  # products above it lost at most S x 1e-308 / 1e-280 of themselves to rounding to zero


def log_likelihood(match: Tensor, links: Tensor, target_length: Tensor, state_length: Tensor) -> Tensor:
    """log Z [B] in nats, differentiable (once) in match and links by forward-backward.

    match [B, T, S]: log-score of vertex u emitting target t; links [B, S, S]: log-score of going from w to u; lengths
    [B]. The first and the last vertex of a sequence emit its first and its last target.
    """
    return _LogLikelihood.apply(match, links, target_length, state_length)


@torch.no_grad()
def posteriors(match: Tensor, links: Tensor, target_length: Tensor, state_length: Tensor) -> tuple[Tensor, Tensor]:
    """(γ [B, T, S], Σ_t ξ_t [B, S, S]): the probability that u emits target t, and how often w -> u is used."""
    passed = _forward_backward(match, links, target_length, state_length)
    return passed.occupancy, passed.link_use


@torch.no_grad()
def path_entropy(match: Tensor, links: Tensor, target_length: Tensor, state_length: Tensor) -> Tensor:
    """Entropy [B], in nats, of the distribution over paths given the targets.

    Σ_t Σ_w γ_t(w) · entropy of the vertex after w at step t; log Z - Σ γ·match - Σ ξ·links is the same, but in it large
    scores would cancel.
    """
    match, links = _log_potentials(match, links, target_length, state_length)
    alpha = _log_forward(match, links, target_length)
    log_z = _last(alpha, target_length, state_length)
    _refuse_no_path(log_z == NEGATIVE_INFINITY)
    end = _log_end(match, state_length)
    entropy, beta = torch.zeros_like(log_z), torch.full_like(end, NEGATIVE_INFINITY)
    for t in reversed(range(match.shape[1])):
        if t + 1 < match.shape[1]:
            ahead = links + (match[:, t + 1] + beta)[:, None, :]
            beta = ahead.logsumexp(2)
            log_next = ahead - _finite(beta)[:, :, None]
            of_next = -torch.where(log_next > NEGATIVE_INFINITY, log_next.exp() * log_next, 0.0).sum(2)
            entropy += ((alpha[:, t] + beta - log_z[:, None]).exp() * of_next).sum(1)
        beta = torch.where((target_length == t + 1)[:, None], end, beta)
    return entropy


@torch.no_grad()
def best_path(match: Tensor, links: Tensor, target_length: Tensor, state_length: Tensor) -> Tensor:
    """The most probable path, [B, S]: for each vertex the index of the target that it emits, -1 off the path."""
    match, links = _log_potentials(match, links, target_length, state_length)
    batch, steps, vertices = match.shape
    score, came_from = match[:, 0], []
    for t in range(1, steps):
        best, origin = (score[:, :, None] + links).max(dim=1)
        score = torch.where((t < target_length)[:, None], match[:, t] + best, score)
        came_from.append(origin)
    score = score.gather(1, state_length[:, None] - 1)[:, 0]
    _refuse_nan(score)
    _refuse_no_path(score == NEGATIVE_INFINITY)
    emits = torch.full((batch, vertices), -1, device=match.device)
    vertex = state_length - 1
    for t in reversed(range(steps)):
        inside = t < target_length
        emits = torch.where(
            inside[:, None] & (torch.arange(vertices, device=match.device) == vertex[:, None]), t, emits
        )
        if t:
            vertex = torch.where(inside, came_from[t - 1].gather(1, vertex[:, None])[:, 0], vertex)
    return emits


@torch.no_grad()
def sample_paths(
    match: Tensor,
    links: Tensor,
    target_length: Tensor,
    state_length: Tensor,
    count: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Paths [B, count, S] drawn from their distribution given the targets, written as those of `best_path`.

    Walks back from the last vertex: the predecessor of u at step t is w with probability ∝ α_{t-1}(w) E[w, u].
    """
    match, links = _log_potentials(match, links, target_length, state_length)
    alpha = _log_forward(match, links, target_length)
    log_z = _last(alpha, target_length, state_length)
    _refuse_nan(log_z)
    _refuse_no_path(log_z == NEGATIVE_INFINITY)
    batch, steps, vertices = match.shape
    emits = torch.full((batch, count, vertices), -1, device=match.device)
    vertex = (state_length - 1)[:, None].expand(batch, count)
    for t in reversed(range(steps)):
        inside = (t < target_length)[:, None]
        here = torch.arange(vertices, device=match.device) == vertex[:, :, None]
        emits = torch.where(inside[:, :, None] & here, t, emits)
        if t:
            into = links.gather(2, vertex[:, None, :].expand(batch, vertices, count)).transpose(1, 2)
            logits = alpha[:, t - 1, None, :] + into
            logits = torch.where(inside[:, :, None], logits, 0.0)
            drawn = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=generator).view(batch, count)
            vertex = torch.where(inside, drawn, vertex)
    return emits


class _Pass(NamedTuple):
    log_z: Tensor
    """[B]"""
    occupancy: Tensor
    """γ [B, T, S]"""
    link_use: Tensor
    """Σ_t ξ_t [B, S, S]"""


class _LogLikelihood(torch.autograd.Function):
    """log Z forward, γ and Σξ backward."""

    @staticmethod
    def forward(ctx: Any, match: Tensor, links: Tensor, target_length: Tensor, state_length: Tensor) -> Tensor:
        passed = _forward_backward(match, links, target_length, state_length)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(passed.occupancy.to(match.dtype), passed.link_use.to(links.dtype))
        return passed.log_z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        for_match, for_links = (saved * gradient[:, None, None].to(saved.dtype) for saved in ctx.saved_tensors)
        return for_match, for_links, None, None


@torch.no_grad()
def _forward_backward(match: Tensor, links: Tensor, target_length: Tensor, state_length: Tensor) -> _Pass:
    potentials = _log_potentials(match, links, target_length, state_length)
    if _on_kernel(match):
        from unmask.alignment.kernel import forward_backward

        passed = _Pass(*forward_backward(*potentials, target_length, state_length))
        _refuse_no_path(passed.log_z == NEGATIVE_INFINITY)
        return passed
    passed, safe = _scaled(*potentials, target_length, state_length)
    if not safe.all():
        again = ~safe
        lengths = target_length[again], state_length[again]
        exact = _in_log_space(*_log_potentials(match[again], links[again], *lengths), *lengths)
        for whole, part in zip(passed, exact, strict=True):
            whole[again] = part
    _refuse_no_path(passed.log_z == NEGATIVE_INFINITY)
    return passed


def _on_kernel(scores: Tensor) -> bool:
    """Whether the Triton kernel computes them: on CUDA, where triton is installed."""
    return scores.is_cuda and importlib.util.find_spec("triton") is not None


def _refuse_no_path(stuck: Tensor) -> None:
    if stuck.any():
        numbers = ", ".join(map(str, stuck.nonzero()[:, 0].tolist()))
        raise ValueError(f"No path of allowed links and finite matches goes through sequence {numbers} of the batch.")


def _refuse_nan(score: Tensor) -> None:
    if score.isnan().any():
        raise ValueError("match or links hold NaN, so there is no best path and no distribution to draw from.")


def _log_potentials(match: Tensor, links: Tensor, target_length: Tensor, state_length: Tensor) -> tuple[Tensor, Tensor]:
    """match and links in float64, -inf wherever no path can be."""
    if match.dim() != 3 or links.shape != (len(match), match.shape[2], match.shape[2]):
        raise ValueError(
            f"match is {tuple(match.shape)} and links is {tuple(links.shape)}: they must be [B, T, S] and [B, S, S]."
        )
    batch, steps, vertices = match.shape
    if target_length.shape != (batch,) or state_length.shape != (batch,):
        raise ValueError(f"target_length and state_length must be [B], with B = {batch} as match has it.")
    if target_length.max() > steps or state_length.max() > vertices or target_length.min() < 1:
        raise ValueError("target_length must lie in 1 ... T and state_length in 1 ... S.")
    _refuse_no_path(state_length < target_length)
    t, u = torch.arange(steps, device=match.device), torch.arange(vertices, device=match.device)
    last_t, last_u = target_length[:, None] - 1, state_length[:, None] - 1
    lowest = torch.where(t < last_t, t, last_u).masked_fill(t > last_t, vertices)
    highest = torch.where(t > 0, t + last_u - last_t, 0)
    outside = (u < lowest[:, :, None]) | (u > highest[:, :, None])
    forbidden = (u[:, None] >= u) | (u > last_u[:, :, None])
    return (
        match.to(torch.float64, copy=True).masked_fill_(outside, NEGATIVE_INFINITY),
        links.to(torch.float64, copy=True).masked_fill_(forbidden, NEGATIVE_INFINITY),
    )


def _scaled(match: Tensor, links: Tensor, target_length: Tensor, state_length: Tensor) -> tuple[_Pass, Tensor]:
    """Forward-backward in scaled probabilities, and which sequences [B] lost nothing to rounding to zero.

    Overwrites match and links. What is taken out for scale: of each vertex's links their largest, of each step's
    emissions their largest, of α its sum; β is divided by the same sums, so that γ = αβ. At step t a path is at one of
    the vertices t ... t + w - 1, and no others are computed.

    What α lost at a step weighs at most S x 1e-308 / its sum x the largest β there. (Only a path that β lost as well
    would go unseen: 1e-308 behind all others before one step, and as far behind after a later one.)
    """
    batch, steps, vertices = match.shape
    w = int((state_length - target_length).max()) + 1
    inside = (torch.arange(steps, device=match.device) < target_length[:, None])[:, :, None]
    strongest = _finite(links.amax(2))
    match += strongest[:, None, :]  # leaving a vertex counts as emitting from it; the last one has no links
    loudest = _finite(match.amax(2, keepdim=True))
    link, emission = _exp(links.sub_(strongest[:, :, None])), _exp(match.sub_(loudest))
    beyond = max(steps + w - 1 - vertices, 0)  # the last bands of shorter sequences reach past their vertices
    if beyond:
        emission, link = F.pad(emission, (0, beyond)), F.pad(link, (0, beyond, 0, beyond))
    onward, emissions = _windows(link[:, :, 1:], steps - 1, w, w), _windows(emission, steps, 1, w)

    # Rows [1, w]: on a CPU a row times a batch of matrices is 4 to 6 times as fast as the matrices times a column.
    alpha, norm = torch.zeros_like(emission), torch.empty_like(loudest)
    alpha[:, 0] = emission[:, 0]
    alphas, tiny = _windows(alpha, steps, 1, w), torch.finfo(match.dtype).tiny
    for t, (emit, here, total) in enumerate(zip(emissions, alphas, norm.split(1, dim=1), strict=True)):
        if t:
            torch.mul(emit, torch.bmm(alphas[t - 1], onward[t - 1]), out=here)
        torch.sum(here, 2, keepdim=True, out=total)
        here /= total.clamp(min=tiny)

    norm = torch.where(inside, norm, 1.0)
    emission /= norm
    beta = torch.zeros_like(emission)
    beta[torch.arange(batch, device=match.device), target_length - 1, state_length - 1] = 1.0
    ahead = emission * beta
    betas, aheads = _windows(beta, steps, 1, w), _windows(ahead, steps, 1, w)
    for t in reversed(range(steps - 1)):
        here = betas[t]
        here += torch.bmm(aheads[t + 1], onward[t].mT)
        torch.mul(emissions[t], here, out=aheads[t])

    log_z = torch.where(inside, norm.log() + loudest, 0.0).sum((1, 2))
    safe = (norm / beta.amax(2, keepdim=True).clamp(min=1.0)).amin((1, 2)) > LEAST_SAFE
    link_use = link.mul_(alpha[:, :-1].mT @ ahead[:, 1:])
    return _Pass(log_z, alpha.mul_(beta)[:, :, :vertices], link_use[:, :vertices, :vertices]), safe


def _exp(x: Tensor) -> Tensor:
    """exp, in place; on a CPU `exp2` takes a third of `exp`'s time, and a tenth where the result is zero."""
    return x.mul_(1 / math.log(2)).exp2_()


def _windows(x: Tensor, count: int, rows: int, columns: int) -> tuple[Tensor, ...]:
    """`count` views [B, rows, columns] of x [B, ., .]: the first is in the corner, each is one down and one right."""
    down, right = x.stride()[1:]
    return x.as_strided((count, len(x), rows, columns), (down + right, x.stride(0), down, right)).unbind()


def _in_log_space(match: Tensor, links: Tensor, target_length: Tensor, state_length: Tensor) -> _Pass:
    """The same, slower, exact for any finite scores."""
    steps = match.shape[1]
    alpha = _log_forward(match, links, target_length)
    log_z = _last(alpha, target_length, state_length)
    end = _log_end(match, state_length)
    finite_z = _finite(log_z)
    occupancy, link_use = torch.zeros_like(match), torch.zeros_like(links)
    beta = torch.full_like(end, NEGATIVE_INFINITY)
    for t in reversed(range(steps)):
        if t + 1 < steps:
            ahead = links + (match[:, t + 1] + beta)[:, None, :]
            link_use += (alpha[:, t, :, None] + ahead - finite_z[:, None, None]).exp()
            beta = ahead.logsumexp(2)
        beta = torch.where((target_length == t + 1)[:, None], end, beta)
        occupancy[:, t] = (alpha[:, t] + beta - finite_z[:, None]).exp()
    return _Pass(log_z, occupancy, link_use)


def _log_end(match: Tensor, state_length: Tensor) -> Tensor:
    """log β of the last step, [B, S]."""
    ends = torch.arange(match.shape[2], device=match.device) == (state_length - 1)[:, None]
    return torch.where(ends, 0.0, NEGATIVE_INFINITY).to(match.dtype)


def _log_forward(match: Tensor, links: Tensor, target_length: Tensor) -> Tensor:
    """log α [B, T, S]."""
    alpha = [match[:, 0]]
    for t in range(1, match.shape[1]):
        alpha.append(match[:, t] + (alpha[-1][:, :, None] + links).logsumexp(1))
    return torch.stack(alpha, dim=1)


def _last(alpha: Tensor, target_length: Tensor, state_length: Tensor) -> Tensor:
    """log α at the last target and the last vertex of each sequence, [B]: log Z."""
    return alpha[torch.arange(len(alpha), device=alpha.device), target_length - 1, state_length - 1]


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x == NEGATIVE_INFINITY, 0.0)
