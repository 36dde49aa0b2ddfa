"""The alignment's Triton kernel on a CUDA device: values and gradients against the torch version, and its speed.

    python benchmarks/kernel_check.py        # under a minute; exit code 1 if anything differs

Values are compared with the torch version on the CPU, for float64, float32 and bfloat16 inputs; times are ratios to the
torch version and to the log-space loop under autograd, both on the same device.
"""

import statistics
import sys
from collections.abc import Callable

import torch
from alignment import loop
from torch import Tensor

from unmask.alignment import log_likelihood, recursion

SHAPES = ((64, 21, 78), (32, 78, 310), (8, 78, 618))  # B, T, S


def inputs(batch: int, steps: int, vertices: int, scale: float, ragged: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    match = scale * torch.randn(batch, steps, vertices).log_softmax(-1)
    links = (scale * torch.randn(batch, vertices, vertices)).log_softmax(-1)
    targets, states = torch.full((batch,), steps), torch.full((batch,), vertices)
    if ragged:
        targets -= torch.arange(batch) % (steps // 2)
        states -= torch.arange(batch) % (vertices // 3)
    return match, links, targets, states


def with_gradients(match: Tensor, links: Tensor, *lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    match, links = match.detach().requires_grad_(), links.detach().requires_grad_()
    log_z = log_likelihood(match, links, *lengths)
    log_z.sum().backward()
    return log_z.detach(), match.grad, links.grad


def milliseconds(step: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def main() -> int:
    if not torch.cuda.is_available():
        print("There is no CUDA device here: the kernel is tested under Triton's interpreter (tests/test_kernel.py).")
        return 2
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    failed = 0
    for batch, steps, vertices in SHAPES:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for scale, ragged in ((1.0, False), (1.0, True), (1e3, True)):
                match, links, *lengths = inputs(min(batch, 8), steps, vertices, scale, ragged)
                match, links = match.to(dtype), links.to(dtype)
                expected = with_gradients(match, links, *lengths)
                found = with_gradients(match.cuda(), links.cuda(), *(x.cuda() for x in lengths))
                tolerance = {"rtol": max(1e-9, 2 * torch.finfo(dtype).eps), "atol": 1e-9}
                same = all(
                    torch.allclose(a.cpu().double(), b.double(), **tolerance)
                    for a, b in zip(found, expected, strict=True)
                )
                failed += not same
                if not same:
                    print(f"DIFFERS: T={steps} S={vertices} {dtype} scale {scale:g} ragged {ragged}")
    print("values and gradients agree" if not failed else f"{failed} cases differ")
    print(f"{'B':>3} {'T':>3} {'S':>4} {'kernel':>10} {'of torch version':>18} {'of the loop':>14}")
    chosen = recursion._on_kernel
    for batch, steps, vertices in SHAPES:
        match, links, *lengths = (x.cuda() for x in inputs(batch, steps, vertices, 1.0, False))
        links = links.masked_fill(~torch.ones_like(links[0]).triu(1).bool(), -1e4)
        arguments = (match, links, *lengths)
        kernel = milliseconds(lambda: with_gradients(*arguments))  # noqa: B023
        recursion._on_kernel = lambda scores: False
        plain = milliseconds(lambda: with_gradients(*arguments))  # noqa: B023
        recursion._on_kernel = chosen

        def looped() -> None:
            leaves = match.detach().requires_grad_(), links.detach().requires_grad_()  # noqa: B023
            loop(*leaves).sum().backward()

        slow = milliseconds(looped)
        print(f"{batch:>3} {steps:>3} {vertices:>4} {kernel:>7.2f} ms {plain / kernel:>17.1f}x {slow / kernel:>13.1f}x")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
