"""Probing: frozen features and logistic or ridge regression, minutes where fine-tuning takes hours.

A text's features are the maximum over its tokens of the embeddings and of the middle and the last layer's hidden
states; a pair's are |u - v| and u·v of both texts, each encoded by itself (both InferSent's), standardised by the train
split. Regularisation is chosen by cross-validation in the train split.
"""

import logging
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, DataCollatorWithPadding

from unmask.devices import device
from unmask.evaluation.tasks import CLASSIFICATION, REGRESSION, Split, Task, training_rows
from unmask.modeling.stock import Encoder, finite

logger = logging.getLogger("unmask")

STRENGTHS = (0.001, 0.01, 0.1, 1.0)  # logistic regression's C
PENALTIES = np.logspace(-2, 5, 15)  # ridge regression's alpha
BATCH = 64


class Features:
    """The features of texts by one encoder; each text is encoded once, however often it is asked for."""

    def __init__(self, encoder: Encoder, max_length: int) -> None:
        self.encoder, self.max_length = encoder, max_length
        self.model = encoder.load(AutoModel).eval().to(device())
        self.known: dict[str, np.ndarray] = {}

    def of(self, split: Split, name: str) -> list[np.ndarray]:
        """[n, f] float32 of each text, for pairs of the first and of the second (name: what a warning calls it)."""
        texts = sorted({text for row in split.texts for text in row if text not in self.known})
        if texts:
            encoded = self.encoder.encode([(text,) for text in texts], self.max_length, name)
            self.known |= zip(texts, self._pooled(encoded), strict=True)
        columns = zip(*split.texts, strict=True)
        return [finite(np.stack([self.known[text] for text in column]), name) for column in columns]

    @torch.no_grad()
    def _pooled(self, rows: list[dict[str, Any]]) -> np.ndarray:
        """[n, 3 d]: the maximum over all tokens, boundaries included, of three layers."""
        collate = DataCollatorWithPadding(self.encoder.tokenizer)
        order = np.argsort([-len(row["input_ids"]) for row in rows], kind="stable")
        pooled: list[Any] = [None] * len(rows)
        for chosen in np.split(order, range(BATCH, len(order), BATCH)):
            batch = collate([rows[i] for i in chosen]).to(self.model.device)
            output = self.model(**batch, output_hidden_states=True)
            layers = output.hidden_states
            hidden = torch.stack([layers[0], layers[len(layers) // 2], output.last_hidden_state], dim=1).float()
            mask = batch["attention_mask"][:, None, :, None].bool()
            peak = hidden.masked_fill(~mask, -torch.inf).amax(2)
            for i, features in zip(chosen, peak.flatten(1).cpu().numpy(), strict=True):
                pooled[i] = features
        return np.stack(pooled)


def probe(features: Features, task: Task, max_train_samples: int | None, seed: int) -> dict[str, np.ndarray]:
    """Scores of each split but train by a linear model: log-probabilities, logits of several labels, or predictions.

    The seed draws the training rows, where they are limited, and the folds of the cross-validation.
    """
    train = task.splits["train"]
    train = train.take(training_rows(len(train.texts), max_train_samples, seed))
    columns, y = features.of(train, f"{task.name} (train)"), train.labels
    assert y is not None
    scaler = StandardScaler().fit(np.concatenate(columns))
    x = _joined(columns, scaler)
    rest = {name: split for name, split in task.splits.items() if name != "train"}
    others = {n: _joined(features.of(split, f"{task.name} ({n})"), scaler) for n, split in rest.items()}
    if task.kind == REGRESSION:
        model = make_pipeline(StandardScaler(), RidgeCV(PENALTIES)).fit(x, y)
        return {name: model.predict(z) for name, z in others.items()}
    if task.kind == CLASSIFICATION:
        model = _logistic(x, y, seed)
        found = {}
        for name, z in others.items():  # a class that training never saw has no column
            found[name] = np.full((len(z), len(task.labels)), -np.inf)
            found[name][:, model.classes_] = model.predict_log_proba(z)
        return found
    found = {name: np.zeros((len(z), y.shape[1])) for name, z in others.items()}
    alone = []
    for t, label in enumerate(task.labels):
        known = ~np.isnan(y[:, t])
        if len(np.unique(y[known, t])) < 2:
            alone.append(label)
            continue
        model = _logistic(x[known], y[known, t].astype(int), seed)
        for name, z in others.items():
            found[name][:, t] = model.decision_function(z)
    if alone:
        logger.warning("%s: %d tasks have one class in the train split and score 0.5.", task.name, len(alone))
    return found


def _joined(columns: list[np.ndarray], scaler: StandardScaler) -> np.ndarray:
    """Of texts their features, of pairs |u - v| and u·v."""
    scaled = [scaler.transform(column) for column in columns]
    return scaled[0] if len(scaled) == 1 else np.hstack([np.abs(scaled[0] - scaled[1]), scaled[0] * scaled[1]])


def _logistic(x: np.ndarray, y: np.ndarray, seed: int) -> Any:
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    folds = min(3, int(np.unique(y, return_counts=True)[1].min()))
    if folds < 2:
        return model.set_params(logisticregression__C=0.1).fit(x, y)
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    scoring = "roc_auc" if len(np.unique(y)) == 2 else "accuracy"
    search = GridSearchCV(model, {"logisticregression__C": STRENGTHS}, cv=splitter, scoring=scoring)
    return search.fit(x, y).best_estimator_
