"""What each named objective costs for a masked token that it predicts: FLOPs by formula, and time measured here.

    python benchmarks/cost.py [--layers 6 --width 256 --vocab_size 16384 --batch 32 --length 128] [--repeats 7]

All objectives take their steps in turns, forward, backward and AdamW, in a process that keeps freed memory as
`unmask` does; the figures are ratios to MLM's. FLOPs are those of
`unmask.modeling.flops`, which tests hold to torch's own counter.
"""

import argparse
import json
from pathlib import Path

from measuring import Step, in_turns, machine, ratios

from unmask.cli import keep_memory
from unmask.objectives import AT_EQUAL_COST, OBJECTIVES

LEFT_OUT = {AT_EQUAL_COST: "as mlm", "mae-lm-no-relative": "as mae-lm; needs MPNet"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 6), ("width", 256), ("vocab_size", 16384), ("batch", 32), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="Write the figures as JSON.")
    args = parser.parse_args()
    keep_memory()
    setting = {name: getattr(args, name) for name in ("layers", "width", "vocab_size", "batch", "length")}
    steps = {name: Step(name, **setting) for name in args.objectives if name not in LEFT_OUT}
    seconds = in_turns(steps, args.repeats)
    per_target = {name: [s / step.targets for s in seconds[name]] for name, step in steps.items()}
    flops = {name: step.flops / step.targets for name, step in steps.items()}
    print(machine() | setting)
    print(f"| objective | MFLOP per target | of mlm's | time of mlm's (least, most) | time over FLOPs |\n|{'---|' * 5}")
    rows = []
    for name, step in steps.items():
        relative = flops[name] / flops["mlm"]
        low, median, high = ratios(per_target[name], per_target["mlm"])
        row = {"objective": name, "flops_per_target": flops[name], "flops_ratio": relative}
        rows.append(row | {"time_ratio": median, "spread": [low, high], "parts": step.parts._asdict()})
        print(
            f"| `{name}` | {flops[name] / 1e6:.0f} | {relative:.2f} | {median:.2f} ({low:.2f}, {high:.2f}) | "
            f"{median / relative:.2f} |"
        )
    for name, why in LEFT_OUT.items():
        print(f"| `{name}` | {why} | | | |")
    if args.output:
        args.output.write_text(json.dumps(machine() | setting | {"repeats": args.repeats, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
