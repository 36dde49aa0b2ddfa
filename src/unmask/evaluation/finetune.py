"""Fine-tuning by the transformers Trainer with the stock classification head, as RoBERTa and both papers do it."""

import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from unmask.devices import trainer_defaults
from unmask.evaluation.metrics import score
from unmask.evaluation.moleculenet import random_smiles
from unmask.evaluation.tasks import CLASSIFICATION, REGRESSION, Split, Task, training_rows
from unmask.modeling.stock import Encoder, finite


@dataclass(frozen=True)
class Settings:
    """One point of the grid. Learning rate falls linearly after its warm-up; AdamW (0.9, 0.98), weight decay 0.1."""

    learning_rate: float
    batch_size: int
    epochs: float
    max_length: int
    max_train_samples: int | None = None
    early_stopping: int = 0
    """Epochs without a better dev score after which training stops, its best epoch kept; 0: never."""
    enumerate_smiles: bool = False
    """Another SMILES of each training molecule in each epoch."""


Rows = dict[str, list[dict[str, list[int]]]]


class StockTrainer(Trainer):
    """The Trainer, with evaluation in the rows' own order: where training groups by length, transformers' would too."""

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(eval_dataset)


class _Examples(torch.utils.data.Dataset):
    """Encoded rows with labels; of molecules, if wanted, another SMILES each time they are asked for."""

    def __init__(self, rows: list[dict[str, Any]], labels: np.ndarray | None) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row] if self.labels is None else {**self.rows[row], "labels": self.labels[row].tolist()}


class _Enumerated(_Examples):
    """Molecules, each time written another way; the ways follow from the seed."""

    def __init__(self, split: Split, labels: np.ndarray, encoder: Encoder, max_length: int, seed: int) -> None:
        super().__init__([], labels)
        self.split, self.encoder, self.max_length = split, encoder, max_length
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.split.texts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        smiles = random_smiles(self.split.texts[row][0], int(self.rng.integers(1, 2**31 - 1)))
        assert self.labels is not None
        encoded = self.encoder.tokenizer(smiles, truncation=True, max_length=self.max_length)
        return {**encoded, "labels": self.labels[row].tolist()}


def loss_of(kind: str) -> Any:
    """The loss that the Trainer calls, mean over labels: cross-entropy, squared error, or that of measured flags."""

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs.logits.float()
        if kind == CLASSIFICATION:
            return F.cross_entropy(logits, labels)
        if kind == REGRESSION:
            return F.mse_loss(logits[:, 0], labels)
        known = ~labels.isnan()
        each = F.binary_cross_entropy_with_logits(logits, labels.nan_to_num(), reduction="none")
        return (each * known).sum() / known.sum().clamp(min=1)

    return loss


STOPS_EARLY = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1}
STOPS_EARLY |= {"load_best_model_at_end": True, "greater_is_better": True}


def training_arguments(
    settings: Settings, seed: int, scratch: str, progress: bool, **changes: Any
) -> TrainingArguments:
    """RoBERTa's way to fine-tune: AdamW, 6% warm-up, linear decay; nothing is saved or logged."""
    defaults: dict[str, Any] = {
        "output_dir": scratch,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": 128,
        "num_train_epochs": settings.epochs,
        "learning_rate": settings.learning_rate,
        "warmup_steps": 0.06,
        "weight_decay": 0.1,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-6,
        "seed": seed,
        "train_sampling_strategy": "random" if settings.enumerate_smiles else "group_by_length",
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": not progress,
        "remove_unused_columns": False,
    }
    return TrainingArguments(**{**defaults, **trainer_defaults(), **changes})


def finetune(
    encoder: Encoder, task: Task, rows: Rows, settings: Settings, seed: int, progress: bool = False
) -> dict[str, np.ndarray]:
    """Scores of each split but train by the model after fine-tuning: logits, or predictions of a regression.

    rows: the task's splits as `Encoder.encode` has them. Raises `UserError` for an encoder without a stock
    classification head, and for a training that diverges.
    """
    set_seed(seed)
    chosen = training_rows(len(rows["train"]), settings.max_train_samples, seed)
    train, train_rows = task.splits["train"].take(chosen), [rows["train"][i] for i in chosen]
    assert train.labels is not None
    # A regression's labels are brought to mean 0 and variance 1; its predictions are brought back.
    middle, spread = 0.0, 1.0
    labels = train.labels
    if task.kind == REGRESSION:
        middle, spread = float(labels.mean()), float(labels.std()) or 1.0
        labels = (labels - middle) / spread
    labels = labels if task.kind == CLASSIFICATION else labels.astype(np.float32)
    outputs = 1 if task.kind == REGRESSION else len(task.labels)
    model = encoder.load(AutoModelForSequenceClassification, num_labels=outputs)
    examples: _Examples = _Examples(train_rows, labels)
    if settings.enumerate_smiles:
        examples = _Enumerated(train, labels, encoder, settings.max_length, seed)

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        split = task.splits[task.selected_on]
        assert split.labels is not None
        return score(task.metrics[:1], split.labels, _as_scores(prediction.predictions, task.kind))

    patience = settings.early_stopping
    with tempfile.TemporaryDirectory(prefix="unmask-finetune-") as scratch:
        args = training_arguments(
            settings,
            seed,
            scratch,
            progress,
            **({"metric_for_best_model": task.metrics[0], **STOPS_EARLY} if patience else {}),
        )
        trainer = StockTrainer(
            model=model,
            args=args,
            train_dataset=examples,
            eval_dataset=_Examples(rows[task.selected_on], _eval_labels(task)) if patience else None,
            data_collator=DataCollatorWithPadding(encoder.tokenizer),
            compute_loss_func=loss_of(task.kind),
            compute_metrics=metrics if patience else None,
            callbacks=[EarlyStoppingCallback(patience)] if patience else [],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        what = f"{task.name}, learning rate {settings.learning_rate:g}, seed {seed}"
        found = {}
        for name, split_rows in rows.items():
            if name != "train":
                raw = _predict(trainer, split_rows)
                found[name] = finite(_as_scores(raw, task.kind) * spread + middle, what)
        return found


def _eval_labels(task: Task) -> np.ndarray:
    labels = task.splits[task.selected_on].labels
    assert labels is not None
    return labels if task.kind == CLASSIFICATION else labels.astype(np.float32)


def _predict(trainer: StockTrainer, rows: list[dict[str, Any]]) -> np.ndarray:
    """Logits [n, outputs]; rows of like length share a batch, so that there is little padding."""
    order = np.argsort([-len(row["input_ids"]) for row in rows], kind="stable")
    predictions = trainer.predict(_Examples([rows[i] for i in order], None)).predictions
    logits = predictions[0] if isinstance(predictions, tuple) else predictions
    found = np.empty_like(logits)
    found[order] = logits
    return found


def _as_scores(predictions: Any, kind: str) -> np.ndarray:
    logits = predictions[0] if isinstance(predictions, tuple) else predictions
    scores = np.asarray(logits, dtype=np.float64)
    return scores[:, 0] if kind == REGRESSION else scores
