"""Attention and dropout of `modeling.cpu` against the stock ones, and where they stand aside for them."""

import pytest
import torch
from torch.nn import functional as F

from unmask.modeling import cpu


def projections(batch=3, heads=4, queries=20, keys=24, size=8, dtype=torch.bfloat16):
    """Query, key and value as a layer hands them over: [B, n, H, d_h] transposed."""
    torch.manual_seed(0)
    shapes = (queries, keys, keys)
    return [torch.randn(batch, n, heads, size, dtype=dtype).transpose(1, 2).requires_grad_() for n in shapes]


def with_gradients(function, inputs, weight):
    out = function(*inputs)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    return [out.detach(), *gradients]


def masks(batch, heads, queries, keys):
    lengths = torch.tensor([keys, 5, 11])[:, None]
    near = (torch.arange(queries)[:, None] - torch.arange(keys)).abs() < 6
    return {
        "none": None,
        "padding": (torch.arange(keys) < lengths)[:, None, None, :],
        "window": near,
        "by head": torch.rand(batch, heads, queries, keys) < 0.7,
    }


@pytest.mark.parametrize("held", [1 << 20, 2 * 20 * 24, 6 * 20 * 24, 1], ids=["whole", "heads", "rows", "one head"])
@pytest.mark.parametrize("kind", ["none", "padding", "window", "by head"])
def test_blockwise_attention_is_the_stock_one_within_rounding(kind, held, monkeypatch):
    monkeypatch.setattr(cpu, "SCORES", held)
    inputs = projections()
    mask = masks(3, 4, 20, 24)[kind]
    weight = torch.randn(3, 4, 20, 8)
    ours = with_gradients(lambda q, k, v: cpu.attention(q, k, v, mask, scale=0.4), inputs, weight)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, scale=0.4), exact, weight.double()
    )
    for got, want in zip(ours, expected, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, atol=0.03, rtol=0.03)


def test_dropout_of_attention_scales_what_it_keeps_and_forgets_the_rest(monkeypatch):
    """Against the formula with the very mask that was drawn."""
    drawn = []
    draw = cpu._kept
    monkeypatch.setattr(cpu, "_kept", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    monkeypatch.setattr(cpu, "SCORES", 3 * 20 * 24)
    inputs, weight = projections(), torch.randn(3, 4, 20, 8)
    ours = with_gradients(lambda q, k, v: cpu.attention(q, k, v, dropout=0.25), inputs, weight)
    (kept,) = drawn
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.03)

    def formula(query, key, value):
        softmax = (query @ key.mT * 8**-0.5).softmax(-1)
        return (softmax * kept / 0.75) @ value

    expected = with_gradients(formula, [x.detach().double().requires_grad_() for x in inputs], weight.double())
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=0.04, rtol=0.04)


def test_float32_is_left_to_the_stock_attention():
    inputs = projections(dtype=torch.float32)
    assert torch.equal(cpu.attention(*inputs), F.scaled_dot_product_attention(*inputs))


def test_autocast_computes_in_its_type():
    inputs = projections(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = cpu.attention(*inputs)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), cpu.attention(*inputs), atol=0.03, rtol=0.03)


def test_masks_are_drawn_at_the_rate_that_is_asked_for():
    torch.manual_seed(0)
    for rate in (0.001, 0.1, 0.5, 0.9):
        kept = cpu._kept((1000, 1003), rate)
        assert set(kept.unique().tolist()) == {0, 1}
        assert 1 - kept.double().mean().item() == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 1e6) ** 0.5 + 2**-16)
    first, second = cpu._kept((1000,), 0.5), cpu._kept((1000,), 0.5)
    assert not torch.equal(first, second)


def test_dropout_keeps_the_mean_and_its_gradient_is_its_mask():
    torch.manual_seed(0)
    dropout, x = cpu.Dropout(0.3), torch.ones(300, 300, requires_grad=True)
    out = dropout(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach()), "of ones, the result is the mask"
    torch.testing.assert_close(out.detach().unique(), torch.tensor([0.0, 1 / 0.7]))
    assert out.mean().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(dropout.eval()(x), x)


@pytest.mark.parametrize("family", ["bert", "modernbert", "esm", "roberta", "eurobert"])
def test_an_encoder_computes_the_same_with_it(family, monkeypatch):
    """The whole encoder under autocast, padding included, beside its stock attention."""
    from test_modeling import new_model
    from test_states import batch_of

    from unmask.modeling.positions import encode

    model = new_model(family).eval()
    assert model.encoder.config._attn_implementation == cpu.NAME
    batch = batch_of([30, 22, 9])
    blocks = []
    apply = cpu._Blockwise.apply
    monkeypatch.setattr(cpu._Blockwise, "apply", lambda *args: blocks.append(1) or apply(*args))

    def states():
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return encode(
                model.encoder, batch["visible_positions"], batch["visible_mask"], model.offset,
                input_ids=batch["visible_ids"],
            )[batch["visible_mask"]]  # fmt: skip

    ours = states()
    assert blocks or family == "eurobert", "the attention was called"
    model.encoder.config._attn_implementation = "sdpa"
    torch.testing.assert_close(ours, states(), atol=0.08, rtol=0.05)
