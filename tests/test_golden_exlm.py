"""ExLM of the reference implementation, reproduced by a stock ESM encoder and nothing but a renaming of weights.

The reference turns each half of a head by itself (first by position, then by state), ours is one rotary layout over the
whole head, so the dimensions of queries and keys are permuted within each head.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import EsmConfig

from unmask.alignment import log_likelihood
from unmask.modeling.pretraining import PretrainingConfig, PretrainingModel
from unmask.objectives import get_objective

HEADS, SIZE, VOCABULARY = 4, 32, 40
LAYER = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "LayerNorm",
}


def permutation() -> torch.Tensor:
    """From the reference's order of a head's dimensions to ours: rotation pairs a with b, and [position a, position b,
    state a, state b] becomes [position a, state a, position b, state b]."""
    quarter = SIZE // HEADS // 4
    head = torch.cat([torch.arange(i * quarter, (i + 1) * quarter) for i in (0, 2, 1, 3)])
    return (torch.arange(HEADS)[:, None] * (SIZE // HEADS) + head).flatten()


def renamed(golden: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reference's parameters under our names."""
    reference, order = "sentence_encoder.", permutation()
    state = {
        "encoder.embeddings.word_embeddings.weight": golden[reference + "embed_tokens.weight"],
        "transitions.places.weight": golden["link_positional.weight"][2:],  # it counts from the padding index + 1
        "head.dense.weight": golden["lm_head.dense.weight"],
        "head.dense.bias": golden["lm_head.dense.bias"],
        "head.norm.weight": golden["lm_head.layer_norm.weight"],
        "head.norm.bias": golden["lm_head.layer_norm.bias"],
        "head.bias": golden["lm_head.bias"],
    }
    for kind in ("weight", "bias"):
        for name in ("query", "key", "gate"):
            state[f"transitions.{name}.{kind}"] = golden[f"{name}_linear.{kind}"]
        state[f"encoder.encoder.emb_layer_norm_after.{kind}"] = golden[f"{reference}emb_layer_norm_after.{kind}"]
        for layer in range(2):
            for theirs, ours in LAYER.items():
                weight = golden[f"{reference}layers.{layer}.{theirs}.{kind}"]
                if theirs in ("self_attn.q_proj", "self_attn.k_proj"):
                    weight = weight[order]
                state[f"encoder.encoder.layer.{layer}.{ours}.{kind}"] = weight
    return state


@pytest.fixture(scope="module", params=["exlm_k3", "exlm_k4"])
def golden(request):
    return np.load(Path(__file__).parent / "golden" / f"{request.param}.npz")


@pytest.fixture(scope="module")
def model(golden):
    config = EsmConfig(
        vocab_size=VOCABULARY,
        hidden_size=SIZE,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=128,
        max_position_embeddings=64,
        position_embedding_type="rotary",
        layer_norm_eps=1e-5,
        token_dropout=False,
        pad_token_id=1,
        mask_token_id=VOCABULARY - 1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    k = int(golden["states"])
    objective = get_objective("exlm-reference", encoder_states=k).to_dict()
    places = golden["weight:link_positional.weight"].shape[0] - 2
    model = PretrainingModel(
        PretrainingConfig(encoder=config, objective=objective, max_length=-(-places // k), mask_token_id=VOCABULARY - 1)
    ).eval()
    weights = {k.removeprefix("weight:"): torch.from_numpy(golden[k]) for k in golden.files if k.startswith("weight:")}
    state = renamed(weights)
    spare = model.state_dict()["transitions.places.weight"][places:]  # rows that no vertex reaches
    state["transitions.places.weight"] = torch.cat([state["transitions.places.weight"], spare])
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert [name for name in missing if "contact_head" not in name and "pooler" not in name] == []
    assert not unexpected
    return model


@pytest.fixture(scope="module")
def batch(golden):
    """The boundary tokens are in the masked block, as themselves.

    The visible block is what the reference's encoder sees beside states and padding. In `exlm_k4` that includes the end
    token four times over, behind the first sequence: where no padding token ends a row, the reference fills up with its
    last token.
    """
    ids, masked = torch.from_numpy(golden["input_ids"]), torch.from_numpy(golden["masked"]).clone()
    masked[:, 0] = True
    masked[torch.arange(len(ids)), (ids != 1).sum(1) - 1] = True
    expanded, source = torch.from_numpy(golden["expanded_ids"]), torch.from_numpy(golden["source_index"])
    visible = (torch.from_numpy(golden["state_gather"]) < 0) & (expanded != 1)

    def block(where, values, padding):
        width = int(where.sum(1).max())
        out = torch.full((len(ids), width), padding)
        for row in range(len(ids)):
            chosen = values[row, where[row]]
            out[row, : len(chosen)] = chosen
        return out

    places = torch.arange(ids.shape[1]).expand_as(ids)
    inputs = torch.where(torch.from_numpy(golden["masked"]), VOCABULARY - 1, ids)
    labels = block(masked, ids, -100)
    return {
        "visible_ids": block(visible, expanded, 1),
        "visible_positions": block(visible, source, 0),
        "visible_mask": block(visible, torch.ones_like(source), 0).bool(),
        "masked_positions": block(masked, places, 0),
        "masked_inputs": block(masked, inputs, 1),
        "masked_mask": labels != -100,
        "labels": labels,
    }


@pytest.fixture(scope="module")
def states_of(golden):
    """[(row, places in the interleaved sequence)] of the real states, in order."""
    numbers, lengths = torch.from_numpy(golden["state_gather"]), torch.from_numpy(golden["output_length"])
    where = [((numbers[row] >= 0).nonzero()[:, 0]) for row in range(len(numbers))]
    return [w[w < length] for w, length in zip(where, lengths, strict=True)]


def vertices(model, batch):
    return model.vertices(**batch)


@torch.no_grad()
def hidden(model, batch):
    return model.masked_states(**{name: tensor for name, tensor in batch.items() if name != "labels"})


def test_vertices_stand_where_the_reference_puts_them(golden, model, batch, states_of):
    ours = vertices(model, batch)
    for row, where in enumerate(states_of):
        count = int(ours.lengths[row])
        assert ours.places[row, :count].tolist() == where.tolist()
    assert ours.targets.tolist() == golden["target_length"].tolist()


@torch.no_grad()
def test_logits_of_the_states(golden, model, batch, states_of):
    logits = model.head.logits(hidden(model, batch), model.token_table)
    for row, where in enumerate(states_of):
        expected = torch.from_numpy(golden["logits"])[row, where]
        torch.testing.assert_close(logits[row, : len(where)], expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_transitions(golden, model, batch, states_of):
    links = model.transitions(hidden(model, batch), vertices(model, batch))
    for row, where in enumerate(states_of):
        expected = torch.from_numpy(golden["log_transitions"])[row][where][:, where]
        ours = links[row, : len(where), : len(where)]
        torch.testing.assert_close(ours[:-1], expected[:-1], atol=1e-5, rtol=1e-6)


@torch.no_grad()
def test_match_likelihood_and_loss(golden, model, batch, states_of):
    states, where = hidden(model, batch), vertices(model, batch)
    match = model.head.emissions(states, batch["labels"], model.token_table)
    for row, places in enumerate(states_of):
        t = int(where.targets[row])
        expected = torch.from_numpy(golden["match"])[row, :t][:, places]
        torch.testing.assert_close(match[row, :t, : len(places)], expected, atol=1e-4, rtol=0)
    log_z = log_likelihood(match, model.transitions(states, where), where.targets, where.lengths)
    expected = torch.from_numpy(golden["log_likelihood"]).double()
    # In exlm_k4 the reference ends its first sequence at the last of its spurious end tokens, which no path reaches.
    reached = expected.isfinite()
    assert reached.tolist() == ([True, True, True] if int(golden["states"]) == 3 else [False, True])
    torch.testing.assert_close(log_z[reached], expected[reached], rtol=1e-4, atol=0)
    assert log_z.isfinite().all()
    if reached.all():
        loss = (-log_z / where.targets).mean()
        assert loss.item() == pytest.approx(float(golden["loss"]), rel=1e-4)
    total = model(**batch).loss * where.targets.sum()
    assert total.item() == pytest.approx(-log_z.sum().item(), rel=1e-6)
