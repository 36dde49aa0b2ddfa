"""The LM head and its loss, forward and backward, beside materialised logits, by vocabulary size.

    python benchmarks/head.py [--output benchmarks/head.json]

The peer is the obvious way, `F.linear` and `F.cross_entropy`, under the same autocast, in turns; activations are the
most bytes held at once beside the table and its gradient. Gradients are compared in float32.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from measuring import DEVICE, Activations, in_turns, machine, ratios
from torch import nn
from torch.nn import functional as F

from unmask.devices import has_bf16
from unmask.modeling.head import Head


class Both(nn.Module):
    """A bare head on random hidden states [N, d]."""

    def __init__(self, vocabulary: int, width: int, states: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = type("Config", (), {"hidden_size": width, "model_type": "none"})()
        self.table = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.table.weight, std=0.05)
        self.head = Head(config, None, self.table)
        self.hidden = torch.randn(1, states, width, device=DEVICE)
        self.labels = torch.randint(0, vocabulary, (1, states), device=DEVICE)
        self.to(DEVICE)

    def loss(self, name: str) -> torch.Tensor:
        if name == "unmask":
            return self.head.cross_entropy(self.hidden, self.labels, self.table)
        logits = self.head.logits(self.hidden, self.table)
        return F.cross_entropy(logits.float().flatten(0, 1), self.labels.flatten(), reduction="sum")

    def step(self, name: str) -> float:
        start = time.perf_counter()
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=has_bf16()):
            loss = self.loss(name)
        loss.backward()
        self.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def activations(self, name: str) -> int:
        with Activations(self) as watch:
            self.step(name)
        return watch.peak

    def difference(self) -> float:
        """The largest difference of the table's gradients, relative to the largest of them, in float32."""
        gradients = []
        for name in ("unmask", "logits"):
            self.loss(name).backward()
            gradients.append(self.table.weight.grad.clone())
            self.zero_grad()
        return float((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--states", type=int, default=608, help="Predicted states: 608 of 32 x 128 tokens at 15%.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    print(machine())
    print("| V | logits | unmask | times as fast (least, most) | activations | difference |\n" + f"|{'---|' * 6}")
    for vocabulary in (512, 8192, 16384, 32768, 65536, 131072):
        both = Both(vocabulary, args.width, args.states)
        seconds = in_turns({n: lambda n=n, b=both: b.step(n) for n in ("logits", "unmask")}, args.repeats)
        times = {n: 1e3 * statistics.median(s) for n, s in seconds.items()}
        low, median, high = ratios(seconds["logits"], seconds["unmask"])
        held = {n: both.activations(n) for n in seconds}
        row = {"vocabulary": vocabulary, "milliseconds": times, "speedup": [low, median, high]}
        rows.append(row | {"activation_bytes": held, "difference": both.difference()})
        print(
            f"| {vocabulary:,} | {times['logits']:.1f} ms | {times['unmask']:.1f} ms "
            f"| {median:.2f} ({low:.2f}, {high:.2f}) | {held['logits'] / 1e6:.0f} / {held['unmask'] / 1e6:.0f} MB "
            f"| {rows[-1]['difference']:.0e} |",
            flush=True,
        )
    if args.output:
        facts = machine() | {"width": args.width, "states": args.states, "repeats": args.repeats}
        args.output.write_text(json.dumps(facts | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
