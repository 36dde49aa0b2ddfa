"""ExLM's graph for one text: states, what each would emit, links, the best path and where each token sits."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from unmask.data.masking import text_batch
from unmask.data.tokenizers import shown
from unmask.errors import UserError
from unmask.modeling.prediction import graph_of
from unmask.modeling.pretraining import PretrainingModel

FEWEST = 0.02  # probability below which a link is not drawn


class Vertex(NamedTuple):
    """A state of a masked position, or an anchor."""

    position: int
    """In the sequence; -1 for what stands before and behind the states."""
    state: int
    """From 1; 0 for an anchor."""
    tokens: list[tuple[str, float]]
    """Its most probable tokens; none for an anchor."""
    occupancy: list[float]
    """For each masked token the probability that it sits here, before it is seen."""


class Lattice(NamedTuple):
    """The graph of one text."""

    text: list[str]
    """The sequence's tokens, [MASK]s included."""
    vertices: list[Vertex]
    links: np.ndarray
    """[S, S] transition probabilities."""
    best_path: list[int]
    """Vertices on the most probable path, each emitting its most probable token."""


def lattice(model: PretrainingModel, tokenizer: PreTrainedTokenizerBase, text: str, top_k: int = 3) -> Lattice:
    """The lattice of a text with [MASK]s. Raises `UserError` for a model without aligned states."""
    if not model.objective.aligned:
        raise UserError(
            "A lattice is what ExLM and MAE-ExLM have, but this run predicts each masked position by itself: give a "
            "run of exlm or mae-exlm."
        )
    model.eval()
    batch = text_batch(tokenizer, text, model.config.max_length, model.objective.expand_anchors)
    graph = graph_of(model, **batch)
    k, silent = model.objective.states, graph.vertices.silent_ends
    anchor = Vertex(-1, 0, [], [])
    positions = batch["masked_positions"][0].tolist()
    vertices = [anchor] if silent else []
    for place, log_p in enumerate(graph.log_probabilities[0]):
        best = log_p.exp().topk(top_k)
        tokens = [(shown(tokenizer, i), p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        vertices.append(Vertex(positions[place // k], place % k + 1, tokens, graph.occupancy[0, :, place].tolist()))
    vertices += [anchor] if silent else []
    visible = zip(batch["visible_positions"][0].tolist(), batch["visible_ids"][0].tolist(), strict=True)
    at = {position: shown(tokenizer, i) for position, i in visible} | dict.fromkeys(positions, tokenizer.mask_token)
    path = torch.nonzero(graph.best_path[0] >= 0)[:, 0].tolist()
    return Lattice([at[p] for p in sorted(at)], vertices, graph.links[0].exp().cpu().numpy(), path)


def draw(found: Lattice, path: Path | None = None) -> Any:
    """The lattice as a figure, and as a file if a path is given (SVG or PNG, by its suffix).

    Each state with its likeliest tokens and the probability that some token sits there; links by their probability.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = {p: i for i, p in enumerate(dict.fromkeys(v.position for v in found.vertices if v.state), start=1)}
    states, width = max(v.state for v in found.vertices), len(columns) + 1
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.9 * width, 1 + 0.9 * states))
    places = [
        (columns[v.position], -v.state) if v.state else (0 if number == 0 else width, -(states + 1) / 2)
        for number, v in enumerate(found.vertices)
    ]
    on_path = set(zip(found.best_path, found.best_path[1:], strict=False))
    for w, u in zip(*np.nonzero(found.links > FEWEST), strict=True):
        best = (int(w), int(u)) in on_path
        style = {"arrowstyle": "-|>", "color": "tab:orange" if best else "tab:blue", "lw": 2 if best else 1}
        style |= {"shrinkA": 18, "shrinkB": 18}  # from edge to edge of the boxes
        strength = 1.0 if best else float(found.links[w, u])
        axes.annotate("", places[u], places[w], arrowprops={**style, "alpha": strength})
    for number, (vertex, (x, y)) in enumerate(zip(found.vertices, places, strict=True)):
        label = "\n".join(f"{token} {probability:.0%}" for token, probability in vertex.tokens[:2])
        label += f"\nposterior {sum(vertex.occupancy):.0%}" if vertex.state else found.text[0 if number == 0 else -1]
        box = {"boxstyle": "round", "fc": "white", "ec": "tab:orange" if number in found.best_path else "0.6"}
        label = label.replace("$", r"\$")  # what matplotlib would take for mathematics
        axes.text(x, y, label, ha="center", va="center", fontsize=8, bbox=box, color="black")
    axes.set_xlim(-0.5, width + 0.5)
    axes.set_ylim(-states - 0.7, -0.3)
    axes.set_xticks([*columns.values()], [f"position {p}" for p in columns])
    axes.set_yticks([-s for s in range(1, states + 1)], [f"state {s}" for s in range(1, states + 1)])
    for side in axes.spines.values():
        side.set_visible(False)
    figure.tight_layout()
    if path is not None:
        figure.savefig(path)
        pyplot.close(figure)
    return figure
