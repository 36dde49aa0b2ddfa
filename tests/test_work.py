"""How much a step computes, holds, pads and recompiles: counted, so that a slower step is seen without a clock."""

import numpy as np
import pytest
import torch
from measuring import Activations, Ids, Step, activation_bytes
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from unmask.alignment import log_likelihood
from unmask.data.masking import EpochSampler, MaskedBatches, MaskedRows
from unmask.modeling import cpu, head
from unmask.objectives import get_objective

SMALL = {"layers": 2, "width": 64, "batch": 4, "length": 128}


def counted(objective, **setting):
    step = Step(objective, **(SMALL | setting))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        step.forward().backward()
    return counter.get_total_flops(), step


@pytest.mark.parametrize(
    ("objective", "times"),
    # What was counted, and one part in fifty: in so narrow a model logits are most of the stock step.
    [("mlm", 0.298), ("mae-lm", 0.459), ("mae-lm-2-layers", 0.347), ("exlm", 0.919), ("mae-exlm", 1.141)],
)
def test_flops_of_a_step_beside_the_stock_step(objective, times, monkeypatch):
    monkeypatch.setattr("measuring.has_bf16", lambda: False)
    stock, ours = counted("stock", vocab_size=16384)[0], counted(objective, vocab_size=16384)[0]
    assert ours <= times * stock


def test_the_stock_step_that_is_compared_with_learns_the_same(monkeypatch):
    """Same weights, head included, same sequences, same masks: the same loss."""
    monkeypatch.setattr("measuring.has_bf16", lambda: False)
    stock, ours = (Step(name, vocab_size=512, **SMALL).forward() for name in ("stock", "mlm"))
    torch.testing.assert_close(stock, ours)


@pytest.mark.parametrize("objective", ["mlm", "mae-lm", "exlm", "mae-exlm"])
def test_activations_do_not_grow_with_the_vocabulary(objective, monkeypatch):
    monkeypatch.setitem(head.LOGITS, "cpu", 1 << 16)  # fewer than there are even with the small one
    small, large = (activation_bytes(Step(objective, vocab_size=v, **SMALL)) for v in (8192, 131072))
    assert large < 1.05 * small


@pytest.mark.parametrize(
    ("objective", "megabytes"),
    [("mlm", 12), ("mae-lm", 19), ("exlm", 29), ("mae-exlm", 37)],  # the stock step: 107
)
def test_activations_of_a_step(objective, megabytes, monkeypatch):
    monkeypatch.setattr("measuring.has_bf16", lambda: False)
    assert activation_bytes(Step(objective, vocab_size=16384, **SMALL)) < megabytes * 1e6


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("objective", ["mlm", "mae-lm", "mae-lm-self-cross", "exlm", "mae-exlm"])
def test_checkpointed_activations_are_fewer_and_learn_the_same(objective, reentrant, monkeypatch):
    monkeypatch.setattr("measuring.has_bf16", lambda: False)
    step = Step(objective, vocab_size=64, **(SMALL | {"layers": 4}))
    plain, loss = activation_bytes(step), step.forward()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}
    step.optimizer.zero_grad()
    step.model.activation_checkpointing_enable({"use_reentrant": reentrant})
    again = step.forward()
    again.backward()
    torch.testing.assert_close(again, loss)
    for name, parameter in step.model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-5)
    step.optimizer.zero_grad()
    assert activation_bytes(step) < 0.4 * plain


def test_attention_in_blocks_holds_the_scores_of_a_few_heads(monkeypatch):
    monkeypatch.setattr(cpu, "SCORES", 256 * 256)  # those of one head
    inputs = [torch.randn(8, 4, 256, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with Activations(torch.nn.ParameterList(inputs)) as watch:
        cpu.attention(*inputs).sum().backward()
    all_scores = 8 * 4 * 256 * 256 * 2  # bytes
    assert watch.peak < all_scores / 4


@pytest.mark.parametrize(("steps", "vertices"), [(5, 120), (40, 120), (110, 120)])
def test_alignment_holds_a_few_matrices_however_many_steps(steps, vertices):
    """O(B (T S + S^2)): less than four of float64; the loop under autograd keeps T of B S^2."""
    match = torch.randn(4, steps, vertices, requires_grad=True)
    links = torch.randn(4, vertices, vertices, requires_grad=True)
    with Activations(torch.nn.ParameterList()) as watch:
        log_likelihood(match, links, torch.full((4,), steps), torch.full((4,), vertices)).sum().backward()
    assert watch.peak < 4 * 8 * 4 * (steps * vertices + vertices**2)


@pytest.mark.parametrize("model_type", ["modernbert", "bert"])
@pytest.mark.parametrize("objective", ["mlm", "mae-lm", "exlm"])
def test_compiled_layers_have_no_graph_breaks_and_share_their_graphs(model_type, objective):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = Step(objective, model_type=model_type, vocab_size=64, **(SMALL | {"layers": 4}))
    expected = step.model.eval()(**step.batch).loss
    step.model.compile_layers(backend=backend)
    loss = step.model(**step.batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert 1 <= len(graphs) <= 4, "layers alike share one graph; the decoder's last has fewer queries"
    torch._dynamo.reset()


def lengths_like_molecules(count=4000):
    """Gamma-distributed as those of ChEMBL's SMILES: mean 47 tokens, spread 18."""
    return np.clip(np.random.default_rng(0).gamma(7, 7, count).round(), 6, 128).astype(np.int64)


@pytest.mark.parametrize("batch", [32, 128])
def test_padding_of_short_sequences(batch):
    lengths = lengths_like_molecules()
    rows = [np.array([2, *np.random.default_rng(n).integers(6, 60, n - 2), 3]) for n in lengths]
    masked = MaskedRows(rows, get_objective("mae-lm"), Ids(64), 0)
    keys = list(EpochSampler(lengths, batch, 0))
    computed = real = 0
    for low in range(0, len(keys), batch):
        masked_batch = MaskedBatches(0)([masked[key] for key in keys[low : low + batch]])
        for ids, mask in (("visible_ids", "visible_mask"), ("labels", "masked_mask")):
            computed += masked_batch[ids].numel()
            real += int(masked_batch[mask].sum()) if mask in masked_batch else masked_batch[ids].numel()
    assert real == lengths.sum(), "nothing is lost"
    assert computed - real < 0.05 * computed
