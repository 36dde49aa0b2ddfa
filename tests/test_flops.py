"""FLOPs by formula against torch's counter, which sees every matrix product of a step."""

import pytest
import torch
from conftest import encoder_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from unmask.modeling.flops import training_flops
from unmask.modeling.pretraining import PretrainingConfig, PretrainingModel
from unmask.objectives import OBJECTIVES, get_objective

LENGTH, BATCH = 48, 3


def counted_and_formula(name: str, family: str):
    objective = get_objective(name)
    encoder = encoder_config(family)
    config = PretrainingConfig(
        encoder=encoder, objective=objective.to_dict(), max_length=LENGTH, mask_token_id=4, blank_token_id=5
    )
    model = PretrainingModel(config)
    order = 1 + torch.randperm(LENGTH - 2, generator=torch.Generator().manual_seed(0))
    count = round(objective.mask_ratio * len(order))
    ends = torch.tensor([0, LENGTH - 1])
    masked, visible = order[:count], torch.cat([order[count:], ends])
    if objective.expand_anchors:
        masked, visible = torch.cat([masked, ends]), order[count:]
    masked, visible = masked.sort().values, visible.sort().values
    ids = torch.randint(6, 90, (BATCH, LENGTH))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(
            visible_ids=ids[:, visible],
            visible_positions=visible.expand(BATCH, -1),
            masked_positions=masked.expand(BATCH, -1),
            masked_inputs=torch.full((BATCH, len(masked)), 4),
            labels=ids[:, masked],
        ).loss.backward()
    flops = training_flops(model, len(visible), len(masked))
    # What is computed a second time instead of being kept: logits, and attention of the transitions.
    states, (vocabulary, width) = len(masked) * objective.states, model.token_table.weight.shape
    again = 2 * states * vocabulary * (width + 1)  # and the bias's gradient as a product
    if model.transitions is not None:
        vertices = states + (0 if objective.expand_anchors else 2)
        again += 2 * vertices**2 * encoder.hidden_size
    return counter.get_total_flops(), BATCH * (flops.total + again)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_costs_what_the_formula_says(name):
    counted, formula = counted_and_formula(name, "mpnet" if "relative" in name else "bert")
    assert counted == formula


@pytest.mark.parametrize("family", ["modernbert", "roberta", "albert", "electra"])
@pytest.mark.parametrize("name", ["mlm", "mae-lm", "exlm"])
def test_every_family_costs_what_the_formula_says(name, family):
    counted, formula = counted_and_formula(name, family)
    assert counted == formula
