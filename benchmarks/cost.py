"""What each named objective costs for a masked token that it predicts: FLOPs by formula, and time measured here.

    python benchmarks/cost.py [--layers 6 --width 256 --vocab_size 16384 --batch 32 --length 128] [--repeats 7]

All objectives take their steps in turns, forward, backward and AdamW, so that all see the same machine; the figures are
ratios to MLM's. FLOPs are those of `unmask.modeling.flops`, which tests hold to torch's own counter.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from mlm_step import MASK, config

from unmask.data.masking import MaskedBatches, MaskedRows, Vocabulary
from unmask.devices import has_bf16
from unmask.modeling.flops import training_flops
from unmask.modeling.pretraining import PretrainingConfig, PretrainingModel
from unmask.objectives import AT_EQUAL_COST, OBJECTIVES, get_objective

LEFT_OUT = {AT_EQUAL_COST: "as mlm", "mae-lm-no-relative": "as mae-lm; needs MPNet"}


class Ids(Vocabulary):
    def __init__(self, size: int) -> None:
        self.size, self.mask_id, self.pad_id = size, MASK, 0
        self.special, self.ordinary = np.arange(size) < 6, np.arange(6, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 6), ("width", 256), ("vocab_size", 16384), ("batch", 32), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="Write the figures as JSON.")
    args = parser.parse_args()
    steps = {}
    for name in OBJECTIVES:
        if name not in LEFT_OUT:
            steps[name] = Step(name, args)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(args.repeats + 1):  # the first is warming up
        for name, step in steps.items():
            took = step()
            if repeat:
                seconds[name].append(took)
    base_flops = steps["mlm"].flops.total / steps["mlm"].masked
    base_seconds = statistics.median(seconds["mlm"]) / steps["mlm"].targets
    rows = []
    print(f"| objective | GFLOPs per target | relative to mlm | time relative to mlm (spread) |\n|{'---|' * 4}")
    for name, step in steps.items():
        relative = sorted(s / step.targets / base_seconds for s in seconds[name])
        flops = step.flops.total / step.masked
        row = {"objective": name, "flops_per_target": flops, "flops_ratio": flops / base_flops}
        row |= {"time_ratio": statistics.median(relative), "spread": [relative[0], relative[-1]]}
        rows.append(row | {"parts": step.flops._asdict()})
        print(
            f"| `{name}` | {flops / 1e9:.3f} | {row['flops_ratio']:.2f} | {row['time_ratio']:.2f} "
            f"({relative[0]:.2f} to {relative[-1]:.2f}) |"
        )
    for name, why in LEFT_OUT.items():
        print(f"| `{name}` | {why} | | |")
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"\nMLM: {1e6 * base_seconds:.0f} µs per target; {machine}")
    if args.output:
        settings = {name: str(value) for name, value in vars(args).items() if name != "output"}
        args.output.write_text(json.dumps({"settings": settings, "machine": machine, "rows": rows}, indent=1))


class Step:
    """One objective's training step on one batch of its own."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        objective = get_objective(name)
        encoder = config("modernbert", args.vocab_size, args.layers, args.width, args.length, 0.0)
        self.model = PretrainingModel(
            PretrainingConfig(
                encoder=encoder,
                objective=objective.to_dict(),
                max_length=args.length,
                mask_token_id=MASK,
                blank_token_id=5,
            )
        )
        inner = (args.length - 2) // objective.repeat
        ids = torch.randint(6, args.vocab_size, (args.batch, inner)).numpy()
        rows = [np.array([2, *row, 3]) for row in ids.tolist()]
        masked = MaskedRows(rows, objective, Ids(args.vocab_size), 0, objective.expand_anchors)
        self.batch = MaskedBatches(0)([masked[i] for i in range(args.batch)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.targets = int(self.batch["labels"].ne(-100).sum())
        self.masked = self.targets / args.batch - (2 if objective.expand_anchors else 0)
        self.targets -= 2 * args.batch if objective.expand_anchors else 0
        self.flops = training_flops(self.model, self.batch["visible_ids"].shape[1], self.batch["labels"].shape[1])

    def __call__(self) -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bf16()):
            loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
