"""The data's way to the model beside the stock one: tokenise and pack, then mask and collate, in tokens per second.

    python benchmarks/data.py FILE... [--output benchmarks/data.json]

The peers are those of `run_mlm.py`: `datasets.map` with the tokenizer, then with `group_texts`, from a cold cache, and
a DataLoader with `DataCollatorForLanguageModeling`. Both loaders have one worker; the last line puts ours beside the
fastest model step of the presets.
"""

import argparse
import json
import statistics
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import torch
from measuring import Step, machine
from transformers import DataCollatorForLanguageModeling

from unmask.data.corpus import open_corpus
from unmask.data.masking import EpochSampler, MaskedBatches, MaskedRows, Vocabulary
from unmask.data.packing import Blocks, tokenize
from unmask.data.tokenizers import load_tokenizer, train_tokenizer
from unmask.objectives import get_objective

LENGTH, BATCH = 128, 32


def stock_blocks(documents: list[str], tokenizer: Any, cache: str) -> Any:
    """As `run_mlm.py` makes them, on one process."""

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain(*lists)) for name, lists in rows.items()}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        return {name: [ids[i : i + LENGTH] for i in range(0, total, LENGTH)] for name, ids in joined.items()}

    data = datasets.Dataset.from_dict({"text": documents})
    data = data.map(
        lambda rows: tokenizer(rows["text"], return_special_tokens_mask=True),
        batched=True,
        remove_columns="text",
        cache_file_name=f"{cache}/tokens.arrow",
    )
    return data.map(group, batched=True, cache_file_name=f"{cache}/blocks.arrow")


def tokens_per_second(loader: Any, batches: int) -> float:
    """Of a loader under way: the first batches, which start its worker, are not counted."""
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    start = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return batches * BATCH * LENGTH / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--characters", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    documents: list[str] = []
    left = args.characters
    for document in open_corpus(args.files):
        if left <= 0:
            break
        documents.append(document)
        left -= len(document)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "corpus.txt")
        text.write_text("\n\n".join(d.replace("\n\n", "\n") for d in documents), encoding="utf-8")
        corpus = open_corpus([str(text)], sample_by="paragraph")
        train_tokenizer(corpus, "bpe", 16384).save_pretrained(f"{folder}/tokenizer")
        tokenizer = load_tokenizer(f"{folder}/tokenizer")
        rates: dict[str, list[float]] = {n: [] for n in ("tokenise stock", "tokenise", "load stock", "load")}
        for repeat in range(args.repeats):
            start = time.perf_counter()
            tokens = tokenize(corpus, tokenizer, f"{folder}/ours{repeat}")
            blocks = Blocks(tokens, LENGTH)
            rates["tokenise"].append(tokens.size / (time.perf_counter() - start))
            cache = Path(folder, f"stock{repeat}")
            cache.mkdir()
            start = time.perf_counter()
            stock = stock_blocks(documents, tokenizer, str(cache))
            rates["tokenise stock"].append(len(stock) * LENGTH / (time.perf_counter() - start))
            masked = MaskedRows(blocks, get_objective("mlm"), Vocabulary(tokenizer), 0)
            ours = torch.utils.data.DataLoader(
                masked,
                BATCH,
                sampler=EpochSampler(blocks.lengths, BATCH, 0),
                collate_fn=MaskedBatches(tokenizer.pad_token_id),
                num_workers=1,
            )
            theirs = torch.utils.data.DataLoader(
                stock, BATCH, shuffle=True, collate_fn=DataCollatorForLanguageModeling(tokenizer), num_workers=1
            )
            batches = min(500, len(blocks) // BATCH - 25)
            rates["load"].append(tokens_per_second(ours, batches))
            rates["load stock"].append(tokens_per_second(theirs, batches))
    step = Step("mlm", layers=4, width=128, vocab_size=8192, batch=BATCH, length=LENGTH)  # preset tiny
    seconds = statistics.median([step() for _ in range(9)][2:])
    print(machine())
    print("| | stock | unmask | times as fast |\n|---|---|---|---|")
    for what in ("tokenise", "load"):
        theirs, ours = (statistics.median(rates[name]) for name in (f"{what} stock", what))
        print(f"| {what} | {theirs:,.0f} tokens/s | {ours:,.0f} tokens/s | {ours / theirs:.1f} |")
    step_rate = BATCH * LENGTH / seconds
    loader = statistics.median(rates["load"])
    print(f"loader {loader:,.0f} tokens/s, fastest step (mlm, tiny) {step_rate:,.0f}: {loader / step_rate:.1f} times")
    if args.output:
        args.output.write_text(json.dumps(machine() | {"tokens_per_second": rates, "step": step_rate}, indent=1))


if __name__ == "__main__":
    main()
