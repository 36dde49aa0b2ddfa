"""A user's own table as a task: CSV, TSV, JSONL or Parquet; one or two text columns; one label column or more."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from unmask.data.corpus import FORMATS
from unmask.errors import UserError, nearest
from unmask.evaluation.tasks import (
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    Split,
    Task,
    cut_dev,
    read_classes,
    read_flags,
    read_numbers,
)

KINDS = (CLASSIFICATION, REGRESSION, MULTI_LABEL)
METRICS: dict[str, tuple[str, ...]] = {
    CLASSIFICATION: ("accuracy", "macro_f1", "matthews"),
    REGRESSION: ("spearman", "pearson", "r2"),
    MULTI_LABEL: ("roc_auc",),
}
MOST_CLASSES = 100  # more distinct labels than this, all numbers: a regression


def read_table(path: Path) -> pd.DataFrame:
    """A table from .csv, .tsv, .json(l) or .parquet, also .gz; what CSV and TSV hold stays text. Raises `UserError`."""
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in FORMATS:
        raise UserError(f"'{path}' is no table that can be read: give CSV, TSV, JSONL or Parquet.")
    if not path.is_file():
        raise UserError(f"There is no file '{path}': check the path.")
    kind, options = FORMATS[suffix]
    try:
        if kind == "csv":
            return pd.read_csv(path, dtype=str, **{**options, "keep_default_na": False, "na_values": []})
        return pd.read_parquet(path) if kind == "parquet" else pd.read_json(path, lines=suffix == ".jsonl", dtype=False)
    except (ValueError, OSError, pd.errors.ParserError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"'{path}' cannot be read ({reason}): give a table with a header in UTF-8.") from error


def load(
    train: Path,
    dev: Path | None,
    text_columns: Sequence[str],
    label_columns: Sequence[str],
    kind: str | None = None,
    split_dev: float | None = None,
) -> Task:
    """A task from a table and another one for dev, or a share of the first.

    kind: by default multi-label for several label columns, regression for more than 100 distinct numbers, else
    classification with the classes in the order of their names. Raises `UserError`.
    """
    if kind is not None and kind not in KINDS:
        raise UserError(f"kind is '{kind}': {nearest(kind, KINDS)}")
    if len(text_columns) not in (1, 2):
        raise UserError(f"{len(text_columns)} text columns are named, but a row is one text or a pair: name 1 or 2.")
    if kind in (CLASSIFICATION, REGRESSION) and len(label_columns) > 1:
        raise UserError(f"kind={kind} takes one label column, but {len(label_columns)} are named.")
    tables = {"train": (train, read_table(train))}
    if dev is None and split_dev is None:
        raise UserError("No dev table is given: name one with --dev, or cut a share of the rows with --split_dev 0.2.")
    if dev is not None:
        tables["dev"] = (dev, read_table(dev))
    for path, table in tables.values():
        for column in (*text_columns, *label_columns):
            if column not in table.columns:
                raise UserError(
                    f"'{path}' has no column '{column}': {nearest(column, [str(c) for c in table.columns])}"
                )
        for column in text_columns:
            empty = [
                row for row, text in enumerate(table[column]) if text is None or text != text or not str(text).strip()
            ]
            if len(empty):
                raise UserError(
                    f"'{path}' has {len(empty)} rows without a text in '{column}', row {empty[0] + 1} for one: leave "
                    "them out."
                )
    raw = tables["train"][1][list(label_columns)]
    if kind is None:
        kind = MULTI_LABEL if len(label_columns) > 1 else _guess(raw[label_columns[0]])
    classes = tuple(label_columns)
    if kind == CLASSIFICATION:
        known_labels = {str(value).strip() for value in raw[label_columns[0]]}
        classes = tuple(sorted(known_labels - {"", "nan", "None"}))
        if len(classes) == 1:
            raise UserError(
                f"All rows of '{train}' have the label '{classes[0]}': a classifier needs rows of two classes at least."
            )
    splits = {}
    for split, (path, table) in tables.items():
        texts = list(zip(*(table[column].astype(str) for column in text_columns), strict=True))
        found = table[list(label_columns)].to_numpy(dtype=object)
        if kind == CLASSIFICATION:
            labels: np.ndarray = read_classes(found[:, 0], classes, f"'{path}'")
        elif kind == REGRESSION:
            labels = read_numbers(found[:, 0], f"'{path}'")
        else:
            labels = read_flags(found, classes, f"'{path}'")
        splits[split] = Split(texts, labels)
    if dev is None:
        assert split_dev is not None
        splits["train"], splits["dev"] = cut_dev(splits["train"], split_dev)
    return Task(train.stem, kind, classes, METRICS[kind], splits)


def _guess(labels: pd.Series) -> str:
    numbers = pd.to_numeric(labels, errors="coerce")
    return REGRESSION if numbers.notna().all() and numbers.nunique() > MOST_CLASSES else CLASSIFICATION
