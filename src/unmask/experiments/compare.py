"""The same data and the same steps under several objectives, side by side."""

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unmask.errors import UserError
from unmask.objectives import AT_EQUAL_COST, get_objective
from unmask.training.pretrain import pretrain

MEASURED_STEPS = 30  # of MLM, to know what one of its steps costs


def compare(objectives: list[str], **values: Any) -> list[dict[str, Any]]:
    """Pretrain one model for each named objective into `output_dir`/NAME; prints a table, writes comparison.json.

    Other keywords are those of `pretrain`. `mlm++` comes last, with as many steps of MLM as take the time of the
    slowest of the others, both measured here (ExLM §4's baseline at equal training cost). Returns each run's metrics.
    """
    if not values.get("output_dir"):
        raise UserError("No output_dir is given: say where the runs go, for example --output_dir runs/comparison.")
    if not objectives:
        raise UserError("No objective is named: say which to compare, for example `unmask compare mlm mae-lm`.")
    if len(set(objectives)) < len(objectives):
        raise UserError(f"An objective is named twice in {' '.join(objectives)}: name each once.")
    for name in objectives:
        get_objective(name)
    others = [name for name in objectives if name != AT_EQUAL_COST]
    if not others:
        raise UserError(
            f"{AT_EQUAL_COST} trains for as long as another objective takes: name that too, as in `unmask compare exlm "
            f"{AT_EQUAL_COST}`."
        )
    output = Path(values.pop("output_dir"))
    rows = []
    for name in others:
        Console().rule(name)
        rows.append(pretrain(**{**values, "objective": name, "output_dir": str(output / name)}))
    if AT_EQUAL_COST in objectives:
        Console().rule(AT_EQUAL_COST)
        steps = _steps_at_equal_cost(rows, values)
        row = pretrain(**{**values, "objective": "mlm", "output_dir": str(output / AT_EQUAL_COST), "max_steps": steps})
        rows.append({**row, "objective": AT_EQUAL_COST})
    output.mkdir(parents=True, exist_ok=True)
    (output / "comparison.json").write_text(json.dumps(rows, indent=2))
    _print(rows, output)
    return rows


def _steps_at_equal_cost(rows: list[dict[str, Any]], values: dict[str, Any]) -> int:
    """Steps of MLM that take the time of the slowest run; its own run, or else a short one, says what one takes."""
    slowest = max(rows, key=lambda row: row["training_seconds"])
    measured = next((row for row in rows if row["objective"] == "mlm"), None)
    if measured is None:
        short = {"max_steps": MEASURED_STEPS, "eval_strategy": "no", "save_strategy": "no", "eval_fraction": 0}
        with tempfile.TemporaryDirectory() as scratch:
            measured = pretrain(**{**values, **short, "objective": "mlm", "output_dir": scratch})
    seconds = measured["training_seconds"] / measured["steps"]
    steps = max(1, round(slowest["training_seconds"] / seconds))
    Console().print(
        f"{slowest['objective']} took {slowest['training_seconds']:,.0f} s, a step of MLM {seconds:.3f} s: "
        f"{steps:,} steps of MLM cost the same."
    )
    return steps


def _print(rows: list[dict[str, Any]], output: Path) -> None:
    table = Table(title="Losses in nats per masked token")
    scored = ("token loss", "joint loss", "unigram", "below unigram", "accuracy")
    columns = ("objective", "steps", "tokens", *scored, "tokens/s", "encoder")
    for column in columns:
        table.add_column(column, justify="left" if column in ("objective", "encoder") else "right", no_wrap=True)
    for row in rows:
        loss, joint = row["eval_token_loss"], row["eval_joint_loss"]
        unigram, accuracy = row["unigram_loss"], row["eval_accuracy"]
        scores = (
            ("-",) * len(scored)
            if loss is None
            else (f"{loss:.3f}", f"{joint:.3f}", f"{unigram:.3f}", f"{unigram - loss:.3f}", f"{accuracy:.1%}")
        )
        speed, place = f"{row['tokens_per_second']:,.0f}", str(output / row["objective"] / "encoder")
        table.add_row(row["objective"], f"{row['steps']:,}", f"{row['tokens']:,}", *scores, speed, place)
    Console(width=max(Console().width, 150)).print(table)
