"""Which positions are masked, and the masked batch: the only thing the data side hands to the model.

Masks depend on (seed, epoch, row) alone: not on loader workers, processes, or a resumed run. So does a ratio that is
drawn for each batch, on (seed, epoch, batch).

A masked batch (v visible and m masked positions of L tokens, boundary tokens included):

| tensor | shape | meaning |
|---|---|---|
| `visible_ids`, `visible_positions` | [B, v] | what was not masked, in order, with original positions |
| `masked_positions` | [B, m] | where, ascending |
| `masked_inputs` | [B, m] | the id that stands there for the encoder: `[MASK]`, a random id, or the original |
| `labels` | [B, m] | the original ids, -100 where padded |
| `visible_mask`, `masked_mask` | [B, v], [B, m] | True where real; left out when nothing is padded |

With `expand_anchors` the boundary tokens are in the masked block too, as themselves.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from unmask.data.tokenizers import boundaries, prepared
from unmask.errors import UserError
from unmask.objectives import Objective

SPAN_STOP, SPAN_LONGEST = 0.2, 10  # SpanBERT: lengths ~ Geometric(0.2), at most 10 tokens


class SequenceRows(Protocol):
    """Rows of ids with their boundary tokens: `Blocks` or `Rows` of `packing`."""

    lengths: np.ndarray

    def __len__(self) -> int: ...
    def __getitem__(self, row: int) -> np.ndarray: ...


class Vocabulary:
    """What masking must know of a tokenizer: its [MASK], its special ids, and which tokens begin a word."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.size = len(tokenizer)
        self.mask_id: int = tokenizer.mask_token_id
        self.pad_id: int = tokenizer.pad_token_id
        self.special = np.zeros(self.size, dtype=bool)
        self.special[[i for i in tokenizer.all_special_ids if i < self.size]] = True
        self.ordinary = np.flatnonzero(~self.special)
        self.begins_word = _word_beginnings(tokenizer.convert_ids_to_tokens(range(self.size)))


def _word_beginnings(pieces: Sequence[str | None]) -> np.ndarray:
    """[V] bool: whether a token begins a word, by the marks of WordPiece (##), byte-level BPE (Ġ) or Unigram (▁)."""
    texts = [piece or "" for piece in pieces]
    for mark in ("Ġ", "▁"):
        if any(text.startswith(mark) for text in texts):
            # Punctuation carries no mark, yet does not belong to the word before it.
            return np.array([text.startswith(mark) or not any(c.isalnum() for c in text) for text in texts])
    return np.array([not text.startswith("##") for text in texts])


def choose_masked(
    ids: np.ndarray, objective: Objective, vocabulary: Vocabulary, rng: np.random.Generator
) -> np.ndarray:
    """Ascending positions [m] to mask in `ids` [L]: exactly round(mask_ratio x length without boundaries), at least 1.

    Separators and other special tokens are never masked. Units are drawn until m; the last one is shortened.
    """
    maskable = ~vocabulary.special[ids]
    candidates = np.flatnonzero(maskable)
    boundaries = int(vocabulary.special[ids[0]]) + int(len(ids) > 1 and vocabulary.special[ids[-1]])
    count = min(max(1, round(objective.mask_ratio * (len(ids) - boundaries))), len(candidates))
    if objective.mask_unit == "token":
        chosen = rng.permutation(candidates)[:count]
    else:
        chosen = _draw_units(ids, maskable, candidates, count, objective.mask_unit, vocabulary, rng)
    return np.sort(chosen)


def _draw_units(
    ids: np.ndarray,
    maskable: np.ndarray,
    candidates: np.ndarray,
    count: int,
    unit: str,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
) -> np.ndarray:
    if unit == "word":
        # A word also ends where a special token stands in between.
        begins = vocabulary.begins_word[ids[candidates]] | (np.diff(candidates, prepend=-2) > 1)
        words = np.split(candidates, np.flatnonzero(begins)[1:])
        return np.concatenate([words[i] for i in rng.permutation(len(words))])[:count]
    free = maskable.copy()
    chosen: list[int] = []
    while len(chosen) < count:
        start = int(rng.choice(np.flatnonzero(free)))
        length = min(int(rng.geometric(SPAN_STOP)), SPAN_LONGEST, count - len(chosen))
        for position in range(start, min(start + length, len(ids))):
            if not free[position]:
                break
            free[position] = False
            chosen.append(position)
    return np.array(chosen, dtype=np.int64)


def masked_inputs(
    originals: np.ndarray, fill: tuple[float, float, float], vocabulary: Vocabulary, rng: np.random.Generator
) -> np.ndarray:
    """Ids [m] that stand at the masked positions for the encoder.

    The counts of [MASK], random and unchanged ids are the shares times m, rounded at random so that they are exact on
    average and never off by more than one.
    """
    inputs = np.full_like(originals, vocabulary.mask_id)
    if fill[0] < 1:
        m = len(originals)
        offset = rng.random()
        kept_from = m - int(fill[2] * m + offset)
        random_from = max(0, m - int((fill[1] + fill[2]) * m + offset))
        order = rng.permutation(m)
        randomised, kept = order[random_from:kept_from], order[kept_from:]
        inputs[randomised] = rng.choice(vocabulary.ordinary, size=len(randomised))
        inputs[kept] = originals[kept]
    return inputs


def masked_example(
    ids: np.ndarray, positions: np.ndarray, inputs: np.ndarray, expand_anchors: bool = False
) -> dict[str, np.ndarray]:
    """One row of a masked batch: ids [L], ascending masked positions [m] and what stands there for the encoder [m]."""
    if expand_anchors:
        positions = np.concatenate([[0], positions, [len(ids) - 1]])
        inputs = np.concatenate([ids[:1], inputs, ids[-1:]])
    visible = np.ones(len(ids), dtype=bool)
    visible[positions] = False
    return {
        "visible_ids": ids[visible],
        "visible_positions": np.flatnonzero(visible),
        "masked_positions": positions,
        "masked_inputs": inputs,
        "labels": ids[positions],
    }


def repeated(ids: np.ndarray, copies: int, vocabulary: Vocabulary) -> np.ndarray:
    """Each token `copies` times in a row, the boundary tokens once (ExLM §2, Repeated MLM)."""
    counts = np.full(len(ids), copies)
    counts[[i for i in (0, -1) if vocabulary.special[ids[i]]]] = 1
    return np.repeat(ids, counts)


class MaskedRows(torch.utils.data.Dataset):
    """Rows with their masks drawn: indexed by (epoch, row, batch), or by row alone for evaluation (epoch 0).

    expand_anchors: as the model's objective has it, which for evaluation is not the `objective` that draws the masks.
    """

    def __init__(
        self,
        rows: SequenceRows,
        objective: Objective,
        vocabulary: Vocabulary,
        seed: int,
        expand_anchors: bool = False,
    ) -> None:
        self.rows, self.objective, self.vocabulary, self.seed = rows, objective, vocabulary, seed
        self.expand_anchors = expand_anchors

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int, int] | int) -> dict[str, np.ndarray]:
        epoch, row, batch = key if isinstance(key, tuple) else (0, key, 0)
        ids, objective = self.rows[row], self.objective
        rng = np.random.default_rng((self.seed, epoch, row))
        if objective.repeat > 1:
            ids = repeated(ids, objective.repeat, self.vocabulary)
            positions = np.flatnonzero((rng.random(len(ids)) < objective.mask_ratio) & ~self.vocabulary.special[ids])
        else:
            if objective.mask_ratio_high is not None:  # one ratio for the whole batch
                drawn = np.random.default_rng((self.seed, epoch, batch, 1))
                ratio = drawn.uniform(objective.mask_ratio, objective.mask_ratio_high)
                objective = dataclasses.replace(objective, mask_ratio=ratio, mask_ratio_high=None)
            positions = choose_masked(ids, objective, self.vocabulary, rng)
        inputs = masked_inputs(ids[positions], self.objective.mask_fill, self.vocabulary, rng)
        return masked_example(ids, positions, inputs, self.expand_anchors)


class MaskedBatches:
    """Collates the rows of `MaskedRows` to a masked batch, padding only where lengths differ."""

    def __init__(self, pad_id: int) -> None:
        self.padding = {"visible_ids": pad_id, "masked_inputs": pad_id, "labels": -100}

    def __call__(self, examples: Sequence[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        batch = {name: _stack([e[name] for e in examples], self.padding.get(name, 0)) for name in examples[0]}
        for block, mask in (("visible_ids", "visible_mask"), ("labels", "masked_mask")):
            sizes = torch.tensor([len(e[block]) for e in examples])
            if (sizes != sizes[0]).any():
                batch[mask] = torch.arange(batch[block].shape[1]) < sizes[:, None]
        return batch


def text_batch(
    tokenizer: PreTrainedTokenizerBase, text: str, max_length: int, expand_anchors: bool = False
) -> dict[str, torch.Tensor]:
    """A text with [MASK]s as a masked batch of one sequence, without labels. Raises `UserError` if it cannot be one."""
    start, end = boundaries(tokenizer)  # as in pretraining, whether or not the tokenizer itself adds them
    inner = tokenizer(prepared(tokenizer, text), add_special_tokens=False)["input_ids"]
    ids = np.array([*([start] if start is not None else []), *inner, *([end] if end is not None else [])])
    masked = np.flatnonzero(ids == tokenizer.mask_token_id)
    if not len(masked):
        raise UserError(
            f"The text holds no {tokenizer.mask_token}: write {tokenizer.mask_token} where a token is missing."
        )
    if len(ids) > max_length:
        raise UserError(f"The text has {len(ids)} tokens but the model was trained on {max_length}: shorten it.")
    if len(masked) == len(ids):
        raise UserError(f"The text holds nothing but {tokenizer.mask_token}: give some of what stands around it.")
    batch = MaskedBatches(tokenizer.pad_token_id)([masked_example(ids, masked, ids[masked], expand_anchors)])
    del batch["labels"]
    return batch


def _stack(arrays: Sequence[np.ndarray], padding: int) -> torch.Tensor:
    stacked = np.full((len(arrays), max(len(a) for a in arrays)), padding, dtype=np.int64)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(stacked)


class EpochSampler(torch.utils.data.Sampler):
    """(epoch, row, batch) in an order that depends on (seed, epoch) alone; rows of like length share a batch.

    Lengths are grouped inside random pools of 50 batches, so that batches stay random and padding small.
    """

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch, resumed ones included."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(len(self.lengths))
        # All blocks but a corpus's last are equally long: nothing to group there.
        if len(order) > 2 and np.partition(self.lengths, 1)[1] != self.lengths.max():
            order = self._group(order, rng)
        return ((self.epoch, int(row), place // self.batch_size) for place, row in enumerate(order))

    def _group(self, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        size = self.batch_size
        pools = np.split(order, range(50 * size, len(order), 50 * size))
        ordered = np.concatenate([pool[np.argsort(-self.lengths[pool], kind="stable")] for pool in pools])
        batches = np.split(ordered, range(size, len(ordered), size))
        last = [batches.pop()] if len(batches[-1]) < size else []  # a short batch is the epoch's last
        return np.concatenate([batches[i] for i in rng.permutation(len(batches))] + last)
