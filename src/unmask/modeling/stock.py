"""A finished encoder to score or to look at: any checkpoint that transformers loads, with its tokenizer."""

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import AutoConfig, AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from unmask.data.tokenizers import load_tokenizer, prepared
from unmask.errors import UserError
from unmask.modeling import cpu

logger = logging.getLogger("unmask")


class Encoder:
    """A checkpoint by name, its tokenizer, and what identifies it.

    name: a folder or a Hub name; a run's folder stands for the stock encoder in it. Raises `UserError` if it cannot be
    loaded.
    """

    def __init__(self, name: str, trust_remote_code: bool = False) -> None:
        self.name, self.trust_remote_code = name, trust_remote_code
        self.path = name
        if Path(name, "config.yaml").is_file():
            self.path = str(Path(name, "encoder"))
            if not Path(self.path).is_dir():
                raise UserError(f"The run '{name}' has not finished: it holds no encoder yet; resume it.")
        try:
            self.config = AutoConfig.from_pretrained(self.path, trust_remote_code=trust_remote_code)
        except Exception as error:  # no such name, no network, a broken file, remote code: transformers raises anything
            reason = str(error).strip().split("\n")[0]
            raise UserError(
                f"No encoder can be loaded from '{name}' ({reason}): give a folder or a Hub name that transformers can "
                "load."
            ) from error
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.path, trust_remote_code, needs=("pad",))

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the weights, the config and the tokenizer; for a Hub name, with the commit."""
        if not Path(self.path).is_dir():
            return f"{self.path}@{getattr(self.config, '_commit_hash', None)}"
        digest = xxhash.xxh3_128()
        for file in sorted(Path(self.path).iterdir()):
            if file.suffix in (".safetensors", ".json", ".txt", ".model"):
                digest.update(file.name.encode())
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def max_length(self, wanted: int) -> int:
        """Tokens of a sequence: what is wanted, or fewer where the encoder takes no more."""
        limit = self.tokenizer.model_max_length  # transformers' own, a very large number where it is not known
        positions = getattr(self.config, "max_position_embeddings", None)
        offset = 2 if self.config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
        return int(min(wanted, limit, wanted if positions is None else positions - offset))

    def load(self, auto: Any = AutoModel, **changes: Any) -> PreTrainedModel:
        """The stock model of an Auto class, float32, from safetensors, with `cpu`'s attention. Raises `UserError`."""
        try:
            model = auto.from_pretrained(
                self.path, trust_remote_code=self.trust_remote_code, use_safetensors=True, dtype="float32", **changes
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise UserError(
                f"'{self.name}' cannot be loaded by {auto.__name__} ({reason}): choose a checkpoint that it takes."
            ) from error
        cpu.install(model)
        return model

    def encode(self, texts: Sequence[tuple[str, ...]], max_length: int, name: str) -> list[dict[str, list[int]]]:
        """Each text, or pair, as `input_ids` and what else the tokenizer gives; how many were cut is said.

        name: what the sentence calls them.
        """
        columns = [[prepared(self.tokenizer, text) for text in column] for column in zip(*texts, strict=True)]
        encoded = self.tokenizer(*columns, truncation=False, verbose=False)
        long = [row for row, ids in enumerate(encoded["input_ids"]) if len(ids) > max_length]
        if long:
            cut = self.tokenizer(*([c[i] for i in long] for c in columns), truncation=True, max_length=max_length)
            for key, values in cut.items():
                for row, value in zip(long, values, strict=True):
                    encoded[key][row] = value
            logger.warning("%s: %d of %d texts cut to %d tokens.", name, len(long), len(texts), max_length)
        if any(len(ids) == 0 for ids in encoded["input_ids"]):
            raise UserError(f"{name}: the tokenizer makes nothing of some texts; leave empty texts out.")
        keys = list(encoded)
        return [dict(zip(keys, row, strict=True)) for row in zip(*encoded.values(), strict=True)]


def finite(scores: np.ndarray, what: str) -> np.ndarray:
    """The scores, if they are all finite. Raises `UserError`."""
    if not np.isfinite(scores).all():
        raise UserError(f"{what}: the model's outputs are not finite; lower the learning rate, or check its weights.")
    return scores
