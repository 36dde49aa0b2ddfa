"""How a step's cost grows with length, k, mask ratio, vocabulary and size: measured beside the formula.

    python benchmarks/scaling.py [--repeats 5] [--output benchmarks/scaling.json] [--figure docs/figures/scaling.svg]

One thing changes at a time, from ModernBERT 6 x 256, V = 16,384, 32 x 128; both curves are multiples of their first
point, for each corpus token. Where the measured curve leaves the formula's, something but matrix products costs.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from measuring import Step, in_turns, machine

from unmask.cli import keep_memory

SWEEPS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "length (4,096 tokens)": ("mlm", [(str(n), {"length": n, "batch": 4096 // n}) for n in (64, 128, 256, 512, 1024)]),
    "length, mae-lm": ("mae-lm", [(str(n), {"length": n, "batch": 4096 // n}) for n in (64, 128, 256, 512, 1024)]),
    "k, exlm": ("exlm", [(str(k), {"encoder_states": k}) for k in (2, 3, 4, 6, 8)]),
    "k, mae-exlm": ("mae-exlm", [(str(k), {"decoder_states": k}) for k in (2, 3, 4, 6, 8)]),
    "mask ratio, mlm": ("mlm", [(str(p), {"mask_ratio": p}) for p in (0.15, 0.3, 0.45, 0.6)]),
    "mask ratio, mae-lm": ("mae-lm", [(str(p), {"mask_ratio": p}) for p in (0.15, 0.3, 0.45, 0.6)]),
    "vocabulary, mlm": ("mlm", [(f"{v // 1024}k", {"vocab_size": v}) for v in (8192, 16384, 32768, 65536, 131072)]),
    "vocabulary, stock": ("stock", [(f"{v // 1024}k", {"vocab_size": v}) for v in (8192, 16384, 32768)]),
    "width, mlm": ("mlm", [(str(d), {"width": d}) for d in (128, 256, 384, 512, 768)]),
    "layers, mlm": ("mlm", [(str(n), {"layers": n}) for n in (2, 4, 6, 9, 12)]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    keep_memory()
    print(machine())
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, (objective, points) in SWEEPS.items():
        steps = {label: Step(objective, **fields) for label, fields in points}
        seconds = in_turns(steps, args.repeats)
        curves[name] = [
            {
                "x": label,
                "flops_per_token": step.flops / step.tokens,
                "seconds_per_token": [s / step.tokens for s in sorted(seconds[label])],
            }
            for label, step in steps.items()
        ]
        first = curves[name][0]
        base = statistics.median(first["seconds_per_token"])
        cells = [
            f"{p['x']}: {statistics.median(p['seconds_per_token']) / base:.2f} "
            f"({p['flops_per_token'] / first['flops_per_token']:.2f})"
            for p in curves[name]
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if args.output:
        args.output.write_text(json.dumps(machine() | {"repeats": args.repeats, "curves": curves}, indent=1))
    if args.figure:
        draw(curves, args.figure)


def draw(curves: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 5
    figure, axes = pyplot.subplots(-(-len(curves) // columns), columns, figsize=(15, 5.4), layout="constrained")
    for axis, (name, points) in zip(axes.flat, curves.items(), strict=True):
        first = points[0]
        base = statistics.median(first["seconds_per_token"])
        places = range(len(points))
        spread = [(p["seconds_per_token"][0] / base, p["seconds_per_token"][-1] / base) for p in points]
        axis.fill_between(places, *zip(*spread, strict=True), alpha=0.25, linewidth=0)
        axis.plot(places, [statistics.median(p["seconds_per_token"]) / base for p in points], "o-", label="measured")
        axis.plot(places, [p["flops_per_token"] / first["flops_per_token"] for p in points], "k--", label="formula")
        axis.set_xticks(places, [p["x"] for p in points])
        axis.set_title(name, fontsize=10)
        axis.set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=8)
    figure.supylabel("cost of a token, of the first point's")
    figure.savefig(path)


if __name__ == "__main__":
    main()
