import numpy as np
import pytest
import torch
from conftest import sentences
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.data.masking import (
    EpochSampler,
    MaskedBatches,
    MaskedRows,
    Vocabulary,
    choose_masked,
    masked_inputs,
)
from unmask.data.tokenizers import train_tokenizer
from unmask.objectives import Objective


class Sequences:
    def __init__(self, rows):
        self.rows = [np.array(row) for row in rows]
        self.lengths = np.array([len(row) for row in self.rows])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.rows[row]


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer)


def block(vocabulary, inner, rng, separators=0):
    ids = rng.choice(vocabulary.ordinary, size=inner)
    ids[rng.permutation(inner)[:separators]] = 3
    return np.concatenate([[2], ids, [3]])


@settings(max_examples=150, deadline=None)
@given(
    inner=st.integers(1, 200),
    ratio=st.floats(0.01, 0.99),
    unit=st.sampled_from(["token", "word", "span"]),
    separators=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_masks_are_exact_ascending_and_never_special(vocabulary, inner, ratio, unit, separators, seed):
    rng = np.random.default_rng(seed)
    ids = block(vocabulary, inner, rng, min(separators, inner))
    chosen = choose_masked(ids, Objective(mask_ratio=ratio, mask_unit=unit), vocabulary, rng)
    maskable = inner - min(separators, inner)
    assert len(chosen) == min(max(1, round(ratio * inner)), maskable)
    assert (np.diff(chosen) > 0).all()
    assert not vocabulary.special[ids[chosen]].any()


def test_full_blocks_mask_alike_whatever_separators_they_hold(vocabulary):
    rng = np.random.default_rng(0)
    counts = {len(choose_masked(block(vocabulary, 126, rng, s), Objective(), vocabulary, rng)) for s in range(10)}
    assert counts == {round(0.15 * 126)}


def test_every_position_is_masked_equally_often(vocabulary):
    rng = np.random.default_rng(0)
    ids = block(vocabulary, 40, rng)
    hits = np.zeros(42)
    for _ in range(5000):
        hits[choose_masked(ids, Objective(), vocabulary, rng)] += 1
    assert hits[0] == hits[-1] == 0
    share = hits[1:-1] / 5000  # 6 of 40; standard error 0.005
    assert np.abs(share - 0.15).max() < 0.03


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_words_are_masked_whole(kind):
    tokenizer = train_tokenizer(sentences(100), kind, 290 if kind != "wordpiece" else 45)
    vocabulary = Vocabulary(tokenizer)
    text = sentences(1, seed=9)[0].removesuffix(" .")
    encoding = tokenizer(text)
    ids, words = np.array(encoding["input_ids"]), encoding.word_ids()
    assert len({w for w in words if w is not None}) < len(ids) - 2, "the vocabulary should split some words"
    rng = np.random.default_rng(0)
    halves = 0
    for _ in range(200):
        chosen = set(choose_masked(ids, Objective(mask_ratio=0.3, mask_unit="word"), vocabulary, rng).tolist())
        partly = 0
        for word in {w for w in words if w is not None}:
            pieces = {i for i, w in enumerate(words) if w == word}
            partly += 0 < len(pieces & chosen) < len(pieces)
        assert partly <= 1, "only the last word may be cut short"
        halves += partly
    assert halves > 0


def test_spans_are_runs_of_geometric_length(vocabulary):
    rng = np.random.default_rng(0)
    lengths = []
    for _ in range(300):
        objective = Objective(mask_ratio=0.04, mask_unit="span")
        chosen = choose_masked(block(vocabulary, 500, rng), objective, vocabulary, rng)
        lengths += [len(run) for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)]
    expected = sum(0.8**i for i in range(10))  # E[min(Geometric(0.2), 10)] = 4.46; runs are cut at 20 or joined
    assert 3.4 < np.mean(lengths) < expected + 0.6


def test_fill_shares_are_exact(vocabulary):
    rng = np.random.default_rng(0)
    originals = np.full(20, vocabulary.ordinary[7])
    shares = np.zeros(3)
    for _ in range(2000):
        inputs = masked_inputs(originals, (0.8, 0.1, 0.1), vocabulary, rng)
        assert not vocabulary.special[inputs[inputs != vocabulary.mask_id]].any()
        masks, kept = (inputs == vocabulary.mask_id).sum(), (inputs == originals).sum()
        assert masks == 16
        assert kept in (2, 3)  # a random id may happen to be the original
        shares += [masks, 20 - masks - kept, kept]
    assert shares[1] / shares.sum() == pytest.approx(0.1, abs=0.003)


def test_fractional_shares_are_exact_on_average(vocabulary):
    rng = np.random.default_rng(0)
    originals = np.full(7, vocabulary.ordinary[3])
    masks = [(masked_inputs(originals, (0.8, 0.0, 0.2), vocabulary, rng) == 4).sum() for _ in range(4000)]
    assert set(masks) == {5, 6}
    assert np.mean(masks) == pytest.approx(5.6, abs=0.03)  # 3 standard errors


def test_random_tokens_alone(vocabulary):
    originals = np.full(30, vocabulary.ordinary[3])
    inputs = masked_inputs(originals, (0.0, 1.0, 0.0), vocabulary, np.random.default_rng(0))
    assert not (inputs == vocabulary.mask_id).any()
    assert (inputs != originals).mean() > 0.9


def test_masks_depend_on_seed_epoch_and_row_alone(vocabulary):
    rng = np.random.default_rng(0)
    sequences = Sequences([block(vocabulary, 60, rng)] * 8)
    rows = MaskedRows(sequences, Objective(), vocabulary, seed=3)
    later = MaskedRows(sequences, Objective(), vocabulary, seed=3)
    [later[(e, r, 0)] for e in (4, 2) for r in (5, 1)]  # drawing others before changes nothing
    masks = {}
    for epoch in range(2):
        for row in range(8):
            one, two = rows[(epoch, row, 0)], later[(epoch, row, 0)]
            assert all(np.array_equal(one[name], two[name]) for name in one)
            masks[epoch, row] = tuple(one["masked_positions"])
    assert len(set(masks.values())) == 16
    assert tuple(MaskedRows(sequences, Objective(), vocabulary, 4)[(0, 0, 0)]["masked_positions"]) != masks[0, 0]
    assert tuple(rows[5]["masked_positions"]) == masks[0, 5]


def test_a_batch_holds_each_token_once_with_its_position(vocabulary):
    rng = np.random.default_rng(0)
    sequences = Sequences([block(vocabulary, n, rng) for n in (30, 12, 30, 7)])
    rows = MaskedRows(sequences, Objective(mask_ratio=0.3), vocabulary, 0)
    batch = MaskedBatches(vocabulary.pad_id)([rows[(0, i, 0)] for i in range(4)])
    for i in range(4):
        visible, masked = batch["visible_mask"][i], batch["masked_mask"][i]
        restored = torch.zeros(len(sequences[i]), dtype=torch.long)
        restored[batch["visible_positions"][i][visible]] = batch["visible_ids"][i][visible]
        restored[batch["masked_positions"][i][masked]] = batch["labels"][i][masked]
        assert torch.equal(restored, torch.from_numpy(sequences[i]))
        assert int(visible.sum() + masked.sum()) == len(sequences[i])
        assert (batch["labels"][i][~masked] == -100).all()
        assert (batch["visible_ids"][i][~visible] == vocabulary.pad_id).all()
        assert (batch["masked_inputs"][i][masked] == vocabulary.mask_id).all()


def test_full_blocks_are_rectangles_without_masks(vocabulary):
    rng = np.random.default_rng(0)
    rows = MaskedRows(Sequences([block(vocabulary, 62, rng) for _ in range(5)]), Objective(), vocabulary, 0)
    batch = MaskedBatches(vocabulary.pad_id)([rows[(0, i, 0)] for i in range(5)])
    assert "visible_mask" not in batch
    assert "masked_mask" not in batch
    assert batch["labels"].shape == (5, round(0.15 * 62))


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(3, 60), min_size=1, max_size=400), size=st.integers(1, 16), epoch=st.integers(0, 5))
def test_an_epoch_is_every_row_once(lengths, size, epoch):
    sampler = EpochSampler(np.array(lengths), size, seed=1)
    sampler.set_epoch(epoch)
    keys = list(sampler)
    assert sorted(row for _, row, _ in keys) == list(range(len(lengths)))
    assert {e for e, _, _ in keys} == {epoch}
    assert keys == list(sampler)


def test_rows_of_like_length_share_a_batch():
    lengths = np.random.default_rng(0).integers(5, 80, 6400)
    sampler = EpochSampler(lengths, 32, seed=0)
    order = np.array([row for _, row, _ in sampler])
    batches = lengths[order].reshape(-1, 32)
    padding = 1 - batches.sum() / (batches.max(1) * 32).sum()
    assert padding < 0.05
    assert abs(np.corrcoef(np.arange(200), batches.mean(1))[0, 1]) < 0.3, "batches come in random order"
    sampler.set_epoch(1)
    assert [row for _, row, _ in sampler] != order.tolist()
