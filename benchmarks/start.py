"""Seconds from the start of `unmask pretrain` to the first training step, on a corpus that is tokenised already.

    python benchmarks/start.py FILE... [--preset base] [--output benchmarks/start.json]

Each start is a process of its own, imports included. One before them trains the tokenizer and fills the cache; it is
reported beside them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import machine

FIRST_STEP = """
import os, sys
from transformers import trainer_callback
from unmask.cli import main

def begins(*_):
    print("first step", flush=True)
    os._exit(0)

trainer_callback.CallbackHandler.on_step_begin = begins
sys.exit(main(sys.argv[1:]))
"""


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", FIRST_STEP, "pretrain", *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        if not any(line == "first step\n" for line in process.stdout):
            sys.exit("benchmarks/start.py: the run ended before its first step; what it said stands above.")
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="+")
    parser.add_argument("--objective", default="mae-lm")
    parser.add_argument("--preset", default="base")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    size = sum(os.path.getsize(name) for name in args.corpus)
    with tempfile.TemporaryDirectory() as folder:
        common = ["--objective", args.objective, "--preset", args.preset, "--cache_dir", f"{folder}/cache"]
        common += ["--data", *args.corpus, "--max_steps", "1"]
        first = seconds([*common, "--output_dir", f"{folder}/first"])
        starts = [seconds([*common, "--output_dir", f"{folder}/{n}"]) for n in range(args.repeats)]
    print(machine())
    print(f"{size / 1e6:.0f} MB, {args.preset}, {args.objective}; first, with tokenizer and tokenising: {first:.1f} s")
    print(f"cached: {statistics.median(starts):.1f} s ({min(starts):.1f}, {max(starts):.1f})")
    if args.output:
        row = {"bytes": size, "preset": args.preset, "objective": args.objective, "first": first, "seconds": starts}
        args.output.write_text(json.dumps(machine() | row, indent=1))


if __name__ == "__main__":
    main()
