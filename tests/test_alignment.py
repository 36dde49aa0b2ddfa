"""State alignment against the reference's numbers, against all paths one by one, and at the edges of float64."""

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from unmask.alignment import best_path, log_likelihood, path_entropy, posteriors, recursion, sample_paths

GOLDEN = Path(__file__).parent / "golden"
INFINITY = float("inf")


def paths(target_length: int, state_length: int) -> list[tuple[int, ...]]:
    """Every increasing sequence of T vertices from 0 to S - 1."""
    if target_length == 1:
        return [(0,)] if state_length == 1 else []
    middle = itertools.combinations(range(1, state_length - 1), target_length - 2)
    return [(0, *between, state_length - 1) for between in middle]


def score(path: tuple[int, ...], match: torch.Tensor, links: torch.Tensor) -> float:
    emitted = sum(match[t, u].item() for t, u in enumerate(path))
    return emitted + sum(links[w, u].item() for w, u in itertools.pairwise(path))


def brute_force(match, links, target_length, state_length):
    """log Z, γ, Σξ, entropy and the best score of one sequence, path by path."""
    scores = {path: score(path, match, links) for path in paths(target_length, state_length)}
    scores = {path: value for path, value in scores.items() if value > -INFINITY}
    if not scores:
        return None
    top = max(scores.values())
    log_z = top + math.log(math.fsum(math.exp(value - top) for value in scores.values()))
    gamma, xi, entropy = torch.zeros(match.shape), torch.zeros(links.shape), 0.0
    gamma, xi = gamma.double(), xi.double()
    for path, value in scores.items():
        probability = math.exp(value - log_z)
        entropy -= probability * (value - log_z)
        for t, u in enumerate(path):
            gamma[t, u] += probability
        for w, u in itertools.pairwise(path):
            xi[w, u] += probability
    return log_z, gamma, xi, entropy, top


def path_of(emits: torch.Tensor) -> tuple[int, ...]:
    """The vertices of a path that is written as the target of each vertex."""
    return tuple(emits.argsort(stable=True)[(emits == -1).sum() :].tolist())


def random_scores(rng, batch, steps, vertices, scale, holes=0.0):
    match = torch.from_numpy(rng.normal(size=(batch, steps, vertices)) * scale)
    links = torch.from_numpy(rng.normal(size=(batch, vertices, vertices)) * scale)
    match[torch.from_numpy(rng.random(match.shape) < holes)] = -INFINITY
    links[torch.from_numpy(rng.random(links.shape) < holes)] = -INFINITY
    return match, links


@pytest.mark.parametrize("name", ["tiny", "ragged", "sharp", "mid"])
def test_reference_values_gradients_and_paths(name):
    golden = {key: torch.from_numpy(array) for key, array in np.load(GOLDEN / f"dag_{name}.npz").items()}
    match, links = golden["match"].clone().requires_grad_(), golden["links"].clone().requires_grad_()
    lengths = golden["target_length"], golden["state_length"]
    log_z = log_likelihood(match, links, *lengths)
    torch.testing.assert_close(log_z, golden["log_likelihood"], atol=1e-8, rtol=1e-12)
    log_z.sum().backward()
    torch.testing.assert_close(match.grad, golden["grad_match"], atol=1e-8, rtol=0)
    torch.testing.assert_close(links.grad, golden["grad_links"], atol=1e-8, rtol=0)
    assert torch.equal(best_path(match, links, *lengths), golden["best_path"])


@settings(max_examples=250, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1e3, 1e4]),
    holes=st.sampled_from([0.0, 0.2, 0.5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_quantity_is_the_sum_over_all_paths(lengths, scale, holes, seed):
    rng = np.random.default_rng(seed)
    targets = torch.tensor([t for t, _ in lengths])
    states = torch.tensor([t + more if t > 1 else 1 for t, more in lengths])
    match, links = random_scores(rng, len(lengths), int(targets.max()), int(states.max()), scale, holes)
    expected = [brute_force(match[b], links[b], t, s) for b, (t, s) in enumerate(zip(targets, states, strict=True))]
    stuck = [str(b) for b, found in enumerate(expected) if found is None]
    if stuck:
        with pytest.raises(ValueError, match=f"sequence {', '.join(stuck)} of"):
            log_likelihood(match, links, targets, states)
        return
    rounding = 1e-12 * scale + 1e-12  # of sums of scores; a probability is off by as much, relatively
    log_z = log_likelihood(match, links, targets, states)
    gamma, xi = posteriors(match, links, targets, states)
    entropy = path_entropy(match, links, targets, states)
    best = best_path(match, links, targets, states)
    for b, (log_z_b, gamma_b, xi_b, entropy_b, top_b) in enumerate(expected):
        assert log_z[b].item() == pytest.approx(log_z_b, abs=10 * rounding, rel=1e-12)
        torch.testing.assert_close(gamma[b], gamma_b, atol=1e-9 + 0.1 * rounding, rtol=0)
        torch.testing.assert_close(xi[b], xi_b, atol=1e-9 + 0.1 * rounding, rtol=0)
        assert entropy[b].item() == pytest.approx(entropy_b, abs=10 * rounding + 1e-9)
        assert score(path_of(best[b]), match[b], links[b]) == pytest.approx(top_b, rel=1e-12)
    torch.testing.assert_close(gamma.sum(2), (torch.arange(match.shape[1]) < targets[:, None]).double())


def test_gradients_are_those_of_finite_differences():
    match, links = random_scores(np.random.default_rng(0), 3, 4, 7, 1.0)
    lengths = torch.tensor([4, 3, 2]), torch.tensor([7, 3, 6])
    inputs = match.requires_grad_(), links.requires_grad_()
    assert torch.autograd.gradcheck(lambda m, e: log_likelihood(m, e, *lengths), inputs)


def test_scaled_and_log_space_agree():
    match, links = random_scores(np.random.default_rng(1), 4, 9, 30, 3.0, holes=0.1)
    lengths = torch.tensor([9, 8, 2, 5]), torch.tensor([30, 8 + 10, 20, 29])
    match[:, 0, 0], match[torch.arange(4), lengths[0] - 1, lengths[1] - 1] = 0.5, -0.5
    potentials = recursion._log_potentials(match, links, *lengths)
    scaled, safe = recursion._scaled(*(x.clone() for x in potentials), *lengths)
    assert safe.all()
    for fast, slow in zip(scaled, recursion._in_log_space(*potentials, *lengths), strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-11, rtol=1e-11)


def test_far_underflow_is_computed_in_log_space():
    """The path avoids what is likeliest at each step; every scaled probability on it would round to zero."""
    match, links = torch.full((1, 3, 4), -2000.0), torch.full((1, 4, 4), -4000.0)
    match[0, 1, 1], links[0, 0, 1], links[0, 1, 3] = 0.0, 0.0, -9000.0
    lengths = torch.tensor([3]), torch.tensor([4])
    expected = np.logaddexp(-2000 + 0 + 0 - 9000 - 2000, -2000 - 4000 - 2000 - 4000 - 2000)
    assert log_likelihood(match, links, *lengths).item() == pytest.approx(expected, rel=1e-12)
    uniform = log_likelihood(torch.full((1, 3, 4), -2000.0), torch.full((1, 4, 4), -4000.0), *lengths)
    assert uniform.item() == pytest.approx(-3 * 2000 - 2 * 4000 + math.log(2), rel=1e-12)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_every_input_with_a_path_has_a_finite_answer(scale):
    rng = np.random.default_rng(2)
    match = torch.from_numpy(scale * rng.random((8, 12, 40))).requires_grad_()
    links = torch.from_numpy(scale * rng.random((8, 40, 40))).requires_grad_()
    lengths = torch.full((8,), 12), torch.full((8,), 40)
    log_z = log_likelihood(match, links, *lengths)
    log_z.sum().backward()
    potentials = recursion._log_potentials(match.detach(), links.detach(), *lengths)
    exact = recursion._in_log_space(*potentials, *lengths)
    torch.testing.assert_close(log_z.detach(), exact.log_z, rtol=1e-12, atol=0)
    torch.testing.assert_close(match.grad, exact.occupancy, rtol=0, atol=1e-9)
    torch.testing.assert_close(links.grad, exact.link_use, rtol=0, atol=1e-9)


def test_a_path_that_falls_behind_and_catches_up():
    """0 -> 2 -> 4 -> 5 is e^-800 behind after a step, and e^400 ahead of 0 -> 1 -> 3 -> 5 in the end."""
    match, links = torch.zeros(1, 4, 6), torch.full((1, 6, 6), -INFINITY)
    for w, u, score in ((0, 1, 0), (0, 2, -800), (1, 3, -600), (3, 5, -600), (2, 4, 0), (4, 5, 0)):
        links[0, w, u] = score
    gamma, _ = posteriors(match, links, torch.tensor([4]), torch.tensor([6]))
    assert gamma[0].argmax(1).tolist() == [0, 2, 4, 5]
    log_z = log_likelihood(match, links, torch.tensor([4]), torch.tensor([6]))
    torch.testing.assert_close(log_z, torch.tensor([-800.0], dtype=torch.float64))


def test_a_path_through_every_vertex_and_a_path_of_one():
    match, links = random_scores(np.random.default_rng(3), 2, 5, 5, 1.0)
    chain = match[0].diagonal().sum() + links[0].diagonal(1).sum()
    lengths = torch.tensor([5, 1]), torch.tensor([5, 1])
    torch.testing.assert_close(log_likelihood(match, links, *lengths), torch.stack([chain, match[1, 0, 0]]))
    assert best_path(match, links, *lengths).tolist() == [[0, 1, 2, 3, 4], [0, -1, -1, -1, -1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_floating_type_goes_in_and_its_gradient_comes_back(dtype):
    match, links = (x.to(dtype) for x in random_scores(np.random.default_rng(4), 2, 4, 9, 2.0))
    lengths = torch.tensor([4, 3]), torch.tensor([9, 7])
    exact = log_likelihood(match.double(), links.double(), *lengths)
    log_z = log_likelihood(match.requires_grad_(), links.requires_grad_(), *lengths)
    assert log_z.dtype == torch.float64
    assert torch.equal(log_z, exact)
    log_z.sum().backward()
    assert match.grad.dtype == links.grad.dtype == dtype


def test_padding_is_ignored_whatever_it_holds():
    match, links = random_scores(np.random.default_rng(5), 2, 3, 6, 1.0)
    lengths = torch.tensor([3, 2]), torch.tensor([6, 4])
    expected = log_likelihood(match, links, *lengths)
    match[1, 2:], match[1, :, 4:] = float("nan"), INFINITY
    links[1, 4:], links[1, :, 4:] = 1e9, float("nan")
    links[0] += torch.ones(6, 6).tril() * 1e9
    torch.testing.assert_close(log_likelihood(match, links, *lengths), expected)
    gamma, xi = posteriors(match, links, *lengths)
    assert gamma.isfinite().all()
    assert xi.isfinite().all()


def test_what_is_no_gradient_has_none_and_nan_has_no_path():
    match, links = random_scores(np.random.default_rng(9), 1, 3, 5, 1.0)
    lengths = torch.tensor([3]), torch.tensor([5])
    assert not path_entropy(match.requires_grad_(), links, *lengths).requires_grad
    assert not posteriors(match, links, *lengths)[0].requires_grad
    match = match.detach()
    match[0, 1, :] = float("nan")
    assert log_likelihood(match, links, *lengths).isnan()
    with pytest.raises(ValueError, match="hold NaN"):
        best_path(match, links, *lengths)
    with pytest.raises(ValueError, match="hold NaN"):
        sample_paths(match, links, *lengths, 2)


def test_lengths_that_do_not_fit_are_refused():
    match, links = random_scores(np.random.default_rng(6), 1, 3, 5, 1.0)
    with pytest.raises(ValueError, match="target_length"):
        log_likelihood(match, links, torch.tensor([4]), torch.tensor([5]))
    with pytest.raises(ValueError, match="No path"):
        log_likelihood(match, links, torch.tensor([3]), torch.tensor([2]))
    for wrong in ((match, links[:, :4]), (match.transpose(1, 2), links), (match[0], links[0])):
        with pytest.raises(ValueError, match=r"must be \[B, T, S\] and \[B, S, S\]"):
            log_likelihood(*wrong, torch.tensor([3]), torch.tensor([5]))
    with pytest.raises(ValueError, match=r"must be \[B\], with B = 1"):
        log_likelihood(match, links, torch.tensor([3, 3]), torch.tensor([5]))


class Work(TorchDispatchMode):
    """Counts the operations whose result has so many elements or more, and the batched products."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.large, self.products = elements, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.products += function.overloadpacket is torch.ops.aten.bmm
        if isinstance(result, torch.Tensor) and result.numel() >= self.elements and not result._is_view():
            self.large += 1
        return result


def test_a_step_costs_one_row_of_the_band_each_way():
    """Operations on whole [B, S, S] matrices do not grow with T, products of a row with the band are two a step."""
    counted = []
    for steps in (5, 25):
        match, links = random_scores(np.random.default_rng(8), 2, steps, 40, 1.0)
        lengths = torch.full((2,), steps), torch.full((2,), 40)
        with Work(2 * 40 * 40) as work:
            log_likelihood(match.requires_grad_(), links.requires_grad_(), *lengths).sum().backward()
        assert work.products == 2 * (steps - 1) + 1
        counted.append(work.large)
    assert counted[0] == counted[1] < 25


def test_sampled_paths_come_as_often_as_they_are_probable():
    match, links = random_scores(np.random.default_rng(7), 2, 4, 7, 1.0, holes=0.05)
    match[:, 0, 0] = match[0, 3, 6] = match[1, 2, 5] = 0.0
    targets, states = torch.tensor([4, 3]), torch.tensor([7, 6])
    count = 20_000
    drawn = sample_paths(match, links, targets, states, count, torch.Generator().manual_seed(0))
    log_z = log_likelihood(match, links, targets, states)
    for b in range(2):
        seen = Counter(path_of(emits) for emits in drawn[b])
        for path in paths(int(targets[b]), int(states[b])):
            expected = math.exp(score(path, match[b], links[b]) - log_z[b])
            spread = 5 * math.sqrt(expected * (1 - expected) / count)
            assert seen.pop(path, 0) / count == pytest.approx(expected, abs=spread + 1e-12)
        assert not seen, "a path that does not exist was drawn"
