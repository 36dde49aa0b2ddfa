"""A task: texts with labels in named splits, and what it is scored by: one of GLUE, of MoleculeNet, a user's table."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from unmask.errors import UserError, nearest
from unmask.evaluation.metrics import score

logger = logging.getLogger("unmask")

CLASSIFICATION, REGRESSION, MULTI_LABEL = "classification", "regression", "multi-label"


class Split(NamedTuple):
    """Texts and their labels."""

    texts: list[tuple[str, ...]]
    """One text each, or a pair."""
    labels: np.ndarray | None
    """classification: int64 [n] places in `Task.labels`; regression: float64 [n]; multi-label: float64 [n, tasks], NaN
    where it was not measured; None for a test split without labels."""

    def take(self, rows: Sequence[int] | np.ndarray) -> "Split":
        return Split([self.texts[i] for i in rows], None if self.labels is None else self.labels[rows])


@dataclass(frozen=True)
class Task:
    """One data set to fine-tune on and to be scored by."""

    name: str
    kind: str
    """`classification`, `regression` or `multi-label`."""
    labels: tuple[str, ...]
    """Names of the classes; of the tasks if multi-label; one name if regression."""
    metrics: tuple[str, ...]
    """Names in `metrics.METRICS`; the first is the one that means and tables show."""
    splits: dict[str, Split]
    """`train` and others."""
    selected_on: str = "dev"
    """The split whose first metric chooses among hyperparameters."""
    reported_on: str = "dev"
    """The split that tables show."""

    def __post_init__(self) -> None:
        for name in ("train", self.selected_on, self.reported_on):
            if not len(self.splits[name].texts):
                raise UserError(f"The {name} split of {self.name} is empty: give it at least one row.")
        labels = self.splits["train"].labels
        if self.kind == CLASSIFICATION and labels is not None and len(np.unique(labels)) < 2:
            raise UserError(
                f"All rows of {self.name}'s train split have the label '{self.labels[labels[0]]}': a classifier needs "
                "rows of two classes at least."
            )

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the texts and the labels of any split."""
        digest = xxhash.xxh3_128()
        for name, split in self.splits.items():
            digest.update(repr((name, split.texts)).encode())
            digest.update(b"" if split.labels is None else np.ascontiguousarray(split.labels).tobytes())
        return digest.hexdigest()

    def headline(self, predictions: np.ndarray, rows: np.ndarray) -> float:
        """The first metric of some rows of the reported split."""
        labels = self.splits[self.reported_on].labels
        assert labels is not None
        return score(self.metrics[:1], labels[rows], predictions[rows])[self.metrics[0]]

    def scored_splits(self) -> list[str]:
        """Names of the splits that are scored: all with labels but train."""
        return [name for name, split in self.splits.items() if name != "train" and split.labels is not None]


def training_rows(count: int, most: int | None, seed: int) -> np.ndarray:
    """Which of `count` training rows are trained on: all, or `most` of them drawn by `seed`; ascending."""
    if most is None or most >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])


def cut_dev(split: Split, share: float) -> tuple[Split, Split]:
    """(the rest, `share` of the rows), drawn once and for all seeds."""
    order = np.random.default_rng(0).permutation(len(split.texts))
    count = max(1, round(share * len(order)))
    return split.take(np.sort(order[count:])), split.take(np.sort(order[:count]))


def read_classes(raw: Iterable[Any], classes: Sequence[str], where: str) -> np.ndarray:
    """Labels as places [n] in `classes`, from their names or their numbers. Raises `UserError` for any other.

    where: what the sentence names, for example a file.
    """
    places = {name: place for place, name in enumerate(classes)}
    places |= {str(place): place for place in range(len(classes)) if str(place) not in places}
    found = np.empty(len(raw := list(raw)), dtype=np.int64)
    for row, value in enumerate(raw):
        text = str(value).strip()
        if text.endswith(".0") and text[:-2] in places:  # a column of numbers with holes in it
            text = text[:-2]
        if text not in places:
            raise UserError(
                f"{where}, row {row + 1}: the label is '{value}', but must be one of {', '.join(classes)}."
                if text and text != "nan"
                else f"{where}, row {row + 1} has no label: leave the row out, or give it one of {', '.join(classes)}."
            )
        found[row] = places[text]
    return found


def read_numbers(raw: Iterable[Any], where: str) -> np.ndarray:
    """Labels as numbers [n]. Raises `UserError` for one that is missing, not a number or not finite."""
    found = np.empty(len(raw := list(raw)), dtype=np.float64)
    for row, value in enumerate(raw):
        try:
            found[row] = float(value)
        except (TypeError, ValueError):
            found[row] = np.nan
        if not np.isfinite(found[row]):
            raise UserError(f"{where}, row {row + 1}: the label is '{value}', but must be a finite number.")
    return found


def read_flags(raw: np.ndarray, names: Sequence[str], where: str) -> np.ndarray:
    """Labels 0, 1 or NaN (not measured) [n, tasks]. Raises `UserError` for any other value."""
    found = np.full(raw.shape, np.nan)
    for column, name in enumerate(names):
        for row, value in enumerate(raw[:, column]):
            text = str(value).strip()
            if text in ("0", "0.0", "1", "1.0", "False", "True"):
                found[row, column] = text in ("1", "1.0", "True")
            elif text not in ("", "nan", "None", "<NA>"):
                raise UserError(
                    f"{where}, row {row + 1}: '{name}' is '{value}', but must be 0, 1, or empty (not measured)."
                )
    return found


def choose(names: Sequence[str] | None, known: Sequence[str], benchmark: str) -> list[str]:
    """The tasks that are asked for. Raises `UserError` for an unknown one."""
    for name in names or ():
        if name not in known:
            raise UserError(f"{benchmark} has no task '{name}': {nearest(name, known)}")
    return list(dict.fromkeys(names)) if names else list(known)


def find_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of `names` (patterns) that is in the folder."""
    for name in names:
        if found := sorted(folder.glob(name)):
            return found[0]
    return None
