"""Forward and backward of the alignment's likelihood beside the log-space loop under autograd.

    python benchmarks/alignment.py [--output benchmarks/alignment.json]

Float32 inputs, the two alternating; prints medians, their ratio, and the most memory that each holds at once. The loop
is the obvious way to write the recursion, and the way of the reference where it has no CUDA kernel.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import DEVICE, Activations, machine, ratios
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


def held(likelihood: Callable[[Tensor, Tensor], Tensor], match: Tensor, links: Tensor) -> int:
    """The most bytes at once beside the inputs: gradients too."""
    with Activations(torch.nn.ParameterList()) as watch:
        seconds(likelihood, match, links)
    return watch.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    print(machine())
    print(f"{'B':>3} {'T':>3} {'S':>4} {'loop':>10} {'unmask':>10} {'times as fast':>14}", end=" ")
    print(f"{'held':>19} {'difference':>11}")
    for batch, steps, vertices in ((64, 21, 78), (32, 21, 154), (32, 50, 198), (32, 78, 310)):
        match = torch.randn(batch, steps, vertices, device=DEVICE).log_softmax(-1)
        allowed = torch.ones(vertices, vertices, device=DEVICE).triu(1).bool()
        # A large negative number where no link is allowed: with -inf the loop's gradient is NaN.
        links = torch.randn(batch, vertices, vertices, device=DEVICE).log_softmax(-1).masked_fill(~allowed, -1e4)
        lengths = [torch.full((batch,), n, device=DEVICE) for n in (steps, vertices)]
        times: dict[str, list[float]] = {"loop": [], "unmask": []}
        fast = functools.partial(log_likelihood, target_length=lengths[0], state_length=lengths[1])
        for repeat in range(args.repeats + 1):
            slow_seconds, expected = seconds(loop, match, links)
            fast_seconds, log_z = seconds(fast, match, links)
            if repeat:  # the first is for warming up
                times["loop"].append(slow_seconds)
                times["unmask"].append(fast_seconds)
        theirs, ours = (statistics.median(times[name]) for name in ("loop", "unmask"))
        off = ((log_z - expected).abs() / expected.abs()).max().item()
        memory = {"loop": held(loop, match, links), "unmask": held(fast, match, links)}
        megabytes = f"{memory['loop'] / 1e6:.0f} / {memory['unmask'] / 1e6:.0f} MB"
        print(
            f"{batch:>3} {steps:>3} {vertices:>4} {theirs * 1e3:>7.1f} ms {ours * 1e3:>7.1f} ms {theirs / ours:>14.1f} "
            f"{megabytes:>19} {off:>11.1e}"
        )
        row = {"B": batch, "T": steps, "S": vertices, "seconds": times}
        row |= {"speedup": ratios(times["loop"], times["unmask"]), "held_bytes": memory, "difference": off}
        rows.append(row)
    if args.output:
        args.output.write_text(json.dumps(machine() | {"repeats": args.repeats, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
