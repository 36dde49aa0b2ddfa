"""Score against the cost of pretraining: every checkpoint of a run, by tokens, FLOPs and seconds (MAE-LM, figure 4)."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import TrainerState

from unmask.data.tokenizers import load_tokenizer
from unmask.errors import UserError
from unmask.evaluation.benchmark import EvaluationArguments, evaluate
from unmask.files import write_whole
from unmask.modeling.export import export
from unmask.modeling.pretraining import PretrainingModel
from unmask.training.trainer import checkpoints, is_complete, training_seconds

COSTS = {"tokens": "tokens seen", "flops": "FLOPs of pretraining", "seconds": "seconds of pretraining"}


def evaluate_checkpoints(benchmark: str, runs: Sequence[str], arguments: EvaluationArguments) -> dict[str, Any]:
    """Scores every checkpoint of each run; writes curve.json and curve.svg into output_dir.

    Returns under `runs` {run: [{step, tokens, flops, seconds, score, tasks}, ...]}, and what `reached` says of them.
    Raises `UserError` for a run without checkpoints.
    """
    folder = Path(arguments.output_dir)
    points: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs, start=1):
        complete = [checkpoint for checkpoint in checkpoints(Path(run)) if is_complete(checkpoint)]
        if not complete:
            raise UserError(f"'{run}' holds no complete checkpoints: give the output_dir of an `unmask pretrain` run.")
        for checkpoint in complete:
            encoder = folder / "encoders" / f"{number}-{Path(run).name}-{checkpoint.name}"
            if not encoder.is_dir():
                encoder.parent.mkdir(parents=True, exist_ok=True)
                tokenizer = load_tokenizer(str(checkpoint))
                export(PretrainingModel.from_pretrained(checkpoint), tokenizer, encoder)
            own = dataclasses.replace(arguments, output_dir=str(folder), checkpoints=False, published=False)
            report = evaluate(benchmark, [str(encoder)], own)
            scores = {task: row["headline"] for task, row in report["scores"][str(encoder)].items()}
            points.setdefault(run, []).append(
                {**cost_of(checkpoint), "score": report["mean"][str(encoder)], "tasks": scores}
            )
    shares_reached = reached(points)
    found = {"runs": points, "reached": shares_reached}
    write_whole(folder / "curve.json", json.dumps(found, indent=1))
    draw(points, folder / "curve.svg")
    console = Console(highlight=False)
    for run, shares in shares_reached.items():
        told = ", ".join(f"{share:.0%} of its {COSTS[cost]}" for cost, share in shares.items())
        console.print(
            f"{run} reaches the last score of {runs[0]} " + (f"with {told}." if told else "at no checkpoint.")
        )
    console.print(f"Score against cost: {folder / 'curve.svg'}, {folder / 'curve.json'}", soft_wrap=True)
    return found


def cost_of(checkpoint: Path) -> dict[str, float]:
    """What a checkpoint has cost: step, corpus tokens, FLOPs by formula, seconds without evaluations and saves."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    return {
        "step": state.global_step,
        "tokens": state.num_input_tokens_seen,
        "flops": state.total_flos,
        "seconds": training_seconds(state),
    }


def reached(points: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """For each run but the first: the share of the first one's cost at which it has the first one's last score.

    Between checkpoints the score is taken to change linearly. Empty where the score is never reached.
    """
    (_, baseline), *others = points.items()
    goal = baseline[-1]["score"]
    found: dict[str, dict[str, float]] = {}
    for run, own in others:
        found[run] = {}
        place = next((i for i, point in enumerate(own) if point["score"] >= goal), None)
        if place is None:
            continue
        for cost in COSTS:
            at = own[place][cost]
            if place:
                before, after = own[place - 1], own[place]
                share = (goal - before["score"]) / (after["score"] - before["score"])
                at = before[cost] + share * (after[cost] - before[cost])
            if np.isfinite(at) and baseline[-1][cost]:
                found[run][cost] = float(at / baseline[-1][cost])
    return found


def draw(points: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The curves, one panel for each cost, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(COSTS), figsize=(12, 3.6), sharey=True, layout="constrained")
    for panel, (cost, label) in zip(panels, COSTS.items(), strict=True):
        for run, own in points.items():
            panel.plot([p[cost] for p in own], [100 * p["score"] for p in own], marker="o", label=run)
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("score, in percent")
    panels[0].legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
