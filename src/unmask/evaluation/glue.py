"""GLUE (Wang et al., 2019): its tasks, their files as GLUE and as the Hub have them, its metrics, the server's files.

Scores are those of the development sets, as both papers report: Matthews for CoLA, Spearman for STS-B, accuracy for the
others (Pearson and F1 stand in the JSON), the median over seeds, and the mean over tasks with MNLI matched alone.
"""

import csv
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unmask.errors import UserError
from unmask.evaluation.tasks import (
    CLASSIFICATION,
    REGRESSION,
    Split,
    Task,
    cut_dev,
    find_file,
    read_classes,
    read_numbers,
)

logger = logging.getLogger("unmask")

ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class GlueTask:
    """Where a task's files are, which of their columns are texts and labels, and the metrics."""

    folder: str
    texts: tuple[tuple[str, ...], ...]
    """For each text the names its column has: the Hub's, then GLUE's own."""
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    label_columns: tuple[str, ...] = ("label",)


TASKS: dict[str, GlueTask] = {
    "cola": GlueTask("CoLA", (("sentence",),), ("unacceptable", "acceptable"), ("matthews", "accuracy")),
    "sst2": GlueTask("SST-2", (("sentence",),), ("negative", "positive")),
    "mrpc": GlueTask(
        "MRPC",
        (("sentence1", "#1 String"), ("sentence2", "#2 String")),
        ("not_equivalent", "equivalent"),
        ("accuracy", "f1"),
        ("label", "Quality"),
    ),
    "stsb": GlueTask(
        "STS-B", (("sentence1",), ("sentence2",)), ("similarity",), ("spearman", "pearson"), ("label", "score")
    ),
    "qqp": GlueTask(
        "QQP",
        (("question1",), ("question2",)),
        ("not_duplicate", "duplicate"),
        ("accuracy", "f1"),
        ("label", "is_duplicate"),
    ),
    "mnli": GlueTask(
        "MNLI",
        (("sentence1", "premise"), ("sentence2", "hypothesis")),
        ("entailment", "neutral", "contradiction"),
        label_columns=("label", "gold_label"),
    ),
    "qnli": GlueTask("QNLI", (("question",), ("sentence",)), ENTAILMENT),
    "rte": GlueTask("RTE", (("sentence1",), ("sentence2",)), ENTAILMENT),
    "wnli": GlueTask("WNLI", (("sentence1",), ("sentence2",)), ("not_entailment", "entailment")),
}
DEFAULT = ("cola", "rte", "mrpc", "stsb", "sst2", "qnli", "qqp", "mnli")  # WNLI on request

PUBLISHED = {
    "RoBERTa (MAE-LM's)": {"mnli": 85.9, "qqp": 91.6, "qnli": 92.3, "sst2": 93.7, "cola": 64.3, "rte": 75.5}
    | {"mrpc": 88.7, "stsb": 89.5, "mean": 85.2},
    "BERT": {"mnli": 84.5, "qqp": 91.3, "qnli": 91.7, "sst2": 93.2, "cola": 58.9, "rte": 68.6, "mrpc": 87.3}
    | {"stsb": 89.5, "mean": 83.1},
    "MAE-LM": {"mean": 86.1},
    "ExLM": {"mnli": 86.9, "qqp": 92.0, "qnli": 93.1, "sst2": 93.9, "cola": 64.6, "rte": 78.8, "mrpc": 89.6}
    | {"stsb": 90.5, "mean": 86.2},
}
"""The papers' rows, base models, in percent (Meng et al. 2024; Zheng et al. 2025)."""


def load(name: str, data_dir: Path | None, split_dev: float | None, with_test: bool = False) -> Task:
    """A GLUE task from a folder of its files, or from the Hub. Raises `UserError` for what is missing or malformed.

    split_dev: share of the only labelled split that becomes dev, where there is no train.
    """
    glue = TASKS[name]
    splits = _from_hub(name, glue, with_test) if data_dir is None else _from_folder(name, glue, data_dir, with_test)
    if "train" not in splits:
        if split_dev is None:
            raise UserError(
                f"{name} has a dev split but no train split in '{data_dir}': add train.tsv, or cut the dev split with "
                "--split_dev 0.2."
            )
        splits["train"], splits["dev"] = cut_dev(splits["dev"], split_dev)
    kind = REGRESSION if glue.labels == ("similarity",) else CLASSIFICATION
    return Task(name, kind, glue.labels, glue.metrics, splits)


def _from_folder(name: str, glue: GlueTask, data_dir: Path, with_test: bool) -> dict[str, Split]:
    folder = next((f for f in (data_dir / glue.folder, data_dir / name, data_dir) if _holds_split(f)), None)
    if folder is None:
        raise UserError(
            f"'{data_dir}' holds no {glue.folder}/train.tsv or dev.tsv: give the folder of GLUE's download."
        )
    wanted = {
        "train": ("train.tsv",),
        "dev": ("dev.tsv", "validation.tsv", "dev_matched*.tsv", "validation_matched*.tsv", "*dev*.tsv"),
        "dev_mismatched": ("dev_mismatched*.tsv", "validation_mismatched*.tsv"),
    }
    if with_test:
        wanted |= {"test": ("test.tsv", "test_matched*.tsv"), "test_mismatched": ("test_mismatched*.tsv",)}
    found = {split: find_file(folder, patterns) for split, patterns in wanted.items()}
    splits = {split: read(path, glue, labelled=not split.startswith("test")) for split, path in found.items() if path}
    if "dev" not in splits:
        raise UserError(f"'{folder}' holds no dev.tsv (or validation.tsv): add it.")
    return splits


def _holds_split(folder: Path) -> bool:
    return folder.is_dir() and (find_file(folder, ("train.tsv", "*dev*.tsv", "validation*.tsv")) is not None)


def read(path: Path, glue: GlueTask, labelled: bool = True) -> Split:
    """One file: tab-separated, quotes are characters, a header but for CoLA's train and dev as GLUE packs them.

    Rows with another number of fields are left out and counted.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if not rows:
        raise UserError(f"'{path}' is empty: it must hold a header and rows.")
    header = rows[0]
    if glue.folder == "CoLA" and "sentence" not in header and len(header) == 4:
        header = ["source", "label", "star", "sentence"]
    else:
        rows = rows[1:]
    kept = [row for row in rows if len(row) == len(header)]
    # MNLI's and MRPC's own files have rows whose last field holds a tab, or lack it.
    if len(kept) < len(rows):
        logger.warning(
            "%s: %d of %d rows left out, because they do not have %d fields.",
            path,
            len(rows) - len(kept),
            len(rows),
            len(header),
        )
    texts = list(zip(*(_column(kept, header, names, path) for names in glue.texts), strict=True))
    if not labelled:
        return Split(texts, None)
    return Split(texts, _labels(_column(kept, header, glue.label_columns, path), glue, f"'{path}'"))


def _column(rows: list[list[str]], header: list[str], names: Sequence[str], path: Path) -> list[str]:
    for name in names:
        if name in header:
            place = header.index(name)
            return [row[place] for row in rows]
    raise UserError(f"'{path}' has no column '{names[0]}': its columns are {', '.join(header)}.")


def _labels(raw: list[Any], glue: GlueTask, where: str) -> np.ndarray:
    return read_numbers(raw, where) if glue.labels == ("similarity",) else read_classes(raw, glue.labels, where)


def _from_hub(name: str, glue: GlueTask, with_test: bool) -> dict[str, Split]:
    from datasets import load_dataset

    try:
        loaded = load_dataset("nyu-mll/glue", name)
    except Exception as error:  # no network, no such name, a broken cache: datasets raises anything
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"GLUE's {name} cannot be loaded from the Hub ({reason}): give its files with --data_dir FOLDER."
        ) from error
    names = {"train": "train", "validation": "dev", "validation_matched": "dev"}
    names |= {"validation_mismatched": "dev_mismatched"}
    if with_test:
        names |= {"test": "test", "test_matched": "test", "test_mismatched": "test_mismatched"}
    splits = {}
    for theirs, ours in names.items():
        if theirs in loaded:
            table = loaded[theirs]
            columns = [next(c for c in options if c in table.column_names) for options in glue.texts]
            texts = list(zip(*(table[column] for column in columns), strict=True))
            where = f"GLUE's {name} ({theirs})"
            splits[ours] = Split(texts, None if ours.startswith("test") else _labels(table["label"], glue, where))
    return splits


SERVER_FILES = {
    **{name: {"test": f"{task.folder}.tsv"} for name, task in TASKS.items() if name != "mnli"},
    "mnli": {"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"},
}
"""The names under which the GLUE server takes predictions."""


def write_server_file(path: Path, name: str, scores: np.ndarray) -> None:
    """Predictions of a test split as the GLUE server reads them: index and prediction, by name where it wants names.

    scores: logits [n, classes], or similarities [n], which are kept between 0 and 5.
    """
    if scores.ndim == 1:
        predictions = [f"{value:.3f}" for value in np.clip(scores, 0, 5)]
    else:
        by_name = name in ("mnli", "qnli", "rte")
        predictions = [TASKS[name].labels[i] if by_name else str(i) for i in scores.argmax(1)]
    lines = ["index\tprediction", *(f"{row}\t{value}" for row, value in enumerate(predictions))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
