import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FAMILIES, encoder_config
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    ConvBertConfig,
    DebertaConfig,
    FNetConfig,
    NystromformerConfig,
    pipeline,
)

from unmask.data.masking import MaskedBatches, MaskedRows, Vocabulary
from unmask.errors import UserError
from unmask.evaluation.fill import fill
from unmask.modeling.export import export, stock_model
from unmask.modeling.positions import attention_window, encode, position_offset, probe
from unmask.modeling.prediction import score
from unmask.modeling.pretraining import PretrainingConfig, PretrainingModel
from unmask.objectives import Objective, get_objective

MASK = 4


def new_model(family: str, objective: Objective | str = "mlm", length: int = 64, **changes: object) -> PretrainingModel:
    objective = get_objective(objective) if isinstance(objective, str) else objective
    torch.manual_seed(0)
    config = PretrainingConfig(
        encoder=encoder_config(family, **changes),
        objective=objective.to_dict(),
        max_length=length,
        mask_token_id=MASK,
    )
    model = PretrainingModel(config)
    for parameter in model.parameters():  # trained models are not as flat as new ones
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            torch.nn.init.normal_(parameter, mean=float(parameter.mean() > 0.5), std=0.1)
    return model.eval()


def sequences(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.concatenate([[2], rng.integers(8, 90, n - 2), [3]]) for n in lengths]


def masked_batch(rows: list[np.ndarray], seed: int = 0, ratio: float = 0.2, pad: int = 0) -> dict[str, torch.Tensor]:
    """Random masks, and the same as stock inputs under `stock_*`."""
    rng = np.random.default_rng(seed)
    examples = []
    width = max(map(len, rows))
    ids, labels = np.full((len(rows), width), pad), np.full((len(rows), width), -100)
    for i, row in enumerate(rows):
        masked = np.sort(1 + rng.permutation(len(row) - 2)[: max(1, round(ratio * (len(row) - 2)))])
        visible = np.setdiff1d(np.arange(len(row)), masked)
        ids[i, : len(row)] = row
        ids[i, masked] = MASK
        labels[i, masked] = row[masked]
        examples.append(
            {
                "visible_ids": row[visible],
                "visible_positions": visible,
                "masked_positions": masked,
                "masked_inputs": np.full(len(masked), MASK),
                "labels": row[masked],
            }
        )
    batch = MaskedBatches(pad)(examples)
    mask = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    stock = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels), "attention_mask": mask.long()}
    return {**batch, "stock": stock}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[64, 64], [64, 40, 23]], ids=["full", "ragged"])
def test_mlm_loss_is_the_stock_models(family, lengths):
    model = new_model(family)
    batch = masked_batch(sequences(lengths), pad=model.config.encoder.pad_token_id)
    stock = AutoModelForMaskedLM.from_config(copy.deepcopy(model.config.encoder)).eval()
    inputs = batch.pop("stock")
    stock.load_state_dict(stock_model(model).state_dict())
    with torch.no_grad():
        expected, loss = stock(**inputs).loss, model(**batch).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_mlm_gradients_are_the_stock_models(family):
    model = new_model(family)
    batch = masked_batch(sequences([64, 64]), pad=model.config.encoder.pad_token_id)
    stock = stock_model(model).eval()
    stock(**batch.pop("stock")).loss.backward()
    model(**batch).loss.backward()
    theirs = dict(stock.base_model.named_parameters())
    checked = 0
    for name, parameter in model.encoder.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=2e-5, rtol=1e-3)
            checked += 1
    assert checked >= 20


@pytest.mark.parametrize("family", FAMILIES)
def test_continuing_from_a_checkpoint_starts_at_its_loss(family, tmp_path):
    config = encoder_config(family)
    torch.manual_seed(1)
    stock = AutoModelForMaskedLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    stock.save_pretrained(tmp_path)
    batch = masked_batch(sequences([60, 31]), pad=config.pad_token_id)
    inputs = batch.pop("stock")
    model = PretrainingModel.from_encoder(str(tmp_path), Objective(), mask_token_id=MASK, max_length=64).eval()
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(stock(**inputs).loss.item(), abs=1e-5)


@pytest.mark.parametrize("padding_index", [0, 1, 7])
def test_roberta_positions_begin_after_the_padding_index(padding_index):
    model = new_model("roberta", pad_token_id=padding_index)
    assert model.offset == padding_index + 1
    assert position_offset(new_model("bert").encoder) == 0
    batch = masked_batch(sequences([50]), pad=padding_index)
    inputs = batch.pop("stock")
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(stock_model(model).eval()(**inputs).loss.item(), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_mae_lm_encoder_sees_real_tokens_alone(family):
    model = new_model(family, "mae-lm")
    batch = masked_batch(sequences([40, 40]))
    batch.pop("stock")
    seen = {}
    model.encoder.register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True)
    loss = model(**batch).loss
    assert torch.equal(seen["input_ids"], batch["visible_ids"])
    assert torch.equal(seen["position_ids"], batch["visible_positions"] + model.offset)
    assert not (seen["input_ids"] == MASK).any()
    other = dict(batch, labels=(batch["labels"] - 5 + 1) % 85 + 5)
    assert torch.equal(model.masked_states(**_inputs(batch)), model.masked_states(**_inputs(other)))
    loss.backward()
    assert model.token_table.weight.grad[MASK].abs().sum() > 0, "the decoder's [MASK] input is the shared token table"


def _inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in batch.items() if name not in ("labels", "stock")}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["mlm", "mae-lm"])
def test_padding_changes_nothing(family, objective):
    model = new_model(family, objective)
    rows = sequences([50, 22])
    with torch.no_grad():
        together = masked_batch(rows, pad=model.config.encoder.pad_token_id)
        states = model.masked_states(**_inputs(together))
        for i in range(2):
            m = int(together["masked_mask"][i].sum())
            v = int(together["visible_mask"][i].sum())
            alone = {
                name: tensor[i : i + 1, : m if name.startswith("masked") else v]
                for name, tensor in _inputs(together).items()
                if not name.endswith("_mask")
            }
            torch.testing.assert_close(model.masked_states(**alone)[0], states[i, :m], atol=1e-4, rtol=1e-4)


def test_the_window_is_measured_in_original_positions():
    """A token within the window of a far-away place in the tensor matters; one beyond it does not."""
    model = new_model("modernbert", layer_types=["sliding_attention"] * 3)
    window = attention_window(model.encoder)
    assert window == 8
    positions = torch.tensor([[0, 8, 40, 49]])
    ids = torch.tensor([[10, 11, 12, 13]])
    with torch.no_grad():
        base = encode(model.encoder, positions, None, 0, input_ids=ids)
        near = encode(model.encoder, positions, None, 0, input_ids=torch.tensor([[10, 50, 12, 13]]))
        far = encode(model.encoder, positions, None, 0, input_ids=torch.tensor([[10, 11, 12, 50]]))
    assert (base[0, 0] - near[0, 0]).abs().max() > 1e-2
    assert torch.equal(base[0, :3], far[0, :3])
    assert torch.equal(base[0, 2:], near[0, 2:])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_eager_attention_agrees(attention):
    model = new_model("modernbert", attn_implementation=attention)
    batch = masked_batch(sequences([64, 40]))
    stock = batch.pop("stock")
    reference = stock_model(new_model("modernbert")).eval()
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(reference(**stock).loss.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            partial(DebertaConfig, relative_attention=True, pos_att_type=["c2p"]),
            "DebertaModel does not honour its position_ids",
        ),
        (FNetConfig, "FNetModel takes no attention_mask"),
        (ConvBertConfig, "ConvBertModel does not honour"),
        (NystromformerConfig, "Nystromformer"),
    ],
)
def test_encoders_that_do_not_honour_positions_are_refused(config, says):
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = config(**sizes, intermediate_size=64, max_position_embeddings=140)
    with pytest.raises(UserError, match=says):
        PretrainingModel(PretrainingConfig(encoder=encoder, objective={}, max_length=64, mask_token_id=4))


def test_the_probe_catches_an_encoder_that_ignores_position_ids():
    model = new_model("bert")
    probe(model.encoder)
    embeddings = type(model.encoder.embeddings)
    forward = embeddings.forward

    class Forgetful(embeddings):
        def forward(self, *args, position_ids=None, **kwargs):
            return forward(self, *args, position_ids=None, **kwargs)

    model.encoder.embeddings.__class__ = Forgetful
    with pytest.raises(UserError, match="does not honour"):
        probe(model.encoder)


def test_the_probe_leaves_weights_and_random_numbers_alone():
    model = new_model("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    probe(model.encoder)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_too_long_a_sequence_is_refused():
    with pytest.raises(UserError, match="max_length is 200 tokens, but BertModel has positions for 130"):
        new_model("bert", length=200)
    with pytest.raises(UserError, match="RobertaModel has positions for 128"):
        new_model("roberta", length=129)


def test_a_vocabulary_that_does_not_fit_the_checkpoint_is_refused(tmp_path):
    AutoModelForMaskedLM.from_config(encoder_config("bert")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="tokenizer has 91 tokens but the checkpoint"):
        PretrainingModel.from_encoder(str(tmp_path), Objective(), mask_token_id=4, max_length=64, vocab_size=91)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["mlm", "mae-lm"])
def test_save_and_load_round_trip_exactly(family, objective, tmp_path):
    model = new_model(family, objective)
    model.save_pretrained(tmp_path)
    loaded, info = PretrainingModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.objective == model.objective
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    batch = masked_batch(sequences([40, 30]))
    batch.pop("stock")
    with torch.no_grad():
        assert torch.equal(model(**batch).loss, loaded.eval()(**batch).loss)
    assert not list(tmp_path.glob("*.bin"))


LOADER = """
import json, sys, torch
from transformers import AutoModel, AutoModelForMaskedLM
auto = AutoModelForMaskedLM if sys.argv[4] == "mlm" else AutoModel
model, info = auto.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(name.startswith("unmask") for name in sys.modules)
base = AutoModel.from_pretrained(sys.argv[1]).eval()
torch.save(base(input_ids=torch.load(sys.argv[2])).last_hidden_state, sys.argv[3])
print(json.dumps({"class": type(base).__name__, **{k: sorted(map(str, v)) for k, v in info.items()}}))
"""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["mlm", "mae-lm"])
def test_exported_encoder_in_a_process_without_unmask(family, objective, tokenizer, tmp_path):
    model = new_model(family, objective)
    export(model, tokenizer, tmp_path / "encoder")
    ids = torch.from_numpy(np.stack(sequences([64, 64])))  # 8 x the window of 8
    torch.save(ids, tmp_path / "ids.pt")
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [
        sys.executable,
        "-c",
        LOADER,
        *(str(tmp_path / n) for n in ("encoder", "ids.pt", "hidden.pt")),
        objective,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout.splitlines()[-1])
    assert info.pop("class") == type(model.encoder).__name__
    assert [key for keys in info.values() for key in keys if "pooler" not in key] == []
    with torch.no_grad():
        places = torch.arange(64).expand(2, -1)
        ours = encode(model.encoder, places, None, model.offset, input_ids=ids)
    torch.testing.assert_close(torch.load(tmp_path / "hidden.pt"), ours, atol=1e-5, rtol=0)


def test_an_exported_mlm_fills_masks_in_a_stock_pipeline(tokenizer, tmp_path):
    model = new_model("modernbert", vocab_size=len(tokenizer))
    export(model, tokenizer, tmp_path / "encoder")
    text = "amber birch [MASK] delta"
    stock = pipeline("fill-mask", model=str(tmp_path / "encoder"), top_k=3)(text)
    ours = fill(model, AutoTokenizer.from_pretrained(tmp_path / "encoder"), text, top_k=3)[0]
    assert [round(c["score"], 5) for c in stock] == [round(f.probability, 5) for f in ours]
    assert [c["token_str"].strip() for c in stock] == [f.token for f in ours]


def test_the_model_card_says_what_the_encoder_cannot_do(tokenizer, tmp_path):
    export(new_model("bert", "mae-lm"), tokenizer, tmp_path / "mae", {"objective": "mae-lm", "steps": 7})
    card = (tmp_path / "mae" / "README.md").read_text()
    assert "takes no `[MASK]`" in card
    assert "pooler of this class is untrained" in card
    assert "| steps | 7 |" in card
    export(new_model("modernbert", "mlm"), tokenizer, tmp_path / "mlm")
    export(new_model("modernbert", "exlm"), tokenizer, tmp_path / "exlm")
    assert "pretrained with 4 states for each `[MASK]`" in (tmp_path / "exlm" / "README.md").read_text()
    card = (tmp_path / "mlm" / "README.md").read_text()
    assert "takes no" not in card
    assert "pooler" not in card
    assert "AutoModelForMaskedLM" in card


def test_the_decoder_ablations_change_what_they_say():
    batch = masked_batch(sequences([40, 40]))
    batch.pop("stock")
    seen = {}

    def watch(model):
        model.encoder.register_forward_pre_hook(lambda m, a, k: seen.update(encoder=k), with_kwargs=True)
        model.decoder.register_forward_pre_hook(lambda m, a: seen.update(decoder=a))
        with torch.no_grad():
            model(**batch)
        return seen

    carry = new_model("bert", Objective(decoder_layers=2, decoder_states=1, decoder_masked_input="carry"))
    seen = watch(carry)
    assert seen["encoder"]["input_ids"].shape[1] == 40, "[MASK] stays in the encoder"
    hidden = carry.encoder(**seen["encoder"]).last_hidden_state
    torch.testing.assert_close(seen["decoder"][2], hidden[:, batch["visible_ids"].shape[1] :])
    reset = new_model("bert", Objective(decoder_layers=2, decoder_states=1))
    seen = watch(reset)
    assert seen["encoder"]["input_ids"].shape[1] == 40
    assert torch.equal(seen["decoder"][2][0, 0], reset.token_table.weight[MASK])
    misaligned = new_model("bert", get_objective("mae-lm", positions="consecutive"))
    seen = watch(misaligned)
    v = batch["visible_ids"].shape[1]
    assert torch.equal(seen["encoder"]["position_ids"], torch.arange(v).expand(2, -1))
    assert torch.equal(seen["decoder"][1], batch["visible_positions"])
    narrow = new_model("electra", get_objective("mae-lm", decoder_hidden_size=16))
    assert narrow.decoder.positions.weight.shape[1] == 16
    assert narrow.masked_states(**_inputs(batch)).shape[-1] == 32


def test_a_new_decoder_starts_at_the_neighbours_of_a_masked_position():
    torch.manual_seed(0)
    config = PretrainingConfig(
        encoder=encoder_config("bert", hidden_size=128, intermediate_size=128),
        objective=get_objective("mae-lm").to_dict(),
        max_length=128,
        mask_token_id=MASK,
    )
    decoder = PretrainingModel(config).decoder
    tokens = torch.randn(1, 128, 128)
    tokens[:, 64] = 0.05 * torch.randn(128)
    hidden = decoder.norm(tokens + decoder.positions(torch.arange(128)[None]))
    first = decoder.layers[0].attentions[0]
    query = first.query(hidden[:, 64:65]).unflatten(-1, (4, -1)).transpose(1, 2)
    key = first.key_value(hidden)[..., :128].unflatten(-1, (4, -1)).transpose(1, 2)
    attention = (query @ key.transpose(-1, -2) / 32**0.5).softmax(-1)[0, :, 0]
    for head, offset in enumerate((-1, 1, -2, 2)):
        assert attention[head, 64 + offset] > 0.8
    for layer in decoder.layers[1:]:
        torch.testing.assert_close(layer(hidden, hidden, None), hidden, atol=1e-4, rtol=1e-3)


def test_accumulated_gradients_are_those_of_one_batch():
    model = new_model("bert", "mae-lm")
    rows = sequences([40, 33, 21, 12])
    whole = masked_batch(rows)
    whole.pop("stock")
    model(**whole).loss.backward()
    expected = model.token_table.weight.grad.clone()
    model.zero_grad()
    total = whole["labels"].ne(-100).sum()
    for half in (slice(0, 2), slice(2, 4)):
        part = {name: tensor[half] for name, tensor in whole.items()}
        model(**part, num_items_in_batch=total).loss.backward()
    torch.testing.assert_close(model.token_table.weight.grad, expected, atol=1e-6, rtol=1e-4)


def test_score_is_the_loss_and_counts_hits(tokenizer):
    model = new_model("bert", vocab_size=300)
    vocabulary = Vocabulary(tokenizer)

    class Rows(list):
        lengths = np.array([30, 20])

    rows = MaskedRows(Rows(sequences([30, 20])), Objective(), vocabulary, 0)
    batch = MaskedBatches(0)([rows[0], rows[1]])
    with torch.no_grad():
        targets, loss, token, joint, hits = score(model, **batch).sum(0)
        logits = model.head.logits(model.masked_states(**_inputs(batch)), model.token_table)
    assert targets == batch["labels"].ne(-100).sum()
    assert (loss / targets).item() == pytest.approx(model(**batch).loss.item(), abs=1e-5)
    assert loss == token == joint
    assert hits == (logits.argmax(-1) == batch["labels"])[batch["masked_mask"]].sum()


def test_auto_model_loads_a_pretraining_checkpoint(tmp_path):
    new_model("bert").save_pretrained(tmp_path)
    assert isinstance(AutoModel.from_pretrained(tmp_path), PretrainingModel)
    assert Path(tmp_path, "model.safetensors").exists()
