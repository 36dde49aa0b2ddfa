"""Small tokenizers, corpora and encoders that the tests share; nothing is downloaded."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch may do
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random
from pathlib import Path

import pytest
import torch
from transformers import (
    AlbertConfig,
    BertConfig,
    CamembertConfig,
    DebertaV2Config,
    ElectraConfig,
    EsmConfig,
    EuroBertConfig,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    RobertaConfig,
    XLMRobertaConfig,
)

from unmask.data.tokenizers import train_tokenizer

torch.set_num_threads(2)

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "juniper", "knoll", "lagoon"]


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 24))) + " ." for _ in range(count)]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(sentences(200), "bpe", 300)


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(sentences(400)) + "\n")
    return path


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


def encoder_config(name: str, **changes: object) -> PreTrainedConfig:
    """A small encoder of a family; pad 0, boundaries 2 and 3, [MASK] 4."""
    sizes: dict[str, object] = {
        "vocab_size": 90,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 130,
        "pad_token_id": 0,
    }
    ends = {"bos_token_id": 2, "eos_token_id": 3}
    match name:
        case "bert":
            return BertConfig(**(sizes | changes))
        case "roberta":
            return RobertaConfig(**(sizes | ends | {"pad_token_id": 1} | changes))
        case "electra":
            return ElectraConfig(**(sizes | {"embedding_size": 16} | changes))
        case "modernbert":  # layers 2 and 3 see a window of 8 positions on each side
            ids = ends | {"cls_token_id": 2, "sep_token_id": 3}
            return ModernBertConfig(**(sizes | ids | {"local_attention": 16} | changes))
        case "esm":
            rotary = {"position_embedding_type": "rotary", "token_dropout": False, "mask_token_id": 4}
            return EsmConfig(**(sizes | rotary | changes))
        case "xlm-roberta":
            return XLMRobertaConfig(**(sizes | ends | {"pad_token_id": 1} | changes))
        case "camembert":
            return CamembertConfig(**(sizes | ends | {"pad_token_id": 1} | changes))
        case "mpnet":
            return MPNetConfig(**(sizes | ends | {"pad_token_id": 1} | changes))
        case "deberta-v2":  # no absolute positions; distances in 16 buckets
            relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
            relative |= {"position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True}
            return DebertaV2Config(**(sizes | relative | changes))
        case "albert":
            return AlbertConfig(**(sizes | {"embedding_size": 16} | changes))
        case "nomic_bert":
            return NomicBertConfig(**(sizes | changes))
        case "eurobert":
            return EuroBertConfig(**(sizes | ends | {"num_key_value_heads": 4, "mask_token_id": 4} | changes))
    raise KeyError(name)


FAMILIES = [
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "mpnet", "deberta-v2"),
    *("modernbert", "nomic_bert", "eurobert", "esm"),
]
