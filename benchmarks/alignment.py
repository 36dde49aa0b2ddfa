"""Forward and backward of the alignment's likelihood beside the log-space loop under autograd.

    python benchmarks/alignment.py

Float32 inputs, two threads, the two alternating; prints medians and their ratio. The loop is the obvious way to write
the recursion, and the way of the reference where it has no CUDA kernel.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
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
    return time.perf_counter() - start, log_z.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(2)
    torch.manual_seed(0)
    print(f"{'B':>3} {'T':>3} {'S':>4} {'loop':>10} {'unmask':>10} {'times as fast':>14} {'largest difference':>20}")
    for batch, steps, vertices in ((64, 21, 78), (32, 78, 310)):
        match = torch.randn(batch, steps, vertices).log_softmax(-1)
        allowed = torch.ones(vertices, vertices).triu(1).bool()
        # A large negative number where no link is allowed: with -inf the loop's gradient is NaN.
        links = torch.randn(batch, vertices, vertices).log_softmax(-1).masked_fill(~allowed, -1e4)
        lengths = torch.full((batch,), steps), torch.full((batch,), vertices)
        times: dict[str, list[float]] = {"loop": [], "unmask": []}
        for repeat in range(repeats + 1):
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


if __name__ == "__main__":
    main()
