"""Tokenise a corpus once into a memory-mapped file; read it back as full blocks or as one row per document."""

import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from unmask.data.corpus import Corpus, report_skipped
from unmask.data.tokenizers import boundaries, prepared
from unmask.errors import UserError

logger = logging.getLogger("unmask")

BATCH = 1 << 22  # characters tokenised at a time; tokens counted at a time


def default_cache_dir() -> Path:
    """`$UNMASK_CACHE`, else `~/.cache/unmask`."""
    return Path(os.environ.get("UNMASK_CACHE") or "~/.cache/unmask").expanduser()


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents as token ids in a memory-mapped file, where each is followed by the separator (the id `end`).

    `starts`, `lengths`: int64 [documents], places in the file, without separators. `start`, `end`: the boundary ids,
    None where the tokenizer has none. `special`: the ids of all special tokens. `len()` is the number of documents.
    """

    path: Path
    dtype: str
    starts: np.ndarray
    lengths: np.ndarray
    start: int | None
    end: int | None
    special: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.starts)

    def __getstate__(self) -> dict[str, Any]:
        # A memmap would be pickled with its content: each process opens the file itself.
        return {key: value for key, value in self.__dict__.items() if key != "tokens"}

    @cached_property
    def tokens(self) -> np.ndarray:
        """All ids of the file [tokens], memory-mapped."""
        return np.memmap(self.path, self.dtype, mode="r").view(np.ndarray)

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 [documents]: where each document and its separator end in the stream of the selected documents."""
        return np.cumsum(self.lengths + (self.end is not None))

    @property
    def size(self) -> int:
        """Tokens of the stream: the selected documents with a separator between each two."""
        return int(self.ends[-1]) - (self.end is not None)

    def document(self, index: int) -> np.ndarray:
        """The ids of one document [tokens], a view of the file."""
        return self.tokens[self.starts[index] : self.starts[index] + self.lengths[index]]

    def read(self, low: int, high: int) -> np.ndarray:
        """The ids from low to high of that stream [high - low]."""
        first, last = np.searchsorted(self.ends, [low, high - 1], side="right")
        stops = self.starts[first : last + 1] + self.lengths[first : last + 1] + (self.end is not None)
        starts = self.starts[first : last + 1].copy()
        starts[0] = stops[0] - (self.ends[first] - low)
        stops[-1] -= self.ends[last] - high
        return np.concatenate([self.tokens[start:stop] for start, stop in zip(starts, stops, strict=True)])

    def select(self, documents: np.ndarray) -> "Tokens":
        """The documents of these indices, in this order; the ids are not copied."""
        return replace(self, starts=self.starts[documents], lengths=self.lengths[documents])

    def split(self, fraction: float, seed: int) -> tuple["Tokens", "Tokens | None"]:
        """Cut by document into (train, eval): random ones of that seed, until eval has this fraction of the tokens.

        Eval gets at least one document and never all. A single document is not cut: eval is then None.
        Raises `UserError` for a fraction outside of 0 to 1.
        """
        if not 0 < fraction < 1:
            raise UserError(f"an evaluation fraction of {fraction} leaves one side empty: take one between 0 and 1")
        if len(self) == 1:
            logger.warning("the corpus is a single document: nothing is held out for evaluation")
            return self, None
        order = np.random.default_rng(seed).permutation(len(self))
        tokens = np.cumsum(self.lengths[order])
        count = min(int(np.searchsorted(tokens, fraction * tokens[-1])) + 1, len(self) - 1)
        return self.select(np.sort(order[count:])), self.select(np.sort(order[:count]))

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each id occurs in the documents: int64 [vocab_size], 0 for special tokens."""
        counts = np.zeros(vocab_size, np.int64)
        for low in range(0, self.size, BATCH):
            counts += np.bincount(self.read(low, min(low + BATCH, self.size)), minlength=vocab_size)
        counts[[token for token in self.special if token < vocab_size]] = 0
        return counts


def tokenize(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, cache_dir: str | Path) -> Tokens:
    """The corpus as ids, tokenised at the first call and read from `cache_dir` at every later one.

    A special token's name in a document, such as "[MASK]", is tokenised as text or left out. What was skipped is logged
    in every call. Raises `UserError` if the corpus gives no tokens.
    """
    cache_dir = Path(cache_dir)
    folder = cache_dir / _fingerprint(corpus, tokenizer)
    if folder.exists():
        report_skipped(corpus.name, json.loads((folder / "meta.json").read_text())["skipped"])
    else:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=cache_dir) as scratch:
            whole = Path(scratch, "whole")
            whole.mkdir()
            _write(corpus, tokenizer, whole)
            try:
                whole.rename(folder)
            except OSError:
                if not folder.exists():  # else another process was first with the same content
                    raise
    start, end = boundaries(tokenizer)
    ends = np.load(folder / "bounds.npy")
    starts = np.concatenate([[0], ends[:-1]])
    return Tokens(
        path=folder / "tokens.bin",
        dtype=json.loads((folder / "meta.json").read_text())["dtype"],
        starts=starts,
        lengths=ends - starts - (end is not None),
        start=start,
        end=end,
        special=tuple(tokenizer.all_special_ids),
    )


def _fingerprint(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # What the last call of the tokenizer left there says nothing about its ids.
        state |= {"truncation": None, "padding": None}
    else:
        state = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "kwargs": tokenizer.init_kwargs}
    state |= {"overlapping_words": tokenizer.init_kwargs.get("overlapping_words")}
    identity = [corpus.fingerprint, state, boundaries(tokenizer), tokenizer.all_special_ids]
    return xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True, default=str).encode())


def _write(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokens.bin (the ids), bounds.npy (int64 [documents]: the ends, separators included) and meta.json."""
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    end, unknown = boundaries(tokenizer)[1], tokenizer.unk_token_id
    forged = np.zeros(vocab_size, bool)
    forged[[token for token in tokenizer.all_special_ids if token != unknown]] = True
    skipped: Counter[str] = Counter()
    bounds: list[np.ndarray] = []
    position = 0
    with (
        open(folder / "tokens.bin", "wb") as file,
        tqdm(desc="Tokenizing", unit=" tokens", unit_scale=True) as progress,
    ):
        for documents in _batches(corpus):
            documents = [prepared(tokenizer, document) for document in documents]
            rows = tokenizer(
                documents,
                add_special_tokens=False,
                # Tokenizers in Python may rely on splitting at added tokens (ESM's residues are such).
                split_special_tokens=tokenizer.is_fast,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # no warning that a document is longer than the model
            )["input_ids"]
            lengths = np.array([len(row) for row in rows], np.int64)
            ids = np.fromiter(chain.from_iterable(rows), dtype, count=int(lengths.sum()))
            if (special := forged[ids]).any():  # some vocabularies have "</s>" as a piece of text, too
                lengths = np.bincount(np.repeat(np.arange(len(rows)), lengths)[~special], minlength=len(rows))
                ids = ids[~special]
            skipped["special tokens spelled in the text"] += int(special.sum())
            skipped["characters or words unknown to the tokenizer"] += int((ids == unknown).sum())
            skipped["documents without tokens"] += int((lengths == 0).sum())
            lengths = lengths[lengths > 0]
            if end is not None:
                ids = np.insert(ids, np.cumsum(lengths), end)
                lengths = lengths + 1
            file.write(ids.tobytes())
            bounds.append(position + np.cumsum(lengths))
            position += len(ids)
            progress.update(len(ids))
    if not position:
        reasons = ", ".join(corpus.skipped + skipped) or "no documents at all"
        raise UserError(
            f"{corpus.name} is empty ({reasons}): check the files, which must be UTF-8, and their text column"
        )
    np.save(folder / "bounds.npy", np.concatenate(bounds))
    skipped = +skipped  # without the zeros
    report_skipped(corpus.name, skipped)  # the corpus has reported its own
    (folder / "meta.json").write_text(
        json.dumps({"corpus": corpus.name, "dtype": dtype, "skipped": corpus.skipped + skipped}, indent=2)
    )


def _batches(corpus: Iterable[str]) -> Iterator[list[str]]:
    """Lists of documents with BATCH characters or a little more, so that memory is bounded whatever their length."""
    batch: list[str] = []
    characters = 0
    for document in corpus:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class Blocks:
    """The documents joined to one stream, cut into blocks of `length` tokens; the last block may be shorter.

    Item: int64 [n], between the boundary tokens, with separators inside. `lengths`: int64 [rows].
    Raises `UserError` for a length with room for less than two tokens.
    """

    def __init__(self, tokens: Tokens, length: int) -> None:
        self.tokens = tokens
        self.inner = _inner_length(tokens, length)
        self.lengths = np.full(-(-tokens.size // self.inner), length, np.int64)
        self.lengths[-1] -= len(self.lengths) * self.inner - tokens.size

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        low = int(row) * self.inner
        return _between_boundaries(self.tokens, self.tokens.read(low, min(low + self.inner, self.tokens.size)))


class Rows:
    """One row per document, cut to `length` tokens; documents of special tokens alone are left out. Both are logged.

    Item: int64 [n], between the boundary tokens. `lengths`: int64 [rows], to group rows of similar length.
    Raises `UserError` for a length with room for less than two tokens and if no document is left.
    """

    def __init__(self, tokens: Tokens, length: int) -> None:
        inner = _inner_length(tokens, length)
        # Few documents begin with a special token (an unknown one), so few have to be read.
        candidates = np.flatnonzero(np.isin(tokens.tokens[tokens.starts], tokens.special))
        nothing = [row for row in candidates.tolist() if np.isin(tokens.document(row)[:inner], tokens.special).all()]
        if len(nothing) == len(tokens):
            raise UserError("no document has a token that could be masked: check that the tokenizer fits the corpus")
        if nothing:
            logger.warning("%d of %d documents have no token to mask and are left out", len(nothing), len(tokens))
        self.tokens = tokens.select(np.delete(np.arange(len(tokens)), nothing)) if nothing else tokens
        truncated = int((self.tokens.lengths > inner).sum())
        if truncated:
            logger.warning("%d of %d documents are cut to %d tokens", truncated, len(self.tokens), length)
        self.inner = inner
        self.lengths = np.minimum(self.tokens.lengths, inner) + (length - inner)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return _between_boundaries(self.tokens, self.tokens.document(row)[: self.inner])


def _inner_length(tokens: Tokens, length: int) -> int:
    """What a row of `length` tokens holds between its boundaries."""
    inner = length - (tokens.start is not None) - (tokens.end is not None)
    if inner < 2:  # with 1, a block could be a lone separator
        raise UserError(f"a length of {length} leaves no room for text between the boundary tokens: take 4 or more")
    return inner


def _between_boundaries(tokens: Tokens, ids: np.ndarray) -> np.ndarray:
    start = [] if tokens.start is None else [tokens.start]
    end = [] if tokens.end is None else [tokens.end]
    return np.concatenate([start, ids, end]).astype(np.int64)


def sequences(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, most: int
) -> Iterator[np.ndarray]:
    """The first full sequences [length] of documents joined, with boundary tokens, at most `most` of them.

    What fills no sequence is left out. Raises `UserError` where there is not enough text for one.
    """
    start, end = ([] if i is None else [i] for i in boundaries(tokenizer))
    inner = length - len(start) - len(end)
    waiting: list[int] = []
    done = 0
    for document in documents:
        if done == most:
            return
        waiting += tokenizer(prepared(tokenizer, document), add_special_tokens=False, verbose=False)["input_ids"]
        while len(waiting) >= inner and done < most:
            yield np.array([*start, *waiting[:inner], *end])
            waiting = waiting[inner:]
            done += 1
    if not done:
        raise UserError(
            f"The text has {len(waiting)} tokens, but one sequence has {length}: give more text, or a smaller "
            "max_length."
        )
