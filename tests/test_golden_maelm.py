"""MAE-LM of the reference implementation, reproduced by stock encoders and nothing but a renaming of weights.

`absolute`: a BERT encoder; `relative`: an MPNet encoder, whose bucket formula is T5's, so the reference's is put in.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, MPNetConfig

from unmask.modeling.positions import encode
from unmask.modeling.prediction import score
from unmask.modeling.pretraining import PretrainingConfig, PretrainingModel
from unmask.objectives import get_objective

ENCODER_LAYER = {
    "absolute": {
        "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key",
        "self_attn.v_proj": "attention.self.value",
        "self_attn.out_proj": "attention.output.dense",
        "self_attn_layer_norm": "attention.output.LayerNorm",
        "fc1": "intermediate.dense",
        "fc2": "output.dense",
        "final_layer_norm": "output.LayerNorm",
    },
    "relative": {
        "self_attn.q_proj": "attention.attn.q",
        "self_attn.k_proj": "attention.attn.k",
        "self_attn.v_proj": "attention.attn.v",
        "self_attn.out_proj": "attention.attn.o",
        "self_attn_layer_norm": "attention.LayerNorm",
        "fc1": "intermediate.dense",
        "fc2": "output.dense",
        "final_layer_norm": "output.LayerNorm",
    },
}
DECODER_LAYER = {
    "self_attn.q_proj": "attentions.0.query",
    "self_attn.out_proj": "attentions.0.out",
    "self_attn_layer_norm": "attentions.0.norm",
    "fc1": "up",
    "fc2": "down",
    "final_layer_norm": "norm",
}


def renamed(golden: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The reference's parameters under our names."""
    encoder, decoder = "encoder.sentence_encoder.", "gen_decoder.sentence_encoder."
    positions = golden[encoder + "embed_positions.weight"]
    state = {
        "encoder.embeddings.word_embeddings.weight": golden[encoder + "embed_tokens.weight"],
        "encoder.embeddings.position_embeddings.weight": positions,
        "decoder.positions.weight": golden[decoder + "embed_positions.weight"],
        "head.dense.weight": golden["gen_decoder.lm_head.dense.weight"],
        "head.dense.bias": golden["gen_decoder.lm_head.dense.bias"],
        "head.norm.weight": golden["gen_decoder.lm_head.layer_norm.weight"],
        "head.norm.bias": golden["gen_decoder.lm_head.layer_norm.bias"],
        "head.bias": golden["gen_decoder.lm_head.bias"],
    }
    if kind == "absolute":  # the reference has no token types
        state["encoder.embeddings.token_type_embeddings.weight"] = torch.zeros(1, 32)
    else:  # MPNet's positions begin at 2
        state["encoder.embeddings.position_embeddings.weight"] = torch.cat([torch.zeros(2, 32), positions])
        bias = golden[encoder + "relative_attention_bias.weight"]
        state["encoder.encoder.relative_attention_bias.weight"] = torch.cat([bias, torch.zeros(16, 4)])  # 16 of 32
    for part in ("weight", "bias"):
        state[f"encoder.embeddings.LayerNorm.{part}"] = golden[f"{encoder}emb_layer_norm.{part}"]
        state[f"decoder.norm.{part}"] = golden[f"{decoder}emb_layer_norm.{part}"]
        for layer in range(2):
            for name, ours in ENCODER_LAYER[kind].items():
                theirs = golden[f"{encoder}layers.{layer}.{name}.{part}"]
                state[f"encoder.encoder.layer.{layer}.{ours}.{part}"] = theirs
        for layer in range(DECODER_LAYERS[kind]):
            theirs = f"{decoder}layers.{layer}."
            for name, ours in DECODER_LAYER.items():
                state[f"decoder.layers.{layer}.{ours}.{part}"] = golden[f"{theirs}{name}.{part}"]
            state[f"decoder.layers.{layer}.attentions.0.key_value.{part}"] = torch.cat(
                [golden[f"{theirs}self_attn.{p}_proj.{part}"] for p in "kv"]
            )
    return state


DECODER_LAYERS = {"absolute": 2, "relative": 1}


@pytest.fixture(scope="module", params=["absolute", "relative"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def golden(kind):
    return np.load(Path(__file__).parent / "golden" / f"maelm_{kind}.npz")


@pytest.fixture(scope="module")
def model(golden, kind):
    sizes = {
        "vocab_size": 48,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
    }
    if kind == "absolute":
        config = BertConfig(**sizes, max_position_embeddings=24, type_vocab_size=1)
    else:
        config = MPNetConfig(**sizes, max_position_embeddings=26)
    objective = get_objective("mae-lm", decoder_layers=DECODER_LAYERS[kind]).to_dict()
    model = PretrainingModel(
        PretrainingConfig(encoder=config, objective=objective, max_length=24, mask_token_id=47)
    ).eval()
    weights = {k.removeprefix("weight:"): torch.from_numpy(golden[k]) for k in golden.files if k.startswith("weight:")}
    missing, unexpected = model.load_state_dict(renamed(weights, kind), strict=False)
    assert not unexpected
    assert [name for name in missing if "pooler" not in name] == []
    if kind == "relative":
        buckets = torch.from_numpy(golden["rp_bucket"])  # [query, key]; a function of the distance alone
        by_distance = torch.cat([buckets[:, 0].flip(0), buckets[0, 1:]])
        inner = model.encoder.encoder
        inner.relative_position_bucket = lambda distance, num_buckets: by_distance[distance + len(buckets) - 1]
    return model


@pytest.fixture(scope="module")
def batch(golden):
    ids, masked = torch.from_numpy(golden["input_ids"]), torch.from_numpy(golden["masked"])
    m = int(masked.sum(1).max())
    positions = torch.zeros(len(ids), m, dtype=torch.long)
    labels = torch.full_like(positions, -100)
    for row in range(len(ids)):
        where = masked[row].nonzero()[:, 0]
        positions[row, : len(where)] = where
        labels[row, : len(where)] = ids[row, where]
    visible_mask = torch.from_numpy(golden["visible_ids"]) != 1
    return {
        "visible_ids": torch.from_numpy(golden["visible_ids"]),
        "visible_positions": torch.from_numpy(golden["visible_positions"]),
        "masked_positions": positions,
        "masked_inputs": torch.full_like(positions, 47),
        "labels": labels,
        "visible_mask": visible_mask,
        "masked_mask": labels != -100,
    }


@torch.no_grad()
def test_encoder_output(golden, model, batch):
    hidden = encode(
        model.encoder, batch["visible_positions"], batch["visible_mask"], model.offset, input_ids=batch["visible_ids"]
    )
    real = batch["visible_mask"]
    torch.testing.assert_close(hidden[real], torch.from_numpy(golden["encoder_output"])[real], atol=1e-5, rtol=0)


@torch.no_grad()
def test_logits_at_masked_positions(golden, model, batch):
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    states = model.masked_states(**inputs)[batch["masked_mask"]]
    logits = model.head.logits(states, model.token_table)
    torch.testing.assert_close(logits, torch.from_numpy(golden["logits_at_masked"]), atol=1e-5, rtol=0)


@torch.no_grad()
def test_loss(golden, model, batch):
    assert model(**batch).loss.item() == pytest.approx(float(golden["loss"]), abs=1e-6)
    scores = score(model, **batch).double().sum(0)
    assert (scores[1] / scores[0]).item() == pytest.approx(float(golden["loss"]), abs=1e-6)
