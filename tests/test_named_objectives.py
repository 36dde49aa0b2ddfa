"""Each named objective is what it says: what enters encoder and decoder, where it is predicted, what is trained.

One record of all that is observed for each name; no two names share one, so that none passes in another's place.
"""

import numpy as np
import pytest
import torch
from conftest import encoder_config
from test_modeling import MASK, sequences

from unmask.alignment import single_label
from unmask.data.masking import EpochSampler, MaskedBatches, MaskedRows, Vocabulary
from unmask.errors import UserError
from unmask.modeling.prediction import predict, score
from unmask.modeling.pretraining import PretrainingConfig, PretrainingModel
from unmask.objectives import OBJECTIVES, Objective, get_objective

LENGTH, BLANK = 62, 5  # 60 tokens between boundaries


class SixtyTokens(list):
    lengths = np.full(8, LENGTH)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    vocabulary = Vocabulary(tokenizer)
    vocabulary.mask_id, vocabulary.pad_id = MASK, 1
    vocabulary.special = np.arange(90) < 8
    vocabulary.ordinary = np.arange(8, 90)
    vocabulary.begins_word = np.ones(90, dtype=bool)
    return vocabulary


def model_of(name: str, **fields) -> PretrainingModel:
    torch.manual_seed(0)
    config = PretrainingConfig(
        encoder=encoder_config("mpnet", max_position_embeddings=260),
        objective=get_objective(name, **fields).to_dict(),
        max_length=250,
        mask_token_id=MASK,
        blank_token_id=BLANK,
    )
    return PretrainingModel(config)


def batch_of(objective: Objective, vocabulary: Vocabulary, first: int = 0) -> dict[str, torch.Tensor]:
    rows = MaskedRows(SixtyTokens(sequences([LENGTH] * 8)), objective, vocabulary, 0, objective.expand_anchors)
    keys = [(0, first + i, first) for i in range(2)]
    return MaskedBatches(1)([rows[key] for key in keys])


def observe(name: str, vocabulary: Vocabulary) -> dict[str, object]:
    """What goes where in one step of a named objective, as counts of tokens that do not depend on the draw."""
    model = model_of(name)
    objective, seen = model.objective, {}
    batch = batch_of(objective, vocabulary)
    model.encoder.register_forward_pre_hook(lambda m, a, k: seen.update(encoder=k), with_kwargs=True)
    if model.decoder is not None:
        model.decoder.register_forward_pre_hook(lambda m, a: seen.update(decoder=a))
    bias = []
    inner = model.encoder.encoder
    compute = inner.compute_position_bias
    inner.compute_position_bias = lambda x: bias.append(compute(x)) or bias[0]
    real = batch["labels"] != -100
    m, v = int(real[0].sum()), batch["visible_ids"].shape[1]
    output = model(**batch)
    output.loss.backward()
    ids, places = seen["encoder"]["input_ids"][0], seen["encoder"]["position_ids"][0] - model.offset
    mask_row = model.token_table.weight[MASK]
    record = {
        "masked": m if objective.repeat == 1 else "drawn",
        "ratio of a later batch": batch_of(objective, vocabulary, 4)["labels"].shape[1] == batch["labels"].shape[1],
        "tokens": v + m if objective.repeat == 1 else objective.repeat * 60 + 2,
        "[MASK] in the encoder": round((ids == MASK).sum().item() / m),
        "states in the encoder": round((len(ids) - v) / batch["labels"].shape[1]),
        "others at masked positions": bool(
            objective.encoder_states and not torch.isin(ids[v:], torch.tensor([MASK, 1, 2, 3])).any()
        ),
        "gaps": bool((places[:v].diff() > 1).any()),
        "relative bias": bool(bias[0].abs().max() > 0),
        "state embeddings": model.state_embeddings is not None,
        "anchors masked": 2 in batch["labels"][0].tolist(),
    }
    if model.decoder is not None:
        fresh = torch.equal(seen["decoder"][2][0, 0], mask_row.detach())
        sees = [len(layer.attentions) for layer in model.decoder.layers]
        record |= {
            "decoder": (len(sees), sees[0], model.decoder.attention),
            "decoder width": model.decoder.positions.weight.shape[1],
            "states in the decoder": seen["decoder"][2].shape[1] // batch["labels"].shape[1],
            "decoder input": "[MASK]" if fresh else "carried",
            "decoder positions": torch.equal(seen["decoder"][1], batch["visible_positions"]),
        }
    gradient = {n: p.grad is not None and bool(p.grad.abs().sum() > 0) for n, p in model.named_parameters()}
    record |= {
        "predicted from": output.masked_states.shape[1] if objective.repeat == 1 else "drawn",
        "transitions": model.transitions is not None
        and (model.transitions.max_jump, model.transitions.sharpness is not None, gradient["transitions.query.weight"]),
        "[MASK] trained": bool(model.token_table.weight.grad[MASK].abs().max() > 1e-9),
        "encoder trained": gradient["encoder.encoder.layer.0.attention.attn.q.weight"],
    }
    return record


# m = 9 of 60 tokens at 15%, 23 at 38.7%; 62 tokens with boundaries
MLM = {
    "masked": 9,
    "ratio of a later batch": True,
    "tokens": 62,
    "[MASK] in the encoder": 1,
    "states in the encoder": 1,
    "others at masked positions": False,
    "gaps": True,
    "relative bias": True,
    "state embeddings": False,
    "anchors masked": False,
    "predicted from": 9,
    "transitions": False,
    "[MASK] trained": True,
    "encoder trained": True,
}
MAE = MLM | {
    "[MASK] in the encoder": 0,
    "states in the encoder": 0,
    "decoder": (4, 1, "self"),
    "decoder width": 32,
    "states in the decoder": 1,
    "decoder input": "[MASK]",
    "decoder positions": True,
}
EXLM = MLM | {
    "[MASK] in the encoder": 4,
    "states in the encoder": 4,
    "state embeddings": True,
    "predicted from": 4 * 9 + 2,
    "transitions": (None, True, True),
}
EXPECTED = {
    "mlm": MLM,
    "mlm++": MLM,
    "mlm-38": MLM | {"masked": 23, "predicted from": 23},
    "repeated-mlm": MLM
    | {"masked": "drawn", "tokens": 242, "predicted from": "drawn", "ratio of a later batch": False},
    "mae-lm": MAE,
    "mae-lm-carry": MAE | {"[MASK] in the encoder": 1, "states in the encoder": 1, "decoder input": "carried"},
    "mae-lm-reset": MAE | {"[MASK] in the encoder": 1, "states in the encoder": 1},
    "mae-lm-random": MAE | {"states in the encoder": 1, "others at masked positions": True},
    "mae-lm-misaligned": MAE | {"gaps": False},
    "mae-lm-no-relative": MAE | {"relative bias": False},
    "mae-lm-self-cross": MAE | {"decoder": (4, 2, "self+cross")},
    "mae-lm-causal-cross": MAE | {"decoder": (4, 2, "causal+cross")},
    "mae-lm-cross": MAE | {"decoder": (4, 1, "cross")},
    "mae-lm-2-layers": MAE | {"decoder": (2, 1, "self")},
    "mae-lm-6-layers": MAE | {"decoder": (6, 1, "self")},
    "mae-lm-narrow": MAE | {"decoder width": 16},
    "mae-lm-r2": MAE | {"ratio of a later batch": False},
    "exlm": EXLM,
    "exlm-reference": EXLM
    | {
        "masked": 11,
        "anchors masked": True,
        "[MASK] in the encoder": 3,  # 36 of 44: the anchors enter as themselves
        "predicted from": 4 * 11,
        "transitions": (None, False, True),
    },
    "exlm-k2": EXLM | {"[MASK] in the encoder": 2, "states in the encoder": 2, "predicted from": 20},
    "exlm-k8": EXLM | {"[MASK] in the encoder": 8, "states in the encoder": 8, "predicted from": 74},
    "exlm-38": EXLM | {"masked": 23, "predicted from": 94},
    "exlm-no-2d": EXLM | {"state embeddings": False},
    "exlm-no-transitions": EXLM | {"predicted from": 36, "transitions": False},
    "exlm-sparse": EXLM | {"transitions": (8, True, True)},
    "mae-exlm": MAE | {"states in the decoder": 4, "predicted from": 38, "transitions": (None, True, True)},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_named_objective_is_what_it_says(name, vocabulary):
    observed = observe(name, vocabulary)
    if name == "mae-lm-r2":  # its ratio is drawn
        assert 6 <= observed["masked"] == observed["predicted from"] <= 24
        observed |= {"masked": 9, "predicted from": 9}
    assert observed == EXPECTED[name]


def test_no_two_named_objectives_are_alike():
    """But mlm++, which is mlm with other steps (`test_cli`)."""
    records = [tuple(sorted((key, str(value)) for key, value in record.items())) for record in EXPECTED.values()]
    assert len(set(records)) == len(OBJECTIVES) - 1 == len(EXPECTED) - 1


def test_decoder_attention_reads_what_it_says(vocabulary):
    """Which positions' inputs a masked position's state depends on, through two layers."""

    def influences(attention: str) -> tuple[list[int], list[int]]:
        model = model_of("mae-lm", decoder_layers=2, decoder_attention=attention)
        decoder = model.decoder
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        visible = torch.randn(1, 5, 32, requires_grad=True)
        masked = torch.randn(1, 4, 32, requires_grad=True)
        places = torch.tensor([[0, 2, 4, 6, 8]]), torch.tensor([[1, 3, 5, 7]])
        decoder(visible, places[0], masked, places[1])[0, 1].pow(2).sum().backward()
        return tuple((x.grad[0].abs().sum(-1) > 0).nonzero()[:, 0].tolist() for x in (visible, masked))

    everything = [0, 1, 2, 3, 4]
    assert influences("self") == (everything, [0, 1, 2, 3])
    assert influences("self+cross") == (everything, [0, 1, 2, 3])
    assert influences("causal+cross") == (everything, [0, 1])
    assert influences("cross") == (everything, [1])


@pytest.mark.parametrize("attention", ["self", "self+cross", "causal+cross", "cross"])
def test_decoder_padding_changes_nothing(attention):
    model = model_of("mae-lm", decoder_layers=2, decoder_attention=attention).eval()
    for parameter in model.decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    visible, masked = torch.randn(2, 5, 32), torch.randn(2, 4, 32)
    places = torch.arange(5).expand(2, -1), torch.arange(5, 9).expand(2, -1)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, [4, 8]] = False
    with torch.no_grad():
        padded = model.decoder(visible, places[0], masked, places[1], mask)[1, :3]
        alone = model.decoder(visible[1:, :4], places[0][1:, :4], masked[1:, :3], places[1][1:, :3])[0]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)


def test_without_transitions_the_likelihood_is_ctcs():
    torch.manual_seed(0)
    emissions = torch.randn(7, 4, 90, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(8, 90, (7,))
    log_p = emissions.log_softmax(-1)
    ours = single_label(log_p.gather(2, labels[:, None, None].expand(-1, 4, 1))[..., 0], log_p[..., BLANK])
    lengths = torch.full((7,), 4), torch.ones(7, dtype=torch.long)
    theirs = -torch.nn.functional.ctc_loss(
        log_p.transpose(0, 1), labels[:, None], *lengths, blank=BLANK, reduction="none"
    )
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(x.sum(), emissions, retain_graph=True)[0] for x in (ours, theirs)]
    torch.testing.assert_close(*grads)


def test_without_transitions_marginals_are_renormalised(vocabulary):
    model = model_of("exlm-no-transitions").eval()
    batch = batch_of(model.objective, vocabulary)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    marginals = torch.cat([log_p for _, log_p in predict(model, **inputs)]).view(2, 9, 90)
    torch.testing.assert_close(marginals.exp().sum(-1), torch.ones(2, 9))
    assert (marginals[..., BLANK] == -torch.inf).all()
    targets, own, token, joint, _ = score(model, **batch).sum(0)
    expected = -marginals.gather(2, batch["labels"][:, :, None]).sum()
    assert token.item() == joint.item() == pytest.approx(expected.item(), rel=1e-4)
    with torch.no_grad():
        assert (own / targets).item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    with pytest.raises(UserError, match="needs an unknown token"):
        PretrainingModel(
            PretrainingConfig(encoder=encoder_config("bert"), objective=get_objective("exlm-no-transitions").to_dict())
        )


def test_repeated_mlm_shares(vocabulary):
    """Over 10,000 sequences of 60 tokens: p of the copies masked, and p^k of the tokens wholly."""
    p, k, count = 0.5, 3, 10_000
    objective = get_objective("repeated-mlm", repeat=k, mask_ratio=p)

    class Many:
        lengths = np.full(count, LENGTH)
        row = sequences([LENGTH])[0]

        def __len__(self):
            return count

        def __getitem__(self, i):
            return self.row

    rows = MaskedRows(Many(), objective, vocabulary, 0)
    copies = wholly = 0
    for i in range(count):
        masked = np.zeros(60 * k + 2, dtype=bool)
        masked[rows[i]["masked_positions"]] = True
        assert not masked[[0, -1]].any()
        each = masked[1:-1].reshape(60, k)
        copies += each.sum()
        wholly += each.all(1).sum()
    for share, expected, n in ((copies, p, 60 * k * count), (wholly, p**k, 60 * count)):
        assert abs(share / n - expected) < 3 * (expected * (1 - expected) / n) ** 0.5
    example = rows[0]
    assert example["visible_ids"].tolist() + example["labels"].tolist() != []
    whole = np.zeros(60 * k + 2, dtype=int)
    whole[example["visible_positions"]], whole[example["masked_positions"]] = example["visible_ids"], example["labels"]
    assert whole[1:-1].reshape(60, k).T.tolist() == [Many.row[1:-1].tolist()] * k


def test_a_drawn_ratio_is_one_for_a_batch_and_depends_on_seed_epoch_and_batch(vocabulary):
    objective = get_objective("mae-lm-r2")
    rows = MaskedRows(SixtyTokens(sequences([LENGTH] * 8)), objective, vocabulary, 3)
    keys = list(EpochSampler(np.full(8, LENGTH), 4, seed=0))
    counts = np.array([len(rows[key]["labels"]) for key in keys]).reshape(2, 4)
    assert (counts == counts[:, :1]).all()
    drawn = [len(rows[0, 0, batch]["labels"]) for batch in range(200)]
    assert 6 <= min(drawn) < 9 < 21 < max(drawn) <= 24
    assert drawn == [len(rows[0, 5, batch]["labels"]) for batch in range(200)]
    assert drawn != [len(rows[1, 0, batch]["labels"]) for batch in range(200)]
