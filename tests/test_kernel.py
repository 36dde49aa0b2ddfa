"""The Triton kernel under Triton's interpreter, against the torch version."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_alignment import INFINITY, random_scores

from unmask.alignment import log_likelihood, posteriors, recursion

pytest.importorskip("triton", reason="triton exists for Linux alone")

from triton.runtime import interpreter

from unmask.alignment import kernel

# More and fewer vertices than a tile holds; ragged; one path alone; the shortest sequence.
CASES = [([4, 7, 2, 1], [9, 21, 2, 1]), ([5, 3, 6], [70, 33, 64]), ([6, 6], [6, 6])]


@pytest.fixture(autouse=True)
def scalars_as_loop_bounds(monkeypatch):
    """Triton 3.6's interpreter turns arrays of one element into Python integers, which NumPy 2.4 no longer allows."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(params=[True, False], ids=["kernel", "torch"])
def version(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(recursion, "_on_kernel", lambda scores: True)
        monkeypatch.setattr(kernel, "TILE", 16)
    return request.param


def computed(monkeypatch, on_kernel, match, links, lengths):
    """log Z and both gradients, weighted by sequence."""
    monkeypatch.setattr(recursion, "_on_kernel", lambda scores: on_kernel)
    match, links = match.clone().requires_grad_(), links.clone().requires_grad_()
    log_z = log_likelihood(match, links, *lengths)
    (log_z * torch.arange(1, len(log_z) + 1)).sum().backward()
    return log_z.detach(), match.grad, links.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_values_and_gradients(monkeypatch, case, dtype):
    monkeypatch.setattr(kernel, "TILE", 16)
    lengths = [torch.tensor(part) for part in CASES[case]]
    rng = np.random.default_rng(case)
    scores = random_scores(rng, len(lengths[0]), int(max(lengths[0])), int(max(lengths[1])), 2.0)
    scores = [part.to(dtype) for part in scores]
    ours = computed(monkeypatch, True, *scores, lengths)
    theirs = computed(monkeypatch, False, *scores, lengths)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == expected.dtype
        torch.testing.assert_close(mine.double(), expected.double(), rtol=torch.finfo(dtype).eps * 4, atol=1e-12)


def test_scores_that_need_log_space(monkeypatch):
    rng = np.random.default_rng(7)
    match, links = random_scores(rng, 3, 5, 20, 1e4)
    links[0, :, 10:12] = -INFINITY
    lengths = torch.tensor([5, 4, 3]), torch.tensor([20, 18, 5])
    for mine, expected in zip(
        computed(monkeypatch, True, match, links, lengths),
        computed(monkeypatch, False, match, links, lengths),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-9)


def test_no_path_is_refused_and_nan_is_not_hidden(version):
    match, links = random_scores(np.random.default_rng(1), 2, 3, 8, 1.0)
    lengths = torch.tensor([3, 3]), torch.tensor([8, 6])
    links[1, :, 5] = -INFINITY
    with pytest.raises(ValueError, match="sequence 1 of"):
        log_likelihood(match, links, *lengths)
    links[1] = links[0]
    match[0, 1] = torch.nan
    log_z = log_likelihood(match, links, *lengths)
    assert log_z[0].isnan()
    assert log_z[1].isfinite()


def test_posteriors_are_the_same_ones(monkeypatch):
    match, links = random_scores(np.random.default_rng(3), 2, 4, 40, 1.5)
    lengths = torch.tensor([4, 3]), torch.tensor([40, 37])
    expected = posteriors(match, links, *lengths)
    monkeypatch.setattr(recursion, "_on_kernel", lambda scores: True)
    for mine, theirs in zip(posteriors(match, links, *lengths), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        assert (mine.sum() - theirs.sum()).abs() < 1e-9


def test_compiles_for_cuda():
    """The interpreter takes what the compiler would refuse; barriers are what it cannot check."""
    program = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from unmask.alignment import kernel
scores, lengths = "*fp64", "*i64"
shared = dict(match=scores, links=scores, targets=lengths, states=lengths, alpha=scores, log_z=scores)
sizes = dict(T="i32", S="i32", TILE="constexpr")
backward = dict(beta=scores, occupancy=scores, link_use=scores)
for function, signature in ((kernel._forward, shared | sizes), (kernel._backward, shared | backward | sizes)):
    source = ASTSource(fn=function, signature=signature, constexprs={"TILE": kernel.TILE})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "bar.sync" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
