"""Effective ranks against explicit singular values, and the streaming of them."""

import itertools

import numpy as np
import pytest
import torch
from conftest import encoder_config, sentences
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel

from unmask.analysis import rank
from unmask.analysis.rank import Moments, analyse, effective_rank, measures, overlap, rank_at, singular_values
from unmask.data.packing import sequences
from unmask.errors import UserError
from unmask.modeling.stock import Encoder


def matrix_of(spectrum: list[float], rows: int = 200, seed: int = 0) -> np.ndarray:
    """A matrix [rows, d] with the given singular values."""
    rng, size = np.random.default_rng(seed), len(spectrum)
    left = np.linalg.qr(rng.normal(size=(rows, size)))[0]
    right = np.linalg.qr(rng.normal(size=(size, size)))[0]
    return left @ np.diag(spectrum) @ right


@pytest.mark.parametrize(
    ("spectrum", "tau", "expected"),
    [
        ([1.0] * 10, 0.9, 9),
        ([1.0] * 10, 0.91, 10),
        ([1.0] * 10, 1.0, 10),
        ([9.0, 1.0, 0.0, 0.0], 0.9, 1),
        ([8.0, 1.0, 1.0, 0.0], 0.9, 2),
        ([5.0, 4.0, 3.0, 2.0, 1.0], 0.8, 3),
        ([5.0, 4.0, 3.0, 2.0, 1.0], 0.81, 4),
    ],
)
def test_effective_rank_of_known_spectra(spectrum, tau, expected):
    assert effective_rank(matrix_of(spectrum), tau) == expected
    assert effective_rank(torch.from_numpy(matrix_of(spectrum)).requires_grad_(), tau) == expected
    moments = Moments(len(spectrum))
    moments.add(torch.from_numpy(matrix_of(spectrum)))
    moments.end_group()
    found = singular_values(moments.moment())
    assert rank_at(found, tau) == expected
    np.testing.assert_allclose(found, sorted(spectrum, reverse=True), atol=3e-4 * max(spectrum))


def test_other_measures_of_known_spectra():
    flat = measures(np.ones(8))
    assert flat == pytest.approx((8, 8, 8, 8))
    one = measures(np.array([3.0, 0.0, 0.0]))
    assert one == pytest.approx((1, 1, 1, 1))
    two = measures(np.array([3.0, 1.0]))
    assert two.entropy_rank == pytest.approx(np.exp(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25))))
    assert two.participation_ratio == pytest.approx((9 + 1) ** 2 / (81 + 1))
    assert two.stable_rank == pytest.approx(10 / 9)
    assert measures(np.zeros(4)) == (0, 0, 0, 0)
    assert effective_rank(np.zeros((5, 4))) == 0
    with pytest.raises(ValueError, match="tau is 0"):
        rank_at(np.ones(3), 0.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 60), st.floats(0.05, 1.0), st.integers(0, 10**6))
def test_effective_rank_by_its_definition(size, rows, tau, seed):
    matrix = np.random.default_rng(seed).normal(size=(rows, size))
    values = np.linalg.svd(matrix, compute_uv=False)
    found = effective_rank(matrix, tau)
    assert values[:found].sum() >= tau * values.sum() * (1 - 1e-9)
    assert values[: found - 1].sum() < tau * values.sum() * (1 + 1e-9)


@pytest.mark.parametrize("centred", [False, True])
def test_streaming_is_the_whole_matrix(centred):
    rows = torch.from_numpy(matrix_of([9.0, 5.0, 3.0, 1.0, 0.5, 0.1]) + 0.3).float()
    moments = Moments(6)
    for part in rows.split([50, 1, 70, 79]):
        moments.add(part)
        moments.end_group()
    whole = rows.double().numpy()
    whole = whole - whole.mean(0) if centred else whole
    np.testing.assert_allclose(moments.moment(centred), whole.T @ whole, rtol=1e-4, atol=1e-4)
    assert moments.count == 200
    expected = np.linalg.svd(whole, compute_uv=False)
    np.testing.assert_allclose(singular_values(moments.moment(centred)), expected, atol=3e-3)


@pytest.mark.parametrize("centred", [False, True])
def test_resamples_spread_as_those_of_whole_decompositions(centred):
    """Singular values of groups drawn with replacement: exact ones by a decomposition for each draw."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 200, 8, generator=generator) @ torch.diag(torch.linspace(1, 4, 8)) + 0.5
    moments = Moments(8)
    for part in rows:
        moments.add(part)
        moments.end_group()
    vectors = rank.spectrum(moments.moment(centred))[1]
    found = moments.resampled(vectors, 300, seed=1, centred=centred)
    rng, exact = np.random.default_rng(1), []
    for _ in range(300):
        drawn = rows[rng.integers(30, size=30)].flatten(0, 1).double().numpy()
        drawn = drawn - drawn.mean(0) if centred else drawn
        exact.append(np.linalg.svd(drawn, compute_uv=False))
    exact = np.array(exact)
    np.testing.assert_allclose(np.sort(found, axis=1)[:, ::-1], exact, rtol=0.02)
    np.testing.assert_allclose(found.std(0), exact.std(0), rtol=0.35)
    entropy = [np.std([measures(values).entropy_rank for values in each]) for each in (found, exact)]
    assert entropy[0] == pytest.approx(entropy[1], rel=0.25)


def test_overlap_of_subspaces():
    first, second = np.diag([1.0, 1.0, 0, 0]), np.diag([0, 1.0, 1.0, 0])
    found = overlap(first, second, tau=0.99)
    assert found.unused_variance == pytest.approx(0.5)
    assert found.angles == pytest.approx([0, 90], abs=1e-5)
    assert overlap(first, first, tau=0.99).unused_variance == pytest.approx(0)


@pytest.fixture(scope="module")
def encoder(tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("rank")
    AutoModel.from_config(encoder_config("bert", vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Encoder(str(folder))


TEXTS = sentences(400, 3)


def test_ranks_of_an_encoder_are_those_of_its_hidden_states(encoder):
    found = analyse(encoder, TEXTS, max_tokens=2000, max_length=40, batch_size=4, resamples=3)
    ids = torch.from_numpy(np.stack(list(sequences(TEXTS, encoder.tokenizer, 40, 50))))
    assert found.tokens == ids.numel() == 2000
    with torch.no_grad():
        output = encoder.load(AutoModel).eval()(input_ids=ids, output_hidden_states=True)
    for layer, hidden in zip(found.layers, output.hidden_states, strict=True):
        matrix = hidden.flatten(0, 1)
        assert layer["plain"]["effective_rank"] == pytest.approx(effective_rank(matrix), abs=1)
        expected = measures(np.linalg.svd(matrix.double().numpy(), compute_uv=False))
        assert layer["plain"]["entropy_rank"] == pytest.approx(expected.entropy_rank, rel=0.02)
        assert layer["plain"]["tokens"] == 2000
        assert layer["real"]["tokens"] + layer["mask"]["tokens"] == layer["all"]["tokens"] == 2000
        assert layer["mask"]["tokens"] == 50 * round(0.15 * 38)
    # All [MASK]s have one embedding, so that without positions their matrix has rank 1.
    assert found.layers[0]["mask"]["effective_rank"] < found.layers[0]["plain"]["effective_rank"]


@pytest.mark.parametrize("batch_size", [1, 7, 50])
def test_the_batch_size_does_not_matter(encoder, batch_size):
    first, other = (
        analyse(encoder, TEXTS, max_tokens=2000, max_length=40, batch_size=size, resamples=0)
        for size in (16, batch_size)
    )
    for a, b in zip(first.layers, other.layers, strict=True):
        for kind in rank.KINDS:
            np.testing.assert_allclose(a[kind]["spectrum"], b[kind]["spectrum"], rtol=2e-3, atol=2e-2)


def test_bfloat16_is_near(encoder):
    """Rounding of 2^-9 adds noise of about that share of the largest singular value to the others."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 32, generator=generator) @ torch.diag(torch.linspace(1, 3, 32))
    found = []
    for matrix in (rows, rows.bfloat16()):
        moments = Moments(32)
        moments.add(matrix)
        moments.end_group()
        found.append(singular_values(moments.moment()))
    assert np.abs(found[0] - found[1]).max() < 2**-9 * found[0][0]
    assert effective_rank(rows.bfloat16()) == rank_at(found[1])
    assert abs(rank_at(found[0]) - rank_at(found[1])) <= 1


def test_the_analysis_draws_the_same_masks_each_time(encoder):
    one, two = (analyse(encoder, TEXTS, max_tokens=400, max_length=40, resamples=0) for _ in range(2))
    assert [layer["mask"]["spectrum"] for layer in one.layers] == [layer["mask"]["spectrum"] for layer in two.layers]
    other = analyse(encoder, TEXTS, max_tokens=400, max_length=40, resamples=0, seed=1)
    assert other.layers[-1]["mask"]["spectrum"] != one.layers[-1]["mask"]["spectrum"]


def test_what_cannot_be_analysed_is_said(encoder, monkeypatch):
    with pytest.raises(UserError, match="one sequence has 40"):
        analyse(encoder, ["short"], max_length=40)
    model = encoder.load(AutoModel)
    model.encoder.layer[1].output.dense.weight.data[0, 0] = torch.inf
    monkeypatch.setattr(encoder, "load", lambda *a, **k: model)
    with pytest.raises(UserError, match="activations of layer 2 are not finite"):
        analyse(encoder, TEXTS, max_tokens=80, max_length=40)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **k: type("Output", (), {"last_hidden_state": forward(**k)[0]})())
    with pytest.raises(UserError, match="gives no hidden states"):
        analyse(encoder, TEXTS, max_tokens=80, max_length=40)
    unmasked = Encoder(encoder.name)
    unmasked.tokenizer.mask_token = None
    with pytest.raises(UserError, match=r"tokenizer without \[MASK\]"):
        analyse(unmasked, TEXTS, max_length=40)


@pytest.mark.parametrize(("mask", "says"), [([1, 5, 9], "growing with depth as"), ([5, 9, 2], "not growing at every")])
def test_the_verdict_is_that_of_the_numbers(mask, says):
    layers = [
        {"size": 16, "mask": {"effective_rank": m}, "plain": {"effective_rank": p}}
        for m, p in zip(mask, (14, 11, 12), strict=True)
    ]
    found = rank.verdict(rank.RankAnalysis("runs/x", 10, 0.9, False, layers))
    assert f"from {mask[0]} at the embeddings to {mask[-1]}" in found
    assert says in found
    assert "unused in layer 1: 11 of 16" in found


def test_groups_are_as_many_as_are_wanted(encoder, monkeypatch):
    kept = []
    end = Moments.end_group
    monkeypatch.setattr(Moments, "end_group", lambda self: kept.append(id(self)) or end(self))
    analyse(encoder, list(itertools.islice(TEXTS, 400)), max_tokens=4000, max_length=40, batch_size=1, resamples=2)
    counts = {kept.count(each) for each in set(kept)}
    assert counts == {34}  # 100 batches in groups of 3, at most 40
