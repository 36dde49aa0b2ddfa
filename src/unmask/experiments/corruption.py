"""Repeated MLM (ExLM §2): unreal tokens against corrupted semantics, each cell one pretraining and its probe.

Each token stands k times, each copy masked with probability p: a share p of what the encoder reads is [MASK], a share
p^k of the tokens is lost. Two cuts: p rises while p^k is fixed, and p^k rises while p is fixed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from unmask.errors import UserError
from unmask.evaluation.benchmark import EvaluationArguments, evaluate
from unmask.files import write_whole
from unmask.training.pretrain import pretrain

CELLS = ((0.15, 1), (0.387, 2), (0.622, 4), (0.622, 2), (0.622, 1), (0.387, 1))
"""(p, k): p^k = 0.15 for the first three, p = 0.622 for the middle three, p = 0.387 for the second and the last."""


def corruption(
    cells: Sequence[tuple[float, int]], probes: EvaluationArguments | None, content: int = 30, **values: Any
) -> dict[str, Any]:
    """Trains a model for each (p, k) into output_dir/p-P-k-K, probes each encoder; writes corruption.json.

    probes: which tasks score the encoders, None for none; content: tokens of a sequence, boundaries apart, whatever k,
    so that equal steps see equal text. Other keywords are `pretrain`'s. A cell that is finished is not run again.
    """
    output = Path(values.pop("output_dir", None) or "")
    if not output.name:
        raise UserError("No output_dir is given: say where the runs go, for example --output_dir runs/corruption.")
    values.pop("objective", None)
    console, found = Console(highlight=False), []
    for p, k in cells:
        if not 0 < p < 1 or k < 1:
            raise UserError(f"The cell p={p:g}, k={k} makes no sense: p lies between 0 and 1, k is 1 or more.")
    for p, k in cells:
        run = output / f"p-{p:g}-k-{k}"
        console.rule(f"p = {p:g}, k = {k}: {p:.0%} unreal, {p**k:.0%} lost")
        if (run / "metrics.json").is_file():
            metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
        else:
            resume = {"resume_from_checkpoint": "latest"} if (run / "config.yaml").is_file() else {}
            own = {"objective": "repeated-mlm", "set": [f"repeat={k}", f"mask_ratio={p}"], "output_dir": str(run)}
            metrics = pretrain(**{**values, **own, **resume, "max_length": content * k + 2})
        scores = {}
        if probes is not None:
            report = evaluate("probe", [str(run)], probes)
            scores = {task: row["headline"] for task, row in report["scores"][str(run)].items()}
        found.append({"p": p, "k": k, "scores": scores, **metrics})
        write_whole(output / "corruption.json", json.dumps({"cells": found}, indent=1))
    return {"cells": found}
