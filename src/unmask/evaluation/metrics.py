"""What a model is scored by: scikit-learn's and SciPy's metrics, ROC-AUC with missing labels, SQuAD 2.0's.

Scores here are what a model gives: logits [n, classes] for classification, predictions [n] for regression, logits
[n, tasks] for several labels at once, of which NaN stands for one that was not measured. All metrics lie in [-1, 1].
"""

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, r2_score, roc_auc_score

Metric = Callable[[np.ndarray, np.ndarray], float]


def accuracy(labels: np.ndarray, scores: np.ndarray) -> float:
    """Share of labels [n] that are the argmax of scores [n, classes]."""
    return float(accuracy_score(labels, scores.argmax(1)))


def f1(labels: np.ndarray, scores: np.ndarray) -> float:
    """F1 of class 1 (GLUE's, for MRPC and QQP); 0 where it is neither there nor predicted."""
    return float(f1_score(labels, scores.argmax(1), zero_division=0.0))


def macro_f1(labels: np.ndarray, scores: np.ndarray) -> float:
    """Mean over the classes of their F1."""
    return float(f1_score(labels, scores.argmax(1), average="macro", zero_division=0.0))


def matthews(labels: np.ndarray, scores: np.ndarray) -> float:
    """Matthews' correlation; 0 where only one class is predicted."""
    return float(matthews_corrcoef(labels, scores.argmax(1)))


def pearson(labels: np.ndarray, scores: np.ndarray) -> float:
    """Pearson's correlation; 0 where the predictions are all the same."""
    return _correlation(pearsonr, labels, scores)


def spearman(labels: np.ndarray, scores: np.ndarray) -> float:
    """Spearman's rank correlation; 0 where the predictions are all the same."""
    return _correlation(spearmanr, labels, scores)


def _correlation(of: Callable, labels: np.ndarray, scores: np.ndarray) -> float:
    if np.ptp(labels) == 0 or np.ptp(scores) == 0:
        return 0.0
    return float(of(labels, scores).statistic)


def r2(labels: np.ndarray, scores: np.ndarray) -> float:
    """Share of the labels' variance that the predictions explain."""
    return float(r2_score(labels, scores))


def roc_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Mean over the tasks (columns) of ROC-AUC on the rows that were measured; NaN if no task has both classes.

    A task without both classes among its rows has none and is left out (`tasks_without_both_classes`).
    """
    found = [
        roc_auc_score(labels[known, t], scores[known, t])
        for t, known in enumerate(~np.isnan(labels).T)
        if len(np.unique(labels[known, t])) == 2
    ]
    return float(np.mean(found)) if found else float("nan")


def tasks_without_both_classes(labels: np.ndarray) -> list[int]:
    """Columns of labels [n, tasks] that hold fewer than two classes, NaN not counted."""
    return [t for t, column in enumerate(labels.T) if len(np.unique(column[~np.isnan(column)])) < 2]


METRICS: dict[str, Metric] = {
    function.__name__: function for function in (accuracy, f1, macro_f1, matthews, pearson, spearman, r2, roc_auc)
}


def score(names: Sequence[str], labels: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """The named metrics of one split."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one class alone in a sample: the metric is defined above
        return {name: METRICS[name](labels, scores) for name in names}


# --- SQuAD 2.0 --------------------------------------------------------------------------------------------------------

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = set(string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces: what SQuAD compares."""
    kept = "".join(character for character in text.lower() if character not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", kept).split())


def exact_and_f1(answers: Sequence[str], prediction: str) -> tuple[float, float]:
    """Exact match and token F1 of a prediction against the best of the gold answers; none means unanswerable."""
    golds = [gold for gold in answers if normalize_answer(gold)] or [""]
    exact = max(float(normalize_answer(gold) == normalize_answer(prediction)) for gold in golds)
    return exact, max(_token_f1(normalize_answer(gold).split(), normalize_answer(prediction).split()) for gold in golds)


def _token_f1(gold: list[str], found: list[str]) -> float:
    if not gold or not found:
        return float(gold == found)
    shared = sum((Counter(gold) & Counter(found)).values())
    return 2 * shared / (len(gold) + len(found))


def squad(
    references: Mapping[str, Sequence[str]],
    predictions: Mapping[str, str],
    no_answer_probability: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """SQuAD 2.0's scores in percent: `exact` and `f1`, over all questions and over those with and without an answer.

    references: gold answers by question, none for an unanswerable one; predictions: answers, "" for none. With
    no_answer_probability also the best scores that some threshold on it would give, and the threshold. Raises
    `ValueError` naming a question without a prediction.
    """
    missing = [name for name in references if name not in predictions]
    if missing:
        raise ValueError(
            f"{len(missing)} questions have no prediction, '{missing[0]}' for one: predict '' for no answer."
        )
    both = {name: exact_and_f1(answers, predictions[name]) for name, answers in references.items()}
    summary: dict[str, float] = _means("", both, list(references))
    for prefix, wanted in (("HasAns_", True), ("NoAns_", False)):
        names = [name for name in references if bool(references[name]) == wanted]
        if names:
            summary |= _means(prefix, both, names)
    if no_answer_probability is not None:
        order = sorted(references, key=lambda name: no_answer_probability[name])
        for place, metric in enumerate(("exact", "f1")):
            # Everything unanswered at first; then one question after the other is answered.
            gains = [both[n][place] if references[n] else -float(bool(predictions[n])) for n in order]
            totals = np.cumsum([sum(not references[n] for n in references), *gains])
            best = int(totals.argmax())
            summary[f"best_{metric}"] = 100.0 * float(totals[best]) / len(references)
            summary[f"best_{metric}_thresh"] = no_answer_probability[order[best - 1]] if best else 0.0
    return summary


def _means(prefix: str, both: Mapping[str, tuple[float, float]], names: list[str]) -> dict[str, float]:
    exact, f1_ = (100.0 * sum(both[name][place] for name in names) / len(names) for place in (0, 1))
    return {f"{prefix}exact": exact, f"{prefix}f1": f1_, f"{prefix}total": len(names)}
