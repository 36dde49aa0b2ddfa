"""The marginal prediction: one distribution per masked position, whatever the objective.

With one state it is the softmax; without transitions, CTC's probability of one label, renormalised. With k states, let
γ⁰ be the posteriors of the alignment with nothing to emit: they say where the t-th target sits before it is seen, and

    p(y_t = v) = Σ_u γ⁰_t(u) P_u(v)            token loss = -log p(y_t)
    p(y_1 ... y_m) = Z / Z⁰                    joint loss = -log(Z / Z⁰) / m

are proper distributions, Z⁰ being the mass of all paths with nothing to emit. With one state both losses are one.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.alignment import best_path, log_likelihood, path_entropy, posteriors, single_label
from unmask.modeling.pretraining import PretrainingModel
from unmask.modeling.vertices import Vertices

LOGIT_ROWS = 1024  # masked positions whose logits over the vocabulary are held at once


@torch.no_grad()
def predict(model: PretrainingModel, **batch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The marginal predictions of a masked batch, some at a time: (rows, log p [rows, V]).

    rows index the flattened [B x m] masked positions; labels are not looked at.
    """
    yield from _predictions(model, _states(model, batch), batch)


def _predictions(model: PretrainingModel, states: Tensor, batch: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """`predict` from hidden states."""
    if not model.objective.aligned:
        k = model.objective.states
        flat = states.flatten(0, 1).unflatten(0, (-1, k))
        for rows in torch.arange(len(flat), device=flat.device).split(LOGIT_ROWS // k):
            yield rows, _one_by_one(model, flat[rows])
        return
    vertices, links = _graph(model, states, batch)
    occupancy, _ = _nothing_seen(vertices, links)
    m = occupancy.shape[1]
    for row, (where, emitting) in enumerate(zip(occupancy, vertices.emitting(states), strict=True)):
        mixed = where.float() @ _log_probabilities(model, emitting).exp()
        yield row * m + torch.arange(m, device=states.device), mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()


@torch.no_grad()
def predict_jointly(model: PretrainingModel, **batch: Tensor) -> Tensor:
    """Ids [B, m] of the most probable filling of all masked positions together (anything where padded).

    With one state, the argmax at each; with k, the tokens along the best path, each vertex on it emitting its best.
    """
    if not model.objective.aligned:
        own = _states(model, batch).unflatten(1, (-1, model.objective.states))
        return torch.stack([_one_by_one(model, x).argmax(-1) for x in own])
    graph = graph_of(model, **batch)
    ends = int(graph.vertices.silent_ends)
    target = graph.vertices.emitting(graph.best_path) - ends
    on_path = (target >= 0) & (target < (graph.vertices.targets - 2 * ends)[:, None])
    rows, places = on_path.nonzero(as_tuple=True)
    best = torch.stack([x.argmax(-1) for x in graph.log_probabilities])
    filling = torch.zeros_like(batch["masked_positions"])
    filling[rows, target[rows, places]] = best[rows, places]
    return filling


class Graph(NamedTuple):
    """The states of a masked batch as a graph, before any token is seen."""

    vertices: Vertices
    links: Tensor
    """log E [B, S, S]."""
    occupancy: Tensor
    """γ⁰ [B, m, m k]: where each token sits."""
    log_probabilities: list[Tensor]
    """log P_u(v) [m k, V] of each sequence."""
    best_path: Tensor
    """[B, S]: the target that each vertex emits on the most probable path, each emitting its best token; else -1."""


@torch.no_grad()
def graph_of(model: PretrainingModel, **batch: Tensor) -> Graph:
    """The graph of an objective whose states are aligned."""
    states = _states(model, batch)
    vertices, links = _graph(model, states, batch)
    occupancy, _ = _nothing_seen(vertices, links)
    log_p = [_log_probabilities(model, x) for x in vertices.emitting(states)]
    scores = torch.stack([x.amax(-1) for x in log_p])
    match = vertices.match(scores[:, None, :].expand(-1, batch["masked_positions"].shape[1], -1))
    # A shorter sequence's last anchor has a score here, but every path ends there, so that no path gains by it.
    return Graph(vertices, links, occupancy, log_p, best_path(match, links, vertices.targets, vertices.lengths))


@torch.no_grad()
def score(model: PretrainingModel, labels: Tensor, **batch: Tensor) -> Tensor:
    """What evaluation sums, [B, 5]: targets, objective's loss, token loss, joint loss (nats), hits of the argmax.

    Hits are those of the marginal prediction. Expanded anchors are part of the objective's and the joint loss alone.
    """
    real = labels.ne(-100)
    if model.objective.aligned:
        return _score_alignment(model, labels, real, batch)
    flat, states = labels.flatten(), _states(model, batch)
    loss, hits = torch.zeros(2, *flat.shape, device=labels.device)
    for rows, log_probabilities in _predictions(model, states, batch):
        target = flat[rows].clamp(min=0)
        loss[rows] = -log_probabilities.gather(1, target[:, None])[:, 0]
        hits[rows] = (log_probabilities.argmax(-1) == target).float()
    loss, hits = ((x.view(labels.shape) * real).sum(1) for x in (loss, hits))
    own = loss
    if model.objective.states > 1:  # CTC's probabilities of one label do not sum to one
        own = -(model._position_by_position(states, labels.clamp(min=0)) * real).sum(1)
    return torch.stack([real.sum(1).float(), own, loss, loss, hits], dim=1)


def _score_alignment(model: PretrainingModel, labels: Tensor, real: Tensor, batch: dict[str, Tensor]) -> Tensor:
    states = _states(model, batch)
    vertices, links = _graph(model, states, batch)
    occupancy, log_z0 = _nothing_seen(vertices, links)
    counted = real
    if not vertices.silent_ends:
        place = torch.arange(labels.shape[1], device=labels.device)
        counted = real & (place > 0) & (place < real.sum(1, keepdim=True) - 1)
    emissions, hits = [], []
    for where, emitting, y in zip(occupancy, vertices.emitting(states), labels.clamp(min=0), strict=True):
        log_probabilities = _log_probabilities(model, emitting)
        emissions.append(log_probabilities[:, y].T)
        hits.append((where.float() @ log_probabilities.exp()).argmax(-1) == y)
    emission = torch.stack(emissions).double()
    match = vertices.match(emission.masked_fill(~real[:, :, None], 0.0))
    log_z = log_likelihood(match, links, vertices.targets, vertices.lengths)
    token = -torch.where(counted, (occupancy.log() + emission).logsumexp(2), 0.0).sum(1)
    sums = (counted.sum(1), -log_z, token, log_z0 - log_z, (torch.stack(hits) & counted).sum(1))
    return torch.stack([x.float() for x in sums], dim=1)


class Alignments(NamedTuple):
    """How a masked batch's states and paths are used; entropies in nats (ExLM §5)."""

    state_entropy: Tensor
    """[B, m] of P_u, mean over the states u where the token sits before it is seen."""
    states_used: Tensor
    """[B, m] exp of the entropy of γ_t over states, given the tokens: over how many states a token is spread."""
    at_own_position: Tensor
    """[B, m] share of γ_t, given the tokens, at the token's own position."""
    path_entropy_before: Tensor
    """[B] of the paths with nothing to emit."""
    path_entropy_after: Tensor
    """[B] of the paths given the tokens."""


@torch.no_grad()
def alignments(model: PretrainingModel, labels: Tensor, **batch: Tensor) -> Alignments:
    """States and paths of an objective whose states are aligned; entries of padded positions mean nothing."""
    k, states = model.objective.states, _states(model, batch)
    vertices, links = _graph(model, states, batch)
    before, _ = _nothing_seen(vertices, links)
    log_p = [_log_probabilities(model, emitting) for emitting in vertices.emitting(states)]
    entropy = torch.stack([-(x.exp() * x).sum(-1) for x in log_p])
    emission = torch.stack([x[:, y].T for x, y in zip(log_p, labels.clamp(min=0), strict=True)])
    match = vertices.match(emission.masked_fill(labels.eq(-100)[:, :, None], 0.0))
    after, _ = posteriors(match, links, vertices.targets, vertices.lengths)
    after = after[:, 1:-1, 1:-1] if vertices.silent_ends else after
    target, vertex = (torch.arange(n, device=after.device) for n in after.shape[1:])
    own = vertex // k == target[:, None]
    spread = -torch.where(after > 0, after * after.log(), 0.0).sum(2)
    nothing = torch.zeros_like(match)
    lengths = vertices.targets, vertices.lengths
    return Alignments(
        (before * entropy[:, None]).sum(2),
        spread.exp(),
        (after * own).sum(2),
        path_entropy(nothing, links, *lengths),
        path_entropy(match, links, *lengths),
    )


def _states(model: PretrainingModel, batch: dict[str, Tensor]) -> Tensor:
    return model.masked_states(**{name: x for name, x in batch.items() if name not in ("labels", "num_items_in_batch")})


def _graph(model: PretrainingModel, states: Tensor, batch: dict[str, Tensor]) -> tuple[Vertices, Tensor]:
    """The vertices and their log transitions [B, S, S]."""
    assert model.transitions is not None
    vertices = model.vertices(**batch)
    return vertices, model.transitions(states, vertices)


def _nothing_seen(vertices: Vertices, links: Tensor) -> tuple[Tensor, Tensor]:
    """The recursion with nothing to emit: γ⁰ [B, m, m k] of the states that can emit, and log Z⁰ [B], in float64."""
    nothing = links.new_zeros(len(links), int(vertices.targets.max()), links.shape[1])
    occupancy, _ = posteriors(nothing, links, vertices.targets, vertices.lengths)
    occupancy = occupancy[:, 1:-1, 1:-1] if vertices.silent_ends else occupancy
    return occupancy, log_likelihood(nothing, links, vertices.targets, vertices.lengths)


def _one_by_one(model: PretrainingModel, own: Tensor) -> Tensor:
    """log p [n, V] of positions that are predicted each by itself, from their states [n, k, d].

    The softmax for one state; for k, CTC's probability of one label, over those of all labels but the blank.
    """
    log_probabilities = _log_probabilities(model, own)
    if own.shape[1] == 1:
        return log_probabilities[:, 0]
    blank = model.config.blank_token_id
    label = log_probabilities.transpose(1, 2)
    joined = single_label(label, label[:, [blank]])
    joined[:, blank] = -torch.inf
    return joined.log_softmax(-1)


def _log_probabilities(model: PretrainingModel, hidden: Tensor) -> Tensor:
    """log P(v) [rows, V] in float32."""
    return model.head.logits(hidden, model.token_table).float().log_softmax(-1)
