"""One MLM training step against the stock one, side by side: same weights, data, masks, dropout, optimizer, autocast.

    python benchmarks/mlm_step.py [--model_type modernbert] [--repeats 15]

The peer is what `run_mlm.py` runs: `AutoModelForMaskedLM` on the full sequence, logits for every token. Steps of the
two alternate, so that both see the same machine; the figure is the ratio of their medians.
"""

import argparse
import copy
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForMaskedLM, BertConfig, ModernBertConfig, PreTrainedConfig

from unmask.devices import has_bf16
from unmask.modeling.pretraining import PretrainingConfig, PretrainingModel
from unmask.objectives import get_objective

MASK = 4


def config(model_type: str, vocab_size: int, layers: int, width: int, length: int, dropout: float) -> PreTrainedConfig:
    shared = {"vocab_size": vocab_size, "hidden_size": width, "num_hidden_layers": layers, "pad_token_id": 0}
    shared |= {"num_attention_heads": width // 64, "max_position_embeddings": length}
    if model_type == "bert":
        return BertConfig(
            **shared,
            intermediate_size=4 * width,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    return ModernBertConfig(
        **shared,
        intermediate_size=-(-8 * width // 3 // 64) * 64,
        layer_types=["full_attention"] * layers,
        embedding_dropout=dropout,
        mlp_dropout=dropout,
        attention_dropout=dropout,
        bos_token_id=2,
        eos_token_id=3,
        cls_token_id=2,
        sep_token_id=3,
    )


def batches(vocab_size: int, batch: int, length: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same masked sequences as the stock model takes them, and as a masked batch."""
    ids = torch.randint(5, vocab_size, (batch, length))
    m = round(0.15 * (length - 2))
    order = 1 + torch.rand(batch, length - 2).argsort(1)
    masked = order[:, :m].sort(1).values
    edges = torch.tensor([[0, length - 1]]).expand(batch, -1)
    visible = torch.cat([order[:, m:], edges], 1).sort(1).values
    labels = torch.full_like(ids, -100).scatter(1, masked, ids.gather(1, masked))
    stock = {"input_ids": ids.scatter(1, masked, MASK), "attention_mask": torch.ones_like(ids), "labels": labels}
    ours = {
        "visible_ids": ids.gather(1, visible),
        "visible_positions": visible,
        "masked_positions": masked,
        "masked_inputs": torch.full_like(masked, MASK),
        "labels": ids.gather(1, masked),
    }
    return stock, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_type", default="modernbert", choices=["modernbert", "bert"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    encoder = config(args.model_type, args.vocab_size, args.layers, args.width, args.length, args.dropout)
    ours = PretrainingModel(
        PretrainingConfig(
            encoder=encoder,
            objective=get_objective("mlm").to_dict(),
            max_length=args.length,
            mask_token_id=MASK,
        )
    ).to(device)
    stock = AutoModelForMaskedLM.from_config(copy.deepcopy(encoder)).to(device)
    stock.base_model.load_state_dict(ours.encoder.state_dict())
    stock_batch, our_batch = batches(args.vocab_size, args.batch, args.length)
    models = {"stock": (stock, stock_batch), "unmask": (ours, our_batch)}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    steps = {}
    for name, (model, batch) in models.items():
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)
        steps[name] = (model, {k: v.to(device) for k, v in batch.items()}, optimizer)
    for repeat in range(args.repeats + 3):
        for name, (model, batch, optimizer) in steps.items():
            start = time.perf_counter()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat >= 3:
                seconds[name].append(time.perf_counter() - start)
    tokens = args.batch * args.length
    result = {
        "setting": {k: v for k, v in vars(args).items() if k != "json"},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {device}, bf16 hardware: {has_bf16()}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens_per_second": {n: tokens / statistics.median(s) for n, s in seconds.items()},
        "milliseconds": {n: [1e3 * min(s), 1e3 * statistics.median(s), 1e3 * max(s)] for n, s in seconds.items()},
        "speedup": statistics.median(seconds["stock"]) / statistics.median(seconds["unmask"]),
    }
    for name, (low, median, high) in result["milliseconds"].items():
        print(
            f"{name:8} {median:8.1f} ms a step (min {low:.1f}, max {high:.1f})  {tokens / median * 1e3:10,.0f} tokens/s"
        )
    print(f"unmask is {result['speedup']:.2f} times as fast")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
