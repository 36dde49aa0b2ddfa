"""How multimodal predictions are (ExLM §5): entropy and top-k mass at masked positions.

All objectives are compared on one quantity, the marginal prediction of a masked position (`modeling.prediction`): by
the share of tokens that are masked, by the frequency of the token that stood there, and by the part of the sequence.
With k states also the entropy of each state, of the paths, and how many states a token uses.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from unmask.data.masking import MaskedBatches, MaskedRows, SequenceRows, Vocabulary
from unmask.modeling.prediction import Alignments, alignments, predict
from unmask.modeling.pretraining import PretrainingModel
from unmask.objectives import Objective

RATIOS = (0.15, 0.3, 0.5)
TOP = 5
FREQUENCY_BINS, PARTS = 5, 4
BATCH = 16

Row = dict[str, float]


def analyse(
    model: PretrainingModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: SequenceRows,
    *,
    ratios: Sequence[float] = RATIOS,
    max_sequences: int = 256,
    seed: int = 0,
) -> dict[str, Any]:
    """Means over masked tokens, with standard errors over sequences, under `by_ratio`, `by_frequency`, `by_part`.

    The last two are at the first ratio. Each row holds `entropy` (nats), `top1` and `top5` (mass of the likeliest
    tokens), `loss` (nats), `accuracy`, `tokens`, and with aligned states those of `Alignments` under their names.
    """
    model.eval()
    count = min(len(rows), max_sequences)
    frequencies = Counter(int(i) for row in range(count) for i in rows[row])
    found: dict[str, Any] = {"objective": model.objective.to_dict(), "sequences": count, "by_ratio": {}}
    for number, ratio in enumerate(ratios):
        masked = MaskedRows(
            rows, Objective(mask_ratio=ratio), Vocabulary(tokenizer), seed, model.objective.expand_anchors
        )
        tokens = list(_tokens(model, tokenizer, masked, count))
        found["by_ratio"][f"{ratio:g}"] = _mean(tokens)
        if number == 0:
            found["by_frequency"] = _binned(tokens, [frequencies[int(t["label"])] for t in tokens], FREQUENCY_BINS)
            found["by_part"] = {
                f"{part + 1} of {PARTS}": _mean([t for t in tokens if int(t["place"] * PARTS) == part])
                for part in range(PARTS)
            }
    return found


def _tokens(
    model: PretrainingModel, tokenizer: PreTrainedTokenizerBase, masked: MaskedRows, count: int
) -> Iterator[Row]:
    """What is measured at each masked token."""
    collate = MaskedBatches(tokenizer.pad_token_id)
    inner = slice(1, -1) if model.objective.expand_anchors else slice(None)
    for start in range(0, count, BATCH):
        chosen = range(start, min(start + BATCH, count))
        batch = {name: x.to(model.device) for name, x in collate([masked[row] for row in chosen]).items()}
        labels, shape = batch["labels"], batch["labels"].shape
        measured = {name: torch.zeros(labels.numel()) for name in ("entropy", "top1", "top5", "loss", "accuracy")}
        for at, log_p in predict(model, **batch):
            at, target = at.cpu(), labels.flatten()[at].clamp(min=0)
            best = log_p.topk(TOP).values.exp().cpu()
            measured["entropy"][at] = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1).cpu()
            measured["top1"][at], measured["top5"][at] = best[:, 0], best.sum(1)
            measured["loss"][at] = -log_p.gather(1, target[:, None])[:, 0].cpu()
            measured["accuracy"][at] = (log_p.argmax(-1) == target).float().cpu()
        columns = {name: x.view(shape) for name, x in measured.items()}
        if model.objective.aligned:
            of_states: Alignments = alignments(model, **batch)
            for name, x in of_states._asdict().items():
                per_token = x if x.dim() == 2 else (x / labels.ne(-100).sum(1))[:, None].expand(shape)
                columns[name] = per_token.float().cpu()
        length = batch["visible_ids"].shape[1] + shape[1]
        for row, sequence in enumerate(chosen):
            for place in range(int((labels[row] != -100).sum()))[inner]:
                position = float(batch["masked_positions"][row, place])
                facts = {"sequence": float(sequence), "label": float(labels[row, place]), "place": position / length}
                yield facts | {name: float(x[row, place]) for name, x in columns.items()}


def _mean(tokens: list[Row]) -> Row:
    """Means over tokens; `entropy_error` is the standard error of the entropy over sequences."""
    if not tokens:
        return {"tokens": 0}
    names = [name for name in tokens[0] if name not in ("sequence", "label", "place")]
    row = {name: float(np.mean([t[name] for t in tokens])) for name in names}
    by_sequence: dict[float, list[float]] = {}
    for token in tokens:
        by_sequence.setdefault(token["sequence"], []).append(token["entropy"])
    means = [float(np.mean(values)) for values in by_sequence.values()]
    row["entropy_error"] = float(np.std(means, ddof=1) / len(means) ** 0.5) if len(means) > 1 else float("nan")
    return row | {"tokens": len(tokens)}


def _binned(tokens: list[Row], values: list[int], bins: int) -> dict[str, Row]:
    """At most `bins` bins with about as many tokens each, equal values in one, named by the range of their values."""
    array = np.array(values)
    edges = np.unique(np.quantile(array, np.linspace(0, 1, bins + 1)[1:-1], method="higher"))
    which = np.searchsorted(edges, array, side="left")
    found = {}
    for number in np.unique(which):
        chosen = np.flatnonzero(which == number)
        found[f"{array[chosen].min()} to {array[chosen].max()}"] = _mean([tokens[i] for i in chosen])
    return found
