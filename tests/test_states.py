"""k states per masked position: ExLM and MAE-ExLM through the model, against brute force and stock encoders."""

import copy
import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import FAMILIES, encoder_config
from test_modeling import MASK, masked_batch, new_model, sequences
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel

from unmask.alignment import log_likelihood, posteriors
from unmask.data.masking import MaskedBatches, MaskedRows, Vocabulary, masked_example
from unmask.errors import UserError
from unmask.evaluation.fill import fill, fill_jointly
from unmask.modeling import head, prediction, rotary
from unmask.modeling.export import export, stock_model
from unmask.modeling.positions import encode
from unmask.modeling.prediction import predict, predict_jointly, score
from unmask.modeling.pretraining import PretrainingModel
from unmask.modeling.transitions import Transitions, _Mixture
from unmask.modeling.vertices import Vertices, vertices_of
from unmask.objectives import Objective, get_objective

ROTARY = ["modernbert", "esm", "nomic_bert", "eurobert"]


def model_of(family: str, objective: str = "exlm", **fields) -> PretrainingModel:
    return new_model(family, get_objective(objective, **fields))


def batch_of(lengths: list[int], ratio: float = 0.2, pad: int = 0, expand_anchors: bool = False, seed: int = 0):
    rng = np.random.default_rng(seed)
    examples = []
    for row in sequences(lengths, seed):
        masked = np.sort(1 + rng.permutation(len(row) - 2)[: max(1, round(ratio * (len(row) - 2)))])
        examples.append(masked_example(row, masked, np.full(len(masked), MASK), expand_anchors))
    return MaskedBatches(pad)(examples)


def without_labels(batch):
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def graph(model, batch):
    """match and links of a batch, by the parts."""
    states, vertices = model.masked_states(**without_labels(batch)), model.vertices(**batch)
    emissions = model.head.emissions(vertices.emitting(states), batch["labels"], model.token_table)
    return vertices.match(emissions), model.transitions(states, vertices), vertices


# --- the masked block -------------------------------------------------------------------------------------------------


def test_vertices_by_hand():
    """Ten tokens, 2 and 5 masked, k = 3; and a shorter sequence of six with one masked, padded."""
    visible = torch.tensor([[0, 1, 3, 4, 6, 7, 8, 9], [0, 1, 2, 4, 5, 0, 0, 0]])
    masked = torch.tensor([[2, 5], [3, 0]])
    real = torch.arange(8) < torch.tensor([[8], [5]]), torch.tensor([[True, True], [True, False]])
    found = vertices_of(visible, masked, *real, 3, False)
    assert found.lengths.tolist() == [8, 5]
    assert found.targets.tolist() == [4, 3]
    assert found.where[0].tolist() == [0, 8, 9, 10, 11, 12, 13, 7]
    assert found.where[1, :5].tolist() == [0, 8, 9, 10, 4]
    # 0 1 [2 2 2] 3 4 [5 5 5] 6 7 8 9: the states stand at 2-4 and 7-9, the last token at 13
    assert found.places[0].tolist() == [0, 2, 3, 4, 7, 8, 9, 13]
    assert found.places[1, :5].tolist() == [0, 3, 4, 5, 7]
    assert found.ranks[0].tolist() == [0, 1, 1, 1, 2, 2, 2, 3]
    assert found.ranks[1, :5].tolist() == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["exlm", "mae-exlm", "exlm-reference"])
def test_padding_changes_nothing(family, objective):
    model = model_of(family, objective)
    lengths, anchors = [50, 22, 31], model.objective.expand_anchors
    pad = model.config.encoder.pad_token_id
    together = batch_of(lengths, expand_anchors=anchors, pad=pad)
    scores = score(model, **together)
    for i in range(3):
        m, v = (int(together[name][i].sum()) for name in ("masked_mask", "visible_mask"))
        alone = {
            name: tensor[i : i + 1, : v if name.startswith("visible") else m]
            for name, tensor in together.items()
            if not name.endswith("_mask")
        }
        torch.testing.assert_close(score(model, **alone)[0], scores[i], rtol=1e-4, atol=1e-3)
        with torch.no_grad():
            assert model(**alone).loss.item() * m == pytest.approx(scores[i, 1].item(), rel=1e-4)
    with torch.no_grad():
        total = model(**together).loss * together["labels"].ne(-100).sum()
    assert total.item() == pytest.approx(scores[:, 1].sum().item(), rel=1e-4)


@pytest.mark.parametrize("objective", ["exlm", "mae-exlm"])
def test_the_loss_is_the_sum_over_all_paths(objective):
    model = model_of("bert", objective, **{"encoder_states" if objective == "exlm" else "decoder_states": 2})
    batch = batch_of([14])
    with torch.no_grad():
        match, links, vertices = graph(model, batch)
        loss = model(**batch).loss
    m = batch["labels"].shape[1]
    assert (vertices.targets.item(), vertices.lengths.item()) == (m + 2, 2 * m + 2)
    total = -math.inf
    for between in itertools.combinations(range(1, 2 * m + 1), m):
        path = (0, *between, 2 * m + 1)
        emitted = sum(match[0, t, u].item() for t, u in enumerate(path))
        total = np.logaddexp(total, emitted + sum(links[0, w, u].item() for w, u in itertools.pairwise(path)))
    assert loss.item() == pytest.approx(-total / m, rel=1e-5)


def test_anchors_are_as_fine_tuning_will_see_them():
    """The last anchor's hidden state is that of the last token, wherever padding begins, and neither is expanded."""
    model = model_of("modernbert")
    batch = batch_of([40, 25])
    states = model.masked_states(**without_labels(batch))
    hidden = model._encode(*(batch.get(n) for n in _NAMES))
    for row in range(2):
        v, m = (int(batch[name][row].sum()) for name in ("visible_mask", "masked_mask"))
        assert torch.equal(states[row, 0], hidden[row, 0])
        assert torch.equal(states[row, 4 * m + 1], hidden[row, v - 1])
        assert batch["visible_ids"][row, v - 1] == 3


_NAMES = (
    "visible_ids",
    "visible_positions",
    "masked_positions",
    "masked_inputs",
    "visible_mask",
    "masked_mask",
)


def test_mae_exlm_keeps_the_mask_out_of_the_encoder():
    model = model_of("modernbert", "mae-exlm")
    batch = batch_of([40, 40])
    seen = {}
    model.encoder.register_forward_pre_hook(lambda m, a, k: seen.update(encoder=k), with_kwargs=True)
    model.decoder.register_forward_pre_hook(lambda m, a: seen.update(decoder=a))
    loss = model(**batch).loss
    assert torch.equal(seen["encoder"]["input_ids"], batch["visible_ids"])
    m = batch["labels"].shape[1]
    assert seen["decoder"][2].shape[1] == seen["decoder"][3].shape[1] == 4 * m
    assert seen["decoder"][5][0, :8].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    loss.backward()
    assert model.decoder.states.weight.grad.abs().sum(1).min() > 0
    assert model.token_table.weight.grad[MASK].abs().sum() > 0


def test_decoder_over_expanded_states():
    """Each of k states of the encoder carried into the decoder, or k fresh ones."""
    batch = batch_of([30, 30])
    for fields in ({"decoder_masked_input": "carry"}, {}):
        objective = Objective(encoder_states=3, decoder_layers=2, decoder_states=3, **fields)
        model = new_model("modernbert", objective)
        assert model.objective.state_positions == "rotary"
        loss = model(**batch).loss
        loss.backward()
        assert loss.isfinite()
    plain = new_model("bert", Objective(encoder_states=3, decoder_layers=2, decoder_states=1))
    assert plain.masked_states(**without_labels(batch)).shape[1] == batch["labels"].shape[1]


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ROTARY)
def test_real_tokens_turn_as_in_the_exported_encoder_and_states_do_not(family):
    model = model_of(family)
    assert model.objective.state_positions == "rotary"
    assert model.state_embeddings is None
    module = getattr(model.encoder, rotary.rotary_name(model.encoder))
    x, places = torch.zeros(1, 1), torch.tensor([[0, 5, 5, 5]])
    kind = next(iter(module.bases))
    plain = module(x, places, kind)
    zero = module(x, torch.stack([places, torch.zeros_like(places)], -1), kind)
    states = module(x, torch.stack([places, torch.tensor([[0, 1, 2, 0]])], -1), kind)
    assert all(torch.equal(a, b) for a, b in zip(plain, zero, strict=True))
    assert torch.equal(states[0][0, 3], plain[0][0, 3])
    half = module.head_size // 2
    position_part = torch.cat([torch.arange(half // 2), half + torch.arange(half // 2)])
    assert torch.equal(states[0][0, 1, position_part], plain[0][0, 1, position_part])
    rope = encoder_config(family).to_dict().get("rope_parameters") or encoder_config(family).to_dict()
    theta = rope.get(kind, rope)["rope_theta"]
    assert module.bases[kind] == theta**2
    frequencies = theta ** (-2 * torch.arange(half // 2) / half)
    torch.testing.assert_close(states[1][0, 2, : half // 2], (5 * frequencies).sin())
    torch.testing.assert_close(states[1][0, 2, half // 2 : half], (2 * frequencies).sin())


def test_encoders_without_rotary_positions_get_a_state_table_at_the_embeddings_width():
    for family in ("bert", "roberta", "electra"):
        model = model_of(family)
        assert model.objective.state_positions == "embedding"
        assert model.state_embeddings.weight.shape == (4, 16 if family == "electra" else 32)


def test_state_embeddings_are_added_to_the_token_embeddings():
    model = model_of("bert")
    batch = batch_of([30, 24])
    hidden = model._encode(*(batch.get(n) for n in _NAMES))
    m = batch["masked_positions"].shape[1]
    ids = torch.cat([batch["visible_ids"], batch["masked_inputs"].repeat_interleave(4, 1)], 1)
    positions = torch.cat([batch["visible_positions"], batch["masked_positions"].repeat_interleave(4, 1)], 1)
    added = torch.cat([torch.zeros(batch["visible_ids"].shape[1], 32), model.state_embeddings.weight.repeat(m, 1)])
    mask = torch.cat([batch["visible_mask"], batch["masked_mask"].repeat_interleave(4, 1)], 1)
    expected = encode(model.encoder, positions, mask, 0, inputs_embeds=model.token_table(ids) + added)
    torch.testing.assert_close(hidden[mask], expected[mask], atol=1e-5, rtol=1e-5)
    assert not model.token_table._forward_hooks, "the hook is gone"


def test_without_state_positions_the_states_of_a_position_are_alike():
    model = model_of("modernbert", state_positions="none")
    batch = batch_of([30])
    states = model.masked_states(**without_labels(batch))[:, 1:-1].unflatten(1, (-1, 4))
    torch.testing.assert_close(states[:, :, 0], states[:, :, 3], atol=1e-5, rtol=1e-5)
    _, links, _ = graph(model, batch)
    assert (links[0, 1].exp()[6:] - links[0, 2].exp()[6:]).abs().max() > 1e-4, "their places differ"


@pytest.mark.parametrize("family", ["modernbert", "esm"])
def test_continuing_a_checkpoint_keeps_its_function(family, tmp_path):
    """Plain RoPE continues with state embeddings, the export of an ExLM encoder with 2-D positions."""
    torch.manual_seed(0)
    AutoModel.from_config(encoder_config(family)).save_pretrained(tmp_path / "plain")
    arguments = {"mask_token_id": MASK, "max_length": 64}
    model = PretrainingModel.from_encoder(str(tmp_path / "plain"), get_objective("exlm"), **arguments)
    assert model.objective.state_positions == "embedding"
    with pytest.raises(UserError, match=r"would change what .* computes.*state_positions=embedding"):
        PretrainingModel.from_encoder(
            str(tmp_path / "plain"), get_objective("exlm", state_positions="rotary"), **arguments
        )
    trained = model_of(family)
    stock_model(trained).save_pretrained(tmp_path / "exlm")
    more = PretrainingModel.from_encoder(str(tmp_path / "exlm"), get_objective("exlm"), **arguments).eval()
    assert more.objective.state_positions == "rotary"
    batch = batch_of([40, 40])
    a, b = (m._encode(*(batch.get(n) for n in _NAMES)) for m in (trained, more))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_rotary_positions_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="BertModel has not"):
        model_of("bert", state_positions="rotary")
    odd = {"hidden_size": 24, "num_attention_heads": 4}
    with pytest.raises(UserError, match="head size divisible by 4"):
        new_model("modernbert", get_objective("exlm", state_positions="rotary"), **odd)
    assert new_model("modernbert", get_objective("exlm"), **odd).objective.state_positions == "embedding"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["exlm", "mae-exlm"])
def test_save_and_load_round_trip_exactly(family, objective, tmp_path):
    model = model_of(family, objective)
    model.save_pretrained(tmp_path)
    loaded, info = PretrainingModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.objective == model.objective
    batch = batch_of([40, 30])
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, loaded.eval()(**batch).loss)


LOADER = """
import sys, torch
from transformers import AutoModel
model, info = AutoModel.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(name.startswith("unmask") for name in sys.modules)
assert not [key for keys in info.values() for key in keys if "pooler" not in str(key)], info
torch.save(model.eval()(input_ids=torch.load(sys.argv[2])).last_hidden_state, sys.argv[3])
print(type(model).__name__)
"""


@pytest.mark.parametrize(
    ("family", "objective"),
    [*((f, "exlm") for f in FAMILIES), ("modernbert", "mae-exlm"), ("bert", "mae-exlm")],
)
def test_exported_encoder_in_a_process_without_unmask(family, objective, tokenizer, tmp_path):
    model = model_of(family, objective)
    export(model, tokenizer, tmp_path / "encoder")
    ids = torch.from_numpy(np.stack(sequences([64, 64])))
    torch.save(ids, tmp_path / "ids.pt")
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    paths = [str(tmp_path / name) for name in ("encoder", "ids.pt", "hidden.pt")]
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *paths],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == type(model.encoder).__name__
    with torch.no_grad():
        ours = encode(model.encoder, torch.arange(64).expand(2, -1), None, model.offset, input_ids=ids)
    torch.testing.assert_close(torch.load(tmp_path / "hidden.pt"), ours, atol=1e-5, rtol=0)
    config = json.loads((tmp_path / "encoder" / "config.json").read_text())
    assert "auto_map" not in config


# --- transitions ------------------------------------------------------------------------------------------------------


def random_vertices(batch: int, m: int, k: int) -> Vertices:
    masked = torch.stack([torch.randperm(m * 3)[:m].sort().values + 1 for _ in range(batch)])
    visible = torch.arange(m * 3 + 2).expand(batch, -1)
    return vertices_of(visible, masked, None, None, k, False)


def test_transitions_are_distributions_over_later_vertices():
    torch.manual_seed(0)
    vertices = random_vertices(2, 5, 3)
    vertices = vertices._replace(lengths=torch.tensor([17, 11]))
    links = Transitions(16, 4, 64, 3.0, None)(torch.randn(2, 17, 16), vertices)
    below = torch.ones(17, 17).tril().bool()
    assert (links[:, below] == -torch.inf).all()
    assert (links[1, :, 11:] == -torch.inf).all()
    for row, length in ((0, 17), (1, 11)):
        torch.testing.assert_close(links[row, : length - 1].exp().sum(1), torch.ones(length - 1))
        assert (links[row, length - 1 :] == -torch.inf).all()


def test_sparse_transitions_jump_no_further_and_still_reach_the_end():
    torch.manual_seed(0)
    vertices = random_vertices(2, 6, 4)
    links = Transitions(16, 4, 64, 0.0, max_jump=4)(torch.randn(2, 26, 16), vertices)
    jump = torch.arange(26) - torch.arange(26)[:, None]
    assert ((links > -torch.inf) == ((jump > 0) & (jump <= 4))).all()
    assert log_likelihood(torch.zeros(2, 8, 26), links, vertices.targets, vertices.lengths).isfinite().all()


def test_the_prior_is_a_learned_preference_for_the_next_position():
    vertices = random_vertices(1, 3, 2)
    transitions = Transitions(8, 2, 32, 3.0, None)
    transitions.start()
    for parameter in (*transitions.query.parameters(), *transitions.key.parameters()):
        torch.nn.init.zeros_(parameter)
    links = transitions(torch.randn(1, 8, 8), vertices)[0]
    # ranks 0 1 1 2 2 3 3 4: from the first state of position 1 (vertex 1)
    logits = torch.tensor([-1.0, 0, 0, -1, -1, -2]) * 3.0
    torch.testing.assert_close(links[1, 2:], logits.log_softmax(0))
    log_z = log_likelihood(torch.zeros(1, 5, 8), links[None], vertices.targets, vertices.lengths)
    log_z.sum().backward()
    assert transitions.sharpness.grad.abs() > 0
    assert Transitions(8, 2, 32, 0.0, None).sharpness is None


def test_mixture_gradients_and_values():
    torch.manual_seed(0)
    query, key = (torch.randn(2, 6, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gates = torch.randn(2, 6, 3, dtype=torch.float64).log_softmax(-1).requires_grad_()
    allowed = torch.ones(6, 6).triu(1).bool()
    bias = torch.randn(2, 6, 6, dtype=torch.float64)

    def mixture(q, k, g, b):
        return _Mixture.apply(q, k, g, b.masked_fill(~allowed, -torch.inf))[:, allowed]

    logits = torch.einsum("bwhd,buhd->bhwu", query, key) / 2 + bias.masked_fill(~allowed, -torch.inf)[:, None]
    expected = (logits.softmax(-1) * gates.exp().transpose(1, 2)[..., None]).sum(1).log()[:, allowed]
    torch.testing.assert_close(mixture(query, key, gates, bias), expected)
    assert torch.autograd.gradcheck(mixture, (query, key, gates, bias.requires_grad_()))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_heads_are_never_held_together():
    torch.manual_seed(0)
    batch, m, k, size = 2, 20, 4, 16
    vertices = random_vertices(batch, m, k)
    count = m * k + 2
    transitions = Transitions(size, 8, 512, 3.0, None)
    states = torch.randn(batch, count, size, requires_grad=True)
    with Largest() as watch:
        transitions(states, vertices).masked_fill(torch.ones(count, count).tril().bool(), 0.0).sum().backward()
    assert watch.elements == batch * count * count


# --- head -------------------------------------------------------------------------------------------------------------


def test_emissions_are_log_probabilities_with_their_gradients(monkeypatch):
    monkeypatch.setitem(head.LOGITS, "cpu", 1000)  # 38 rows of the table at a time
    model = model_of("bert")
    hidden = torch.randn(2, 13, 32, requires_grad=True)
    labels = torch.tensor([[5, 17, 89], [8, 5, -100]])

    def gradients(emissions):
        model.zero_grad()
        hidden.grad = None
        (emissions * torch.linspace(-1, 1, emissions.numel()).view_as(emissions)).sum().backward()
        parts = (hidden, model.token_table.weight, model.head.bias, model.head.dense.weight)
        return [part.grad.clone() for part in parts]

    emissions = model.head.emissions(hidden, labels, model.token_table)
    full = model.head.logits(hidden, model.token_table).log_softmax(-1)
    expected = full.gather(2, labels.clamp(min=0)[:, None, :].expand(-1, 13, -1)).transpose(1, 2)
    expected = expected.masked_fill((labels == -100)[:, :, None], 0.0)
    torch.testing.assert_close(emissions, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients(emissions), gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_logits_over_the_vocabulary_are_never_held_together(monkeypatch):
    monkeypatch.setitem(head.LOGITS, "cpu", 1 << 14)
    model = new_model("bert", get_objective("exlm"), vocab_size=4000)
    batch = batch_of([60] * 6)
    with Largest() as watch:
        model(**batch).loss.backward()
    states = batch["labels"].numel() * 4
    assert watch.elements < states * 4000 / 2
    assert watch.elements >= 4000 * 32, "the table's gradient was seen"


def test_emissions_under_autocast_are_close():
    model = model_of("modernbert")
    batch = batch_of([60] * 4)
    exact = model(**batch).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(**batch).loss
    rough.backward()
    assert rough.item() == pytest.approx(exact.item(), rel=0.02)


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["exlm", "mae-exlm", "exlm-reference"])
def test_marginals_are_distributions_and_make_the_token_loss(objective):
    model = model_of("modernbert", objective)
    batch = batch_of([40, 30], expand_anchors=model.objective.expand_anchors)
    m = batch["labels"].shape[1]
    marginals = torch.zeros(2 * m, 90)
    for rows, log_p in predict(model, **without_labels(batch)):
        marginals[rows] = log_p
    marginals = marginals.view(2, m, 90)
    counted = batch["labels"] != -100
    torch.testing.assert_close(marginals.exp().sum(-1)[counted], torch.ones(int(counted.sum())))
    if model.objective.expand_anchors:
        counted[:, 0] = False
        counted[torch.arange(2), batch["masked_mask"].sum(1) - 1] = False
    token = -marginals.gather(2, batch["labels"].clamp(min=0)[:, :, None])[:, :, 0]
    hits = marginals.argmax(-1) == batch["labels"]
    scores = score(model, **batch)
    torch.testing.assert_close(scores[:, 0], counted.sum(1).float())
    torch.testing.assert_close(scores[:, 2], (token * counted).sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[:, 4], (hits & counted).sum(1).float())


def test_joint_probabilities_of_all_fillings_sum_to_one():
    model = model_of("bert", encoder_states=2)
    batch = batch_of([12])
    m = batch["labels"].shape[1]
    assert m == 2
    labels = torch.cartesian_prod(torch.arange(90), torch.arange(90))
    total, first = 0.0, torch.zeros(90)
    for chunk in labels.split(900):
        many = {name: tensor.expand(len(chunk), *tensor.shape[1:]) for name, tensor in without_labels(batch).items()}
        joint = (-score(model, labels=chunk, **many)[:, 3].double()).exp()
        total += joint.sum().item()
        first.index_add_(0, chunk[:, 0], joint.float())
    assert total == pytest.approx(1, abs=1e-5)
    marginal = next(iter(predict(model, **without_labels(batch))))[1][0].exp()
    torch.testing.assert_close(first, marginal, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("objective", ["exlm", "exlm-reference"])
def test_the_best_joint_filling_by_brute_force(objective):
    model = model_of("bert", objective, encoder_states=2)
    anchors = model.objective.expand_anchors
    batch = batch_of([17, 12], expand_anchors=anchors)
    filling = predict_jointly(model, **without_labels(batch))
    with torch.no_grad():
        states, vertices = model.masked_states(**without_labels(batch)), model.vertices(**batch)
        links = model.transitions(states, vertices)
        best = model.head.logits(states, model.token_table).log_softmax(-1).max(-1)
    for row in range(2):
        count, targets = int(vertices.lengths[row]), int(vertices.targets[row])
        scores = {}
        for between in itertools.combinations(range(1, count - 1), targets - 2):
            path = (0, *between, count - 1)
            emitting = path if anchors else between
            value = sum(best.values[row, u].item() for u in emitting)
            scores[path] = value + sum(links[row, w, u].item() for w, u in itertools.pairwise(path))
        path = max(scores, key=scores.get)
        expected = best.indices[row, list(path if anchors else path[1:-1])].tolist()
        assert filling[row].tolist() == expected + [0] * (filling.shape[1] - len(expected))


def test_fill_reads_the_marginal_and_the_joint_filling(tokenizer):
    for objective in ("exlm", "mae-exlm", "exlm-reference", "mlm"):
        model = new_model("modernbert", get_objective(objective), vocab_size=len(tokenizer))
        text = "amber [MASK] cedar [MASK] ."
        found = fill(model, tokenizer, text, top_k=len(tokenizer))
        assert len(found) == 2
        for candidates in found:
            assert sum(c.probability for c in candidates) == pytest.approx(1, abs=1e-4)
        together = fill_jointly(model, tokenizer, text)
        assert len(together) == 2
        if objective == "mlm":
            assert together == [candidates[0].token for candidates in found]


def test_nothing_seen_yet_means_the_prior_alone():
    """γ⁰ does not depend on what is to be emitted, and each position's own states hold most of it under the prior."""
    model = new_model("bert", get_objective("exlm", transition_prior=8.0))
    with torch.no_grad():
        model.transitions.sharpness.fill_(8.0)
        for layer in (model.transitions.query, model.transitions.key):
            layer.weight.zero_()
            layer.bias.zero_()
    batch = batch_of([40])
    inputs = without_labels(batch)
    vertices, links = prediction._graph(model, model.masked_states(**inputs), inputs)
    occupancy, _ = prediction._nothing_seen(vertices, links)
    own = occupancy.unflatten(2, (-1, 4)).sum(3)[0].diagonal()
    assert own.min() > 0.9
    m = batch["labels"].shape[1]
    gamma, _ = posteriors(torch.zeros(1, m + 2, 4 * m + 2), links, torch.tensor([m + 2]), torch.tensor([4 * m + 2]))
    torch.testing.assert_close(gamma[:, 1:-1, 1:-1], occupancy)


def test_expanded_anchors_are_in_the_masked_block_as_themselves(tokenizer):
    class Blocks(list):
        lengths = np.array([30, 20])

    rows, vocabulary = Blocks(sequences([30, 20])), Vocabulary(tokenizer)
    plain = MaskedRows(rows, Objective(), vocabulary, 0)[0]
    expanded = MaskedRows(rows, Objective(), vocabulary, 0, expand_anchors=True)[0]
    assert expanded["masked_positions"].tolist() == [0, *plain["masked_positions"], 29]
    assert expanded["labels"].tolist() == [2, *plain["labels"], 3]
    assert expanded["masked_inputs"].tolist() == [2, *plain["masked_inputs"], 3]
    assert expanded["visible_ids"].tolist() == plain["visible_ids"][1:-1].tolist()


def test_gradients_reach_every_part():
    for objective in ("exlm", "mae-exlm"):
        model = copy.deepcopy(model_of("modernbert", objective))
        model(**batch_of([50] * 3)).loss.backward()
        untouched = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
        assert untouched == []
    batch = masked_batch(sequences([30, 30]))
    batch.pop("stock")
    assert model(**batch).loss.isfinite()
