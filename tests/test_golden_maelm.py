"""MAE-LM of the reference implementation, reproduced by a stock BERT encoder and nothing but a renaming of weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig

from unmask.modeling.positions import encode
from unmask.modeling.prediction import score
from unmask.modeling.pretraining import PretrainingConfig, PretrainingModel
from unmask.objectives import get_objective

ENCODER_LAYER = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.output.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
}
DECODER_LAYER = {
    "self_attn.q_proj": "query",
    "self_attn.out_proj": "out",
    "self_attn_layer_norm": "attention_norm",
    "fc1": "up",
    "fc2": "down",
    "final_layer_norm": "norm",
}


def renamed(golden: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reference's parameters under our names."""
    encoder, decoder = "encoder.sentence_encoder.", "gen_decoder.sentence_encoder."
    state = {
        "encoder.embeddings.word_embeddings.weight": golden[encoder + "embed_tokens.weight"],
        "encoder.embeddings.position_embeddings.weight": golden[encoder + "embed_positions.weight"],
        "decoder.positions.weight": golden[decoder + "embed_positions.weight"],
        "head.dense.weight": golden["gen_decoder.lm_head.dense.weight"],
        "head.dense.bias": golden["gen_decoder.lm_head.dense.bias"],
        "head.norm.weight": golden["gen_decoder.lm_head.layer_norm.weight"],
        "head.norm.bias": golden["gen_decoder.lm_head.layer_norm.bias"],
        "head.bias": golden["gen_decoder.lm_head.bias"],
    }
    for kind in ("weight", "bias"):
        state[f"encoder.embeddings.LayerNorm.{kind}"] = golden[f"{encoder}emb_layer_norm.{kind}"]
        state[f"decoder.norm.{kind}"] = golden[f"{decoder}emb_layer_norm.{kind}"]
        for layer in range(2):
            theirs = f"layers.{layer}."
            for name, ours in ENCODER_LAYER.items():
                state[f"encoder.encoder.layer.{layer}.{ours}.{kind}"] = golden[f"{encoder}{theirs}{name}.{kind}"]
            for name, ours in DECODER_LAYER.items():
                state[f"decoder.layers.{layer}.{ours}.{kind}"] = golden[f"{decoder}{theirs}{name}.{kind}"]
            state[f"decoder.layers.{layer}.key_value.{kind}"] = torch.cat(
                [golden[f"{decoder}{theirs}self_attn.{p}_proj.{kind}"] for p in "kv"]
            )
    return state


@pytest.fixture(scope="module")
def golden():
    return np.load(Path(__file__).parent / "golden" / "maelm_absolute.npz")


@pytest.fixture(scope="module")
def model(golden):
    config = BertConfig(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=24,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=1,
    )
    objective = get_objective("mae-lm", decoder_layers=2).to_dict()
    model = PretrainingModel(
        PretrainingConfig(encoder=config, objective=objective, max_length=24, mask_token_id=47)
    ).eval()
    weights = {k.removeprefix("weight:"): torch.from_numpy(golden[k]) for k in golden.files if k.startswith("weight:")}
    missing, unexpected = model.load_state_dict(renamed(weights), strict=False)
    assert missing == ["encoder.embeddings.token_type_embeddings.weight"], "the reference has no token types"
    assert not unexpected
    torch.nn.init.zeros_(model.encoder.embeddings.token_type_embeddings.weight)
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
