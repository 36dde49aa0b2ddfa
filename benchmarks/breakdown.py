"""Where the time of a training step goes, by objective: shares of what the profiler sees.

    python benchmarks/breakdown.py [--layers 12 --width 768 --vocab_size 32768 --batch 8 --length 512] [--output FILE]

attention, head, transitions and alignment are their custom functions, both passes, products included; linear: the
products of all other layers; casts: copies between types and layouts; pointwise: norms, activations, rotary positions,
residuals, embeddings. MFU: FLOPs by formula over the time of a step without the profiler, of the measured peak.
"""

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path

from measuring import DEVICE, Step, machine, matmul_peak
from torch.profiler import ProfilerActivity, profile

from unmask.cli import keep_memory

REGIONS = {
    "_Blockwise": "attention",
    "aten::scaled_dot_product_attention": "attention",
    "ScaledDotProduct": "attention",  # its backward
    "_Emissions": "head",
    "_Mixture": "transitions",
    "_LogLikelihood": "alignment",
    "Optimizer": "optimizer",
}
COLUMNS = ("linear", "attention", "head", "transitions", "alignment", "casts", "pointwise", "optimizer")


def column(event: object) -> str:
    name, at = event.name, event
    while at is not None:
        for prefix, region in REGIONS.items():
            if at.name.startswith(prefix):
                return region
        at = at.cpu_parent
    if name in ("aten::mm", "aten::addmm", "aten::bmm"):
        return "linear"
    return "casts" if name in ("aten::copy_", "aten::_to_copy") else "pointwise"


def shares(step: Step, count: int = 3) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(count):
            step()
    spent: Counter[str] = Counter()
    for event in profiler.events():
        spent[column(event)] += event.self_cpu_time_total
    return {name: spent[name] / spent.total() for name in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("width", 256), ("vocab_size", 16384), ("batch", 32), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--objectives", nargs="+", default=["stock", "mlm", "mae-lm", "exlm", "mae-exlm"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if DEVICE == "cuda":
        parser.error("kernels on a GPU run beside the CPU's time that is counted here: use torch.profiler's trace")
    keep_memory()
    peak = matmul_peak()
    setting = {name: getattr(args, name) for name in ("layers", "width", "vocab_size", "batch", "length")}
    facts = machine() | setting | {"matmul_peak_gflops": round(peak / 1e9)}
    print(facts)
    print(f"| | step | MFU | {' | '.join(COLUMNS)} |\n|{'---|' * (3 + len(COLUMNS))}")
    rows = {}
    for name in args.objectives:
        step = Step(name, **setting)
        seconds = [step() for _ in range(args.repeats + 2)][2:]
        median = statistics.median(seconds)
        parts = shares(step)
        rows[name] = {"seconds": sorted(seconds), "mfu": step.flops / median / peak, "shares": parts}
        cells = " | ".join(f"{part:.0%}" if part >= 0.005 else "" for part in parts.values())
        print(f"| {name} | {1e3 * median:,.0f} ms | {rows[name]['mfu']:.0%} | {cells} |", flush=True)
        if args.output:
            args.output.write_text(json.dumps(facts | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
