"""SQuAD 2.0 (Rajpurkar et al., 2018): questions on a paragraph, some without an answer; the answer is a span of it.

Paragraphs longer than a sequence become windows that overlap. Over the windows of a question the best span and the
score of no answer (at the first token) are compared; the threshold between them is tuned on dev, as both papers do.
"""

import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    PrinterCallback,
    set_seed,
)

from unmask.data.tokenizers import boundaries
from unmask.errors import UserError
from unmask.evaluation.finetune import Settings, StockTrainer, training_arguments
from unmask.evaluation.metrics import exact_and_f1, squad
from unmask.evaluation.tasks import find_file, training_rows
from unmask.modeling.stock import Encoder, finite

LONGEST_QUESTION = 64  # tokens; what is longer is cut (BERT's)
LONGEST_ANSWER = 30  # tokens
CANDIDATES = 20  # starts and ends that are combined, and answers kept

PUBLISHED = {
    "BERT": {"exact": 73.7, "f1": 76.3},
    "RoBERTa (MAE-LM's)": {"exact": 78.3, "f1": 81.5},
    "MAE-LM": {"exact": 81.1, "f1": 84.1},
    "ExLM": {"exact": 82.0, "f1": 84.6},
}
"""The papers' rows, base models, in percent (Meng et al. 2024; Zheng et al. 2025)."""


class Question(NamedTuple):
    """A question, its paragraph, and its answers as (text, first character); none: it cannot be answered."""

    id: str
    text: str
    context: str
    answers: list[tuple[str, int]]


@dataclass(frozen=True)
class SquadData:
    """Questions to train on and to be scored by; a task like others to what compares encoders."""

    train: list[Question]
    dev: list[Question]
    name: str = "squad"
    metrics: tuple[str, ...] = ("f1", "exact")
    reported_on: str = "dev"

    @cached_property
    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(repr((self.train, self.dev)).encode())

    @property
    def references(self) -> dict[str, list[str]]:
        """Gold answers by question."""
        return {question.id: [text for text, _ in question.answers] for question in self.dev}

    def headline(self, f1: np.ndarray, rows: np.ndarray) -> float:
        """Mean F1, in [0, 1], of some questions."""
        return float(f1[rows].mean())


def load(data_dir: Path | None) -> SquadData:
    """train*.json and dev*.json of SQuAD 2.0 in a folder, or the Hub's squad_v2. Raises `UserError`."""
    if data_dir is None:
        return _from_hub()
    files = {split: find_file(data_dir, (f"{split}-v2.0.json", f"{split}*.json")) for split in ("train", "dev")}
    for split, path in files.items():
        if path is None:
            raise UserError(f"'{data_dir}' holds no {split}-v2.0.json: give the folder of SQuAD 2.0's JSON files.")
    train, dev = (read(path) for path in files.values() if path is not None)
    return SquadData(train, dev)


def read(path: Path) -> list[Question]:
    """The questions of a file. Raises `UserError` if it is not SQuAD's JSON, or an answer is not where it should be."""
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        questions = [
            Question(q["id"], q["question"], p["context"], [(a["text"], int(a["answer_start"])) for a in q["answers"]])
            for article in articles
            for p in article["paragraphs"]
            for q in p["qas"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"'{path}' is not SQuAD 2.0's JSON ({type(error).__name__}: {error}): check the file."
        ) from error
    for question in questions:
        for text, start in question.answers:
            if not 0 <= start <= len(question.context) - len(text):
                raise UserError(
                    f"'{path}', question {question.id}: the answer '{text}' does not fit at character {start} of its "
                    "paragraph."
                )
    if not questions:
        raise UserError(f"'{path}' holds no questions: check the file.")
    return questions


def _from_hub() -> SquadData:
    from datasets import load_dataset

    try:
        loaded = load_dataset("rajpurkar/squad_v2")
    except Exception as error:  # no network, a broken cache: datasets raises anything
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"SQuAD 2.0 cannot be loaded from the Hub ({reason}): give its JSON files with --data_dir FOLDER."
        ) from error
    train, dev = (
        [
            Question(
                row["id"],
                row["question"],
                row["context"],
                list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)),
            )
            for row in loaded[split]
        ]
        for split in ("train", "validation")
    )
    return SquadData(train, dev)


class Window(NamedTuple):
    """A piece of a question's paragraph behind the question, as a sequence."""

    question: int
    inputs: dict[str, list[int]]
    offsets: list[tuple[int, int] | None]
    """For each token the characters of the paragraph that it covers; None where it is none of the paragraph's."""


def windows(questions: list[Question], encoder: Encoder, max_length: int) -> list[Window]:
    """Sequences of question and paragraph, in order; a long paragraph gives several that overlap by a third."""
    tokenizer = encoder.tokenizer
    if not tokenizer.is_fast or boundaries(tokenizer)[0] is None:
        raise UserError(
            f"'{encoder.name}' has a tokenizer without character offsets or without a first token, where no answer is "
            "read: SQuAD needs a fast tokenizer with [CLS] or BOS."
        )
    longest = min(LONGEST_QUESTION, max_length // 3)
    texts = []
    for question in questions:
        cut = tokenizer(question.text, add_special_tokens=False, truncation=True, max_length=longest)
        texts.append(question.text[: cut.token_to_chars(len(cut["input_ids"]) - 1).end] if cut["input_ids"] else "?")
    encoded = tokenizer(
        texts,
        [question.context for question in questions],
        truncation="only_second",
        max_length=max_length,
        stride=max_length // 3,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    found = []
    keys = [key for key in encoded if key not in ("overflow_to_sample_mapping", "offset_mapping")]
    for place, question in enumerate(encoded["overflow_to_sample_mapping"]):
        parts = encoded.sequence_ids(place)
        offsets = [
            tuple(span) if part == 1 else None
            for span, part in zip(encoded["offset_mapping"][place], parts, strict=True)
        ]
        found.append(Window(question, {key: encoded[key][place] for key in keys}, offsets))
    return found


def span_of(window: Window, question: Question) -> tuple[int, int]:
    """The first and the last token of the first answer in a window; (0, 0) if it has none, or it is not whole in it."""
    if not question.answers:
        return 0, 0
    text, start = question.answers[0]
    inside = [
        token for token, span in enumerate(window.offsets) if span and span[0] < start + len(text) and span[1] > start
    ]
    covered = [window.offsets[token] for token in inside]
    if not inside or covered[0][0] > start or covered[-1][1] < start + len(text):  # type: ignore[index]
        return 0, 0
    return inside[0], inside[-1]


def best_answers(window: Window, question: Question, start: np.ndarray, end: np.ndarray) -> list[tuple[float, str]]:
    """The best spans of a window, as (score, text), best first; start and end are logits for each token."""
    inside = np.array([token for token, span in enumerate(window.offsets) if span and span[1] > span[0]])
    if not len(inside):
        return []
    starts = inside[np.argsort(-start[inside], kind="stable")[:CANDIDATES]]
    ends = inside[np.argsort(-end[inside], kind="stable")[:CANDIDATES]]
    pairs = [(float(start[i] + end[j]), i, j) for i in starts for j in ends if i <= j < i + LONGEST_ANSWER]
    found = []
    for value, i, j in sorted(pairs, key=lambda pair: -pair[0])[:CANDIDATES]:
        first, last = window.offsets[i], window.offsets[j]
        assert first is not None
        assert last is not None
        found.append((value, question.context[first[0] : last[1]].strip()))
    return found


class Outcome(NamedTuple):
    """What SQuAD's files hold, and its scores."""

    scores: dict[str, float]
    """In percent, at the threshold that is best for F1 on dev; `threshold` is that one."""
    f1: np.ndarray
    """[n] of each question, in [0, 1]."""
    predictions: dict[str, str]
    nbest: dict[str, list[dict[str, Any]]]
    null_odds: dict[str, float]
    """log-odds of no answer against the best one."""


def outcome(data: SquadData, found: list[Window], start: np.ndarray, end: np.ndarray) -> Outcome:
    """From the windows' logits [windows, tokens] to answers, the tuned threshold, and scores."""
    null: dict[int, float] = defaultdict(lambda: np.inf)
    answers: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for place, window in enumerate(found):
        null[window.question] = min(null[window.question], float(start[place, 0] + end[place, 0]))
        answers[window.question] += best_answers(window, data.dev[window.question], start[place], end[place])
    best, nbest, odds = {}, {}, {}
    for number, question in enumerate(data.dev):
        ranked = sorted(answers[number], key=lambda pair: -pair[0])
        unique = {text: value for value, text in reversed(ranked) if text}
        kept = sorted(unique.items(), key=lambda pair: -pair[1])[: CANDIDATES - 1]
        best[question.id] = kept[0][0] if kept else ""
        odds[question.id] = null[number] - kept[0][1] if kept else 50.0
        values = np.array([*(value for _, value in kept), null[number]])
        shares = np.exp(values - values.max())
        shares /= shares.sum()
        nbest[question.id] = [
            {"text": text, "probability": float(share)}
            for text, share in sorted(zip([*(t for t, _ in kept), ""], shares, strict=True), key=lambda pair: -pair[1])
        ]
    probability = {name: float(1 / (1 + np.exp(-min(value, 50.0)))) for name, value in odds.items()}
    references = data.references
    tuned = squad(references, best, probability)
    threshold = tuned["best_f1_thresh"]
    predictions = {name: text if probability[name] <= threshold else "" for name, text in best.items()}
    scores = squad(references, predictions) | {f: v for f, v in tuned.items() if f.startswith("best_")}
    f1 = np.array([exact_and_f1(references[q.id], predictions[q.id])[1] for q in data.dev])
    return Outcome({**scores, "threshold": threshold}, f1, predictions, nbest, odds)


def finetune(encoder: Encoder, data: SquadData, settings: Settings, seed: int, progress: bool = False) -> Outcome:
    """Fine-tune the stock question-answering head on the train questions, and answer the dev questions."""
    set_seed(seed)
    questions = [data.train[i] for i in training_rows(len(data.train), settings.max_train_samples, seed)]
    rows = []
    for window in windows(questions, encoder, settings.max_length):
        first, last = span_of(window, questions[window.question])
        rows.append({**window.inputs, "start_positions": first, "end_positions": last})
    model = encoder.load(AutoModelForQuestionAnswering)
    with tempfile.TemporaryDirectory(prefix="unmask-squad-") as scratch:
        trainer = StockTrainer(
            model=model,
            args=training_arguments(settings, seed, scratch, progress),
            train_dataset=rows,
            data_collator=DataCollatorWithPadding(encoder.tokenizer),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        found = sorted(windows(data.dev, encoder, settings.max_length), key=lambda window: -len(window.offsets))
        start, end = trainer.predict([window.inputs for window in found]).predictions[:2]
    what = f"squad, learning rate {settings.learning_rate:g}, seed {seed}"
    return outcome(data, found, finite(start, what), finite(end, what))


def write_files(folder: Path, found: Outcome) -> None:
    """predictions.json, nbest_predictions.json and null_odds.json, as the official scripts name them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("predictions.json", found.predictions),
        ("nbest_predictions.json", found.nbest),
        ("null_odds.json", found.null_odds),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
