"""What the rank analysis of a 12-layer, 768-wide encoder costs: peak memory, and the time outside its forward passes.

    python benchmarks/rank.py [--max_tokens 200000]

A BERT with random weights reads the built-in English text; what a forward pass computes does not depend on its weights.
"""

import argparse
import resource
import tempfile
import time

import torch
from transformers import AutoModel, BertConfig

from unmask.analysis import rank
from unmask.data.documentation import documentation
from unmask.data.tokenizers import train_tokenizer
from unmask.modeling.stock import Encoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_tokens", type=int, default=200_000)
    parser.add_argument("--max_length", type=int, default=128)
    args = parser.parse_args()
    texts = documentation()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer(texts, "bpe", 8192)
        tokenizer.model_max_length = args.max_length
        tokenizer.save_pretrained(folder)
        AutoModel.from_config(BertConfig(vocab_size=8192, pad_token_id=0)).save_pretrained(folder)
        encoder, forward, inside = Encoder(folder), rank.hidden_states, [0.0]

        def timed(*values: object) -> object:
            start = time.perf_counter()
            found = forward(*values)
            inside[0] += time.perf_counter() - start
            return found

        rank.hidden_states = timed
        start = time.perf_counter()
        found = rank.analyse(encoder, texts, max_tokens=args.max_tokens, max_length=args.max_length)
        seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{found.tokens:,} tokens, {len(found.layers)} layers of {found.layers[0]['size']}: {seconds:.0f} s, of which "
        f"{1 - inside[0] / seconds:.0%} outside the forward passes; peak memory {memory:.2f} GiB; "
        f"{torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
