"""Training steps beside the stock one: tokens per second, peak memory, FLOPs, share of the machine's peak.

    python benchmarks/throughput.py [--repeats 7] [--only 6x256] [--keep_memory] [--output benchmarks/throughput.json]

The peer is what `run_mlm.py` runs: `AutoModelForMaskedLM` on whole sequences, `DataCollatorForLanguageModeling`'s
labels, SDPA, on the same weights, sequences, masks, dropout, precision and optimizer. The two take steps in turns, in
a process of their own; a ratio is between two steps of one turn. With --keep_memory, all objectives of a setting
and the stock step share a process that keeps freed memory (`cli.keep_memory`), as `unmask` does and `run_mlm.py` does
not: there objectives are compared with each other. Activations: the most held beside weights and gradients.
"""

import argparse
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from measuring import Step, activation_bytes, in_turns, machine, matmul_peak, ratios

from unmask.cli import keep_memory

MAIN = ("mlm", "mae-lm", "mae-lm-2-layers", "exlm", "mae-exlm")
MIDDLE = {"layers": 6, "width": 256, "batch": 32, "length": 128}
SETTINGS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("ModernBERT 6x256, V 16,384, 32x128", MAIN, MIDDLE | {"vocab_size": 16384}),
    ("ModernBERT 6x256, V 32,768, 32x128", MAIN, MIDDLE | {"vocab_size": 32768}),
    ("BERT 6x256, V 16,384, 32x128", ("mlm", "mae-lm"), MIDDLE | {"vocab_size": 16384, "model_type": "bert"}),
    ("BERT 6x256, V 32,768, 32x128", ("mlm", "mae-lm"), MIDDLE | {"vocab_size": 32768, "model_type": "bert"}),
    ("ModernBERT 6x256, V 400, 64x40", ("mlm", "mae-lm"), MIDDLE | {"vocab_size": 400, "batch": 64, "length": 40}),
    ("ModernBERT 6x256, V 16,384, 8x512", ("mlm", "mae-lm"), MIDDLE | {"vocab_size": 16384, "batch": 8, "length": 512}),
    ("ModernBERT 6x256, V 131,072, 32x128", ("mlm",), MIDDLE | {"vocab_size": 131072}),
    (
        "ModernBERT 4x128, V 8,192, 32x128 (tiny)",
        ("mlm", "mae-lm"),
        MIDDLE | {"layers": 4, "width": 128, "vocab_size": 8192},
    ),
    (
        "ModernBERT 4x512, V 32,768, 64x128 (small)",
        ("mlm", "mae-lm"),
        MIDDLE | {"layers": 4, "width": 512, "vocab_size": 32768, "batch": 64},
    ),
    (
        "ModernBERT 12x768, V 32,768, 8x512",
        ("mlm", "mae-lm", "exlm", "mae-exlm"),
        {"layers": 12, "width": 768, "batch": 8, "length": 512, "vocab_size": 32768},
    ),
]


def measure(
    objectives: tuple[str, ...], setting: dict[str, Any], repeats: int, peak: float, kept: bool
) -> list[dict[str, Any]]:
    if kept:
        keep_memory()
    steps = {name: Step(name, **setting) for name in ("stock", *objectives)}
    seconds = in_turns(steps, repeats)
    rows = []
    for name, step in steps.items():
        median = statistics.median(seconds[name])
        row = {"name": name, "seconds": [min(seconds[name]), median, max(seconds[name])], "flops": step.flops}
        row |= {"tokens": step.tokens, "tokens_per_second": step.tokens / median, "mfu": step.flops / median / peak}
        row |= {"speedup": ratios(seconds["stock"], seconds[name]), "activation_bytes": activation_bytes(step)}
        if kept and name != "stock":
            base = [s / steps["mlm"].flops for s in seconds["mlm"]]
            row["over_flops"] = ratios([s / step.flops for s in seconds[name]], base)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[""], help="Settings whose name holds one of these.")
    parser.add_argument("--keep_memory", action="store_true")
    parser.add_argument("--output", type=Path, help="Write the figures as JSON.")
    args = parser.parse_args()
    peak = matmul_peak()
    facts = machine() | {"matmul_peak_gflops": round(peak / 1e9), "repeats": args.repeats}
    facts["memory_kept"] = args.keep_memory
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    results: dict[str, list[dict[str, Any]]] = {}
    print("\n| step | tokens/s | times stock (least, most) | time over FLOPs | MFLOP/token | MFU | activations |")
    print(f"|{'---|' * 7}")
    # A new process for every group: what another model leaves in memory would slow the stock step.
    fresh = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    for title, objectives, setting in SETTINGS:
        if not any(part in title for part in args.only):
            continue
        print(f"| **{title}** | | | | | | |")
        results[title] = []
        for group in [objectives] if args.keep_memory else [(objective,) for objective in objectives]:
            for row in fresh.submit(measure, group, setting, args.repeats, peak, args.keep_memory).result():
                results[title].append(row)
                low, median, high = row["speedup"]
                over = f"{row['over_flops'][1]:.2f}" if "over_flops" in row else ""
                print(
                    f"| {row['name']} | {row['tokens_per_second']:,.0f} | {median:.2f} ({low:.2f}, {high:.2f}) "
                    f"| {over} | {row['flops'] / row['tokens'] / 1e6:.0f} | {row['mfu']:.0%} "
                    f"| {row['activation_bytes'] / 1e6:,.0f} MB |",
                    flush=True,
                )
        if args.output:
            args.output.write_text(json.dumps(facts | {"settings": results}, indent=1))


if __name__ == "__main__":
    main()
