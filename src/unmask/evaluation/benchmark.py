"""A benchmark: encoders x tasks x hyperparameters x seeds, one cell each, run once; one JSON and one table.

A cell is a file named after all that decides it (weights, data, method, settings, seed), so that an interrupted
benchmark goes on where it stopped and a changed one computes what has changed alone.
"""

import dataclasses
import importlib.metadata
import itertools
import json
import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from unmask import __version__
from unmask.errors import UserError
from unmask.evaluation import glue, moleculenet, squad, table
from unmask.evaluation.compare import Difference, paired_bootstrap
from unmask.evaluation.finetune import Settings, finetune
from unmask.evaluation.metrics import score
from unmask.evaluation.probe import Features, probe
from unmask.evaluation.tasks import Task, choose
from unmask.files import write_whole
from unmask.modeling.stock import Encoder

logger = logging.getLogger("unmask")

GRIDS: dict[str, dict[str, list[float]]] = {
    "default": {"learning_rates": [], "batch_sizes": [32], "epochs": [3]},
    "roberta": {"learning_rates": [1e-5, 2e-5, 3e-5], "batch_sizes": [16, 32], "epochs": [10]},
}
"""Hyperparameters by name; `roberta` is the grid RoBERTa published for GLUE. Without a learning rate: `usual_rate`."""

SEEDS = {"moleculenet": 3}


def usual_rate(width: int) -> float:
    """2e-5 for an encoder of 768, as BERT and RoBERTa; proportionally more for a narrower one."""
    return 2e-5 * max(1.0, 768 / width)


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class EvaluationArguments:
    """What is scored, on what and how."""

    tasks: str | None = _flag(None, "Tasks, as in --tasks cola,rte. Default: all of the benchmark.")
    seeds: int | None = _flag(None, "Fine-tunings of each task, with seeds 1, 2, ... Default: 5; MoleculeNet 3.")
    data_dir: str | None = _flag(None, "Folder of the benchmark's files. Default: the Hub, where the set is there.")
    split_dev: float | None = _flag(None, "Where train or dev is missing: share of the rows that becomes dev.")
    output_dir: str = _flag("evaluation", "Where cells, BENCHMARK.json and files go; what is there is not run again.")
    grid: str = _flag("default", "default: 1 setting, 3 epochs; roberta: RoBERTa's 6, 10 epochs.")
    learning_rates: str | None = _flag(None, "Grid of learning rates, as in 1e-5,3e-5. Default: 2e-5 x 768 / width.")
    batch_sizes: str | None = _flag(None, "Grid of batch sizes.")
    epochs: str | None = _flag(None, "Grid of epochs.")
    max_length: int | None = _flag(None, "Tokens of a text or pair. Default: 128; SQuAD 384; at most what it takes.")
    max_train_samples: int | None = _flag(None, "Train on so many rows, drawn by the seed.")
    early_stopping: int = _flag(0, "Stop after so many epochs without a better dev score; 0: never.")
    enumerate_smiles: bool = _flag(False, "MoleculeNet: another SMILES of each training molecule in each epoch.")
    test: bool = _flag(False, "GLUE: predict the test splits and write the files that the GLUE server takes.")
    published: bool = _flag(False, "Show the papers' rows below, marked as published.")
    checkpoints: bool = _flag(False, "Score every checkpoint of a run, and draw score against pretraining cost.")
    resamples: int = _flag(1000, "Bootstrap resamples for the intervals of differences between encoders.")
    train: str | None = _flag(None, "table: training rows; CSV, TSV, JSONL or Parquet.")
    dev: str | None = _flag(None, "table: rows to be scored on.")
    text_column: str = _flag("text", "table: column of the texts; two for pairs, as in question,answer.")
    label_column: str = _flag("label", "table: column of the labels; several for several labels at once.")
    kind: str | None = _flag(None, "table: classification, regression or multi-label. Default: by the label column.")
    trust_remote_code: bool = _flag(False, "Run code that a Hub repository brings along.")
    disable_tqdm: bool = _flag(False, "No progress bars.")

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise UserError(f"seeds is {self.seeds}, but must be at least 1.")
        if self.grid not in GRIDS:
            raise UserError(f"grid is '{self.grid}': choose one of {', '.join(GRIDS)}.")
        if self.split_dev is not None and not 0 < self.split_dev < 1:
            raise UserError(f"split_dev is {self.split_dev}, but must lie between 0 and 1, for example 0.2.")
        if self.max_train_samples is not None and self.max_train_samples < 2:
            raise UserError(f"max_train_samples is {self.max_train_samples}, but must be at least 2.")
        for name in ("early_stopping", "resamples"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}, but cannot be negative.")

    def numbers(self, name: str) -> list[float]:
        """A grid's values, from the flag or from the named grid."""
        text = getattr(self, name)
        if text is None:
            return GRIDS[self.grid][name]
        try:
            values = [float(part) for part in str(text).split(",")]
        except ValueError:
            raise UserError(f"{name} is '{text}', but must be numbers with commas, as in 16,32.") from None
        if min(values) <= 0:
            raise UserError(f"{name} is '{text}', but must be above 0.")
        return values


@dataclass
class Cell:
    """One fine-tuning or probe: who, on what, how, and what came out."""

    encoder: str
    task: str
    seed: int
    settings: dict[str, Any]
    scores: dict[str, dict[str, float]]
    """By split and metric."""
    predictions: dict[str, np.ndarray]
    """By split: of a task its scores, of SQuAD each question's F1."""
    seconds: float


AnyTask = Task | squad.SquadData


def evaluate(benchmark: str, encoders: Sequence[str], arguments: EvaluationArguments) -> dict[str, Any]:
    """Score encoders on a benchmark; what BENCHMARK.json holds. Raises `UserError`.

    Prints one table: of each task the median over seeds (MoleculeNet: mean and standard deviation), their mean, and for
    several encoders the differences to the first with paired intervals.
    """
    if not encoders:
        raise UserError(
            f"No encoder is named: give a folder or a Hub name, as in `unmask evaluate {benchmark} runs/mae`."
        )
    if len(set(encoders)) < len(encoders):
        raise UserError(f"An encoder is named twice in {' '.join(encoders)}: name each once.")
    models = [Encoder(name, arguments.trust_remote_code) for name in encoders]
    tasks = load_tasks(benchmark, arguments)
    folder = Path(arguments.output_dir)
    if folder.is_file():
        raise UserError(f"output_dir '{folder}' is a file: give a folder.")
    seeds = range(1, 1 + (arguments.seeds or SEEDS.get(benchmark, 5)))
    console, results = Console(), []
    for task, model in itertools.product(tasks, models):
        runner = _Runner(model, task, benchmark, arguments, folder)
        for settings, seed in itertools.product(runner.grid, seeds):
            cell = runner.cell(settings, seed)
            results.append(cell)
            own = cell.scores[task.reported_on]
            shown = "   ".join(f"{name} {100 * own[name]:.1f}" for name in task.metrics)
            line = f"{task.name:<10} {model.name}   seed {seed}   {shown}   {cell.seconds:,.0f} s"
            console.print(line, highlight=False, soft_wrap=True)
    summary = summarise(tasks, [m.name for m in models], results, benchmark)
    summary["differences"] = differences(tasks, [m.name for m in models], results, summary, arguments.resamples)
    report = {
        "benchmark": benchmark,
        "arguments": dataclasses.asdict(arguments),
        "encoders": {m.name: {"fingerprint": m.fingerprint, "model_type": m.config.model_type} for m in models},
        "data": {task.name: task.fingerprint for task in tasks},
        "versions": versions(),
        **summary,
        "cells": [{k: v for k, v in dataclasses.asdict(cell).items() if k != "predictions"} for cell in results],
        "published": _published(benchmark) if arguments.published else {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{benchmark}.json", json.dumps(report, indent=1))
    if arguments.test and benchmark == "glue":
        _write_server_files(folder, tasks, models, results)
    _print(report, tasks, folder / f"{benchmark}.json")
    return report


def load_tasks(benchmark: str, arguments: EvaluationArguments) -> list[AnyTask]:
    """The tasks that are asked for, with their data. Raises `UserError`."""
    data_dir = None if arguments.data_dir is None else Path(arguments.data_dir)
    if data_dir is not None and not data_dir.is_dir():
        raise UserError(f"There is no folder '{data_dir}': check --data_dir.")
    names = None if arguments.tasks is None else [n for n in arguments.tasks.replace(" ", ",").split(",") if n]
    known = {
        "glue": tuple(glue.TASKS),
        "moleculenet": moleculenet.TASKS,
        "probe": (*glue.TASKS, *moleculenet.TASKS),
    }
    if benchmark == "table" or (benchmark == "probe" and arguments.train):
        if arguments.train is None:
            raise UserError("No table is given: name the training rows with --train train.csv.")
        return [
            table.load(
                Path(arguments.train),
                None if arguments.dev is None else Path(arguments.dev),
                arguments.text_column.split(","),
                arguments.label_column.split(","),
                arguments.kind,
                arguments.split_dev,
            )
        ]
    if benchmark == "squad":
        return [squad.load(data_dir)]
    chosen = choose(names, known[benchmark], benchmark if benchmark != "probe" else "a probe")
    if names is None:
        chosen = list(moleculenet.TASKS if benchmark == "moleculenet" else glue.DEFAULT)
    return [
        moleculenet.load(name, data_dir)
        if name in moleculenet.TASKS
        else glue.load(name, data_dir, arguments.split_dev, arguments.test)
        for name in chosen
    ]


class _Runner:
    """The cells of one encoder on one task: made once, or read."""

    def __init__(
        self, encoder: Encoder, task: AnyTask, benchmark: str, arguments: EvaluationArguments, folder: Path
    ) -> None:
        self.encoder, self.task, self.arguments, self.folder = encoder, task, arguments, folder
        self.method = "probe" if benchmark == "probe" else "finetune"
        self.identity = [encoder.fingerprint, task.fingerprint, self.method, str(arguments.test)]
        length = encoder.max_length(arguments.max_length or (384 if isinstance(task, squad.SquadData) else 128))
        rates = arguments.numbers("learning_rates") or [usual_rate(encoder.config.hidden_size)]
        points: Any = itertools.product(rates, arguments.numbers("batch_sizes"), arguments.numbers("epochs"))
        if self.method == "probe":
            points = [(0.0, 0, 0)]
        self.grid = [
            Settings(
                rate,
                int(batch),
                epochs,
                length,
                arguments.max_train_samples,
                arguments.early_stopping if self.method == "finetune" else 0,
                arguments.enumerate_smiles and task.name in moleculenet.TASKS,
            )
            for rate, batch, epochs in points
        ]
        self._prepared: Any = None

    def cell(self, settings: Settings, seed: int) -> Cell:
        """The cell, from its file if there is one."""
        plain = dataclasses.asdict(settings)
        identity = json.dumps([*self.identity, plain, seed], sort_keys=True)
        digest = xxhash.xxh3_64_hexdigest(identity.encode())
        path = self.folder / "cells" / f"{self.task.name}-seed{seed}-{digest}.json"
        if path.is_file():
            saved = json.loads(path.read_text(encoding="utf-8"))
            predictions = {split: np.array(x, dtype=np.float64) for split, x in saved.pop("predictions").items()}
            return Cell(**{**saved, "encoder": self.encoder.name}, predictions=predictions)
        start = time.perf_counter()
        scores, predictions = self._run(settings, seed, path.with_suffix(""))
        cell = Cell(self.encoder.name, self.task.name, seed, plain, scores, predictions, time.perf_counter() - start)
        path.parent.mkdir(parents=True, exist_ok=True)
        lists = {split: x.tolist() for split, x in predictions.items()}
        write_whole(path, json.dumps({**dataclasses.asdict(cell), "predictions": lists}))
        return cell

    def _run(
        self, settings: Settings, seed: int, files: Path
    ) -> tuple[dict[str, dict[str, float]], dict[str, np.ndarray]]:
        task, progress = self.task, not self.arguments.disable_tqdm
        if isinstance(task, squad.SquadData):
            found = squad.finetune(self.encoder, task, settings, seed, progress)
            squad.write_files(files, found)
            counted = ("total", "thresh")  # all others are percentages
            shares = {n: v if any(c in n for c in counted) else v / 100 for n, v in found.scores.items()}
            return {"dev": shares}, {"dev": found.f1}
        length = settings.max_length
        if self.method == "probe":
            self._prepared = self._prepared or Features(self.encoder, length)
            predictions = probe(self._prepared, task, settings.max_train_samples, seed)
        else:
            if self._prepared is None:
                splits = task.splits.items()
                self._prepared = {n: self.encoder.encode(s.texts, length, f"{task.name} ({n})") for n, s in splits}
            predictions = finetune(self.encoder, task, self._prepared, settings, seed, progress)
        scores = {}
        for name in task.scored_splits():
            labels = task.splits[name].labels
            assert labels is not None
            scores[name] = score(task.metrics, labels, predictions[name])
        return scores, predictions


def summarise(
    tasks: Sequence[AnyTask], encoders: Sequence[str], cells: Sequence[Cell], benchmark: str
) -> dict[str, Any]:
    """By encoder and task: the chosen settings, and over seeds each metric's median, mean and standard deviation.

    Settings are chosen by the median of the first metric on the split that selects; `mean` is that over tasks.
    """
    summary: dict[str, Any] = {"scores": {name: {} for name in encoders}, "mean": {}}
    middle = "mean" if benchmark == "moleculenet" else "median"
    for encoder, task in itertools.product(encoders, tasks):
        own = [c for c in cells if c.encoder == encoder and c.task == task.name]
        groups: dict[str, list[Cell]] = {}
        for cell in own:
            groups.setdefault(json.dumps(cell.settings), []).append(cell)
        select = getattr(task, "selected_on", "dev")
        best = max(groups.values(), key=lambda g: np.median([c.scores[select][task.metrics[0]] for c in g]))
        found = {}
        for split, metrics in best[0].scores.items():
            found[split] = {
                metric: {
                    "median": float(np.median(values := [c.scores[split][metric] for c in best])),
                    "mean": float(np.mean(values)),
                    "std": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
                    "seeds": values,
                }
                for metric in metrics
            }
        headline = found[task.reported_on][task.metrics[0]][middle]
        summary["scores"][encoder][task.name] = {
            "headline": headline,
            "metric": task.metrics[0],
            "settings": best[0].settings,
            "settings_tried": len(groups),
            **found,
        }
    for encoder in encoders:
        summary["mean"][encoder] = float(np.mean([row["headline"] for row in summary["scores"][encoder].values()]))
    return summary


def differences(
    tasks: Sequence[AnyTask], encoders: Sequence[str], cells: Sequence[Cell], summary: dict[str, Any], resamples: int
) -> dict[str, dict[str, Difference]]:
    """By encoder and task, and for the mean over tasks: its score less the first encoder's, with 95% intervals."""
    found: dict[str, dict[str, Difference]] = {}
    if resamples == 0:
        return found

    def predictions(encoder: str, task: AnyTask) -> list[np.ndarray]:
        chosen = summary["scores"][encoder][task.name]["settings"]
        own = [c for c in cells if (c.encoder, c.task, c.settings) == (encoder, task.name, chosen)]
        return [c.predictions[task.reported_on] for c in sorted(own, key=lambda c: c.seed)]

    for encoder in encoders[1:]:
        drawn = {
            task.name: paired_bootstrap(
                task.headline, predictions(encoders[0], task), predictions(encoder, task), resamples
            )
            for task in tasks
        }
        found[encoder] = {name: Difference.of(*pair) for name, pair in drawn.items()}
        values, draws = zip(*drawn.values(), strict=True)
        found[encoder]["mean"] = Difference.of(float(np.mean(values)), np.mean(draws, axis=0))
    return found


def versions() -> dict[str, str]:
    """What computed a result."""
    names = ("torch", "transformers", "tokenizers", "numpy", "scikit-learn", "scipy", "rdkit")
    found = {"unmask": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _write_server_files(folder: Path, tasks: Sequence[AnyTask], models: Sequence[Encoder], cells: list[Cell]) -> None:
    """For each encoder a folder of the server's files, by the seed and settings that are best on dev."""
    for number, (model, task) in enumerate(itertools.product(models, tasks)):
        own = [c for c in cells if c.encoder == model.name and c.task == task.name]
        best = max(own, key=lambda c: c.scores["dev"][task.metrics[0]])
        place = folder / "glue-server" / f"{number // len(tasks) + 1}-{Path(model.name).name}"
        place.mkdir(parents=True, exist_ok=True)
        for split, name in glue.SERVER_FILES[task.name].items():
            if split in best.predictions:
                glue.write_server_file(place / name, task.name, best.predictions[split])
            else:
                logger.warning("%s has no %s split here: %s is not written.", task.name, split, name)


def _published(benchmark: str) -> dict[str, dict[str, float]]:
    rows = {"glue": glue.PUBLISHED, "moleculenet": moleculenet.PUBLISHED}
    if benchmark == "squad":
        return {name: {"squad": row["f1"]} for name, row in squad.PUBLISHED.items()}
    return rows.get(benchmark, {})


def _print(report: dict[str, Any], tasks: Sequence[AnyTask], path: Path) -> None:
    names = [task.name for task in tasks]
    spread = report["benchmark"] == "moleculenet"
    seeds = len({cell["seed"] for cell in report["cells"]})
    shown = Table(title=f"{report['benchmark']}, {'mean ± std' if spread else 'median'} of {seeds} seeds, in percent")
    shown.add_column("")
    for task in tasks:
        shown.add_column(f"{task.name}\n{task.metrics[0]}", justify="right")
    shown.add_column("mean", justify="right")
    for encoder, row in report["scores"].items():
        cells = []
        for task in tasks:
            text = f"{100 * row[task.name]['headline']:.1f}"
            if spread:
                text += f" ± {100 * row[task.name][task.reported_on][task.metrics[0]]['std']:.1f}"
            cells.append(text)
        shown.add_row(encoder, *cells, f"{100 * report['mean'][encoder]:.1f}")
    first = next(iter(report["scores"]))
    for encoder, row in report["differences"].items():
        intervals = [f"{100 * d.value:+.1f}\n[{100 * d.low:+.1f}, {100 * d.high:+.1f}]" for d in row.values()]
        shown.add_row(f"{encoder}\n  less {first}, 95%", *intervals)
    for name, row in report["published"].items():
        shown.add_row(f"{name}, published", *(f"{row[n]:.1f}" if n in row else "" for n in [*names, "mean"]))
    console = Console()
    console.width = max(console.width, 40 + 18 * (len(tasks) + 1))
    console.print(shown)
    console.print(f"Every seed, setting, version and data hash: {path}", highlight=False, soft_wrap=True)
