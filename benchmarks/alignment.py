"""Forward and backward of the alignment's likelihood beside the log-space loop under autograd.

    python benchmarks/alignment.py [--output benchmarks/alignment.json]

Float32 inputs, the two alternating; prints medians and their ratio. The loop is the obvious way to write
the recursion, and the way of the reference where it has no CUDA kernel.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import DEVICE, machine, ratios
from torch import Tensor

from unmask.alignment import log_likelihood


def loop(match: Tensor, links: Tensor) -> Tensor:
    alpha = match[:, 0].masked_fill(torch.arange(match.shape[2], device=match.device) > 0, -torch.inf)
    for t in range(1, match.shape[1]):
        alpha = torch.logsumexp(alpha[:, :, None] + links, 1) + match[:, t]
    return alpha[:, -1]


def seconds(likelihood: Callable[[Tensor, Tensor], Tensor], match: Tensor, links: Tensor) -> tuple[float, Tensor]:
    start = time.perf_counter()
    log_z = likelihood(match.requires_grad_(), links.requires_grad_())
    log_z.sum().backward()
    match.grad = links.grad = None
    if match.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, log_z.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    print(machine())
    print(f"{'B':>3} {'T':>3} {'S':>4} {'loop':>10} {'unmask':>10} {'times as fast':>14} {'largest difference':>20}")
    for batch, steps, vertices in ((64, 21, 78), (32, 21, 154), (32, 50, 198), (32, 78, 310)):
        match = torch.randn(batch, steps, vertices, device=DEVICE).log_softmax(-1)
        allowed = torch.ones(vertices, vertices, device=DEVICE).triu(1).bool()
        # A large negative number where no link is allowed: with -inf the loop's gradient is NaN.
        links = torch.randn(batch, vertices, vertices, device=DEVICE).log_softmax(-1).masked_fill(~allowed, -1e4)
        lengths = [torch.full((batch,), n, device=DEVICE) for n in (steps, vertices)]
        times: dict[str, list[float]] = {"loop": [], "unmask": []}
        for repeat in range(args.repeats + 1):
            slow, expected = seconds(loop, match, links)
            fast, log_z = seconds(lambda m, e: log_likelihood(m, e, *lengths), match, links)  # noqa: B023
            if repeat:  # the first is for warming up
                times["loop"].append(slow)
                times["unmask"].append(fast)
        ours, theirs = (statistics.median(times[name]) for name in ("unmask", "loop"))
        off = ((log_z - expected).abs() / expected.abs()).max().item()
        print(
            f"{batch:>3} {steps:>3} {vertices:>4} {theirs * 1e3:>7.1f} ms {ours * 1e3:>7.1f} ms {theirs / ours:>14.1f} "
            f"{off:>20.1e}"
        )
        row = {
            "B": batch,
            "T": steps,
            "S": vertices,
            "seconds": times,
            "speedup": ratios(times["loop"], times["unmask"]),
        }
        rows.append(row | {"difference": off})
    if args.output:
        args.output.write_text(json.dumps(machine() | {"repeats": args.repeats, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
