"""The same data and the same steps under several objectives, side by side."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unmask.errors import UserError
from unmask.objectives import get_objective
from unmask.training.pretrain import pretrain


def compare(objectives: list[str], **values: Any) -> list[dict[str, Any]]:
    """Pretrain one model for each named objective into `output_dir`/NAME; prints a table, writes comparison.json.

    Other keywords are those of `pretrain`. Returns the metrics of each run.
    """
    if not values.get("output_dir"):
        raise UserError("No output_dir is given: say where the runs go, for example --output_dir runs/comparison.")
    if not objectives:
        raise UserError("No objective is named: say which to compare, for example `unmask compare mlm mae-lm`.")
    if len(set(objectives)) < len(objectives):
        raise UserError(f"An objective is named twice in {' '.join(objectives)}: name each once.")
    for name in objectives:
        get_objective(name)
    output = Path(values.pop("output_dir"))
    rows = []
    for name in objectives:
        Console().rule(name)
        rows.append(pretrain(**{**values, "objective": name, "output_dir": str(output / name)}))
    (output / "comparison.json").write_text(json.dumps(rows, indent=2))
    _print(rows, output)
    return rows


def _print(rows: list[dict[str, Any]], output: Path) -> None:
    table = Table(
        title=f"{rows[0]['steps']:,} steps, {rows[0]['tokens']:,} tokens each; losses in nats per masked token"
    )
    columns = ("objective", "token loss", "joint loss", "unigram", "below unigram", "accuracy", "tokens/s", "encoder")
    for column in columns:
        table.add_column(column, justify="left" if column in ("objective", "encoder") else "right", no_wrap=True)
    for row in rows:
        loss, joint = row["eval_token_loss"], row["eval_joint_loss"]
        unigram, accuracy = row["unigram_loss"], row["eval_accuracy"]
        scores = (
            ("-",) * 5
            if loss is None
            else (f"{loss:.3f}", f"{joint:.3f}", f"{unigram:.3f}", f"{unigram - loss:.3f}", f"{accuracy:.1%}")
        )
        speed, place = f"{row['tokens_per_second']:,.0f}", str(output / row["objective"] / "encoder")
        table.add_row(row["objective"], *scores, speed, place)
    Console(width=max(Console().width, 120)).print(table)
