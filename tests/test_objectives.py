import pytest

from unmask.errors import UserError
from unmask.objectives import OBJECTIVES, get_objective, objective_from_dict


def test_named_objectives_are_what_the_papers_say():
    mlm, mae = get_objective("mlm"), get_objective("mae-lm")
    assert (mlm.encoder_states, mlm.decoder_layers, mlm.states) == (1, 0, 1)
    assert (mae.encoder_states, mae.decoder_layers, mae.decoder_states, mae.states) == (0, 4, 1, 1)
    assert mlm.mask_ratio == mae.mask_ratio == 0.15
    assert mlm.mask_fill == mae.mask_fill == (1.0, 0.0, 0.0)


def test_named_objectives_with_states():
    exlm, reference, joined = (get_objective(name) for name in ("exlm", "exlm-reference", "mae-exlm"))
    assert (exlm.encoder_states, exlm.decoder_layers, exlm.states, exlm.transition_prior) == (4, 0, 4, 3.0)
    assert (reference.states, reference.expand_anchors, reference.transition_prior) == (4, True, 0.0)
    assert (joined.encoder_states, joined.decoder_layers, joined.decoder_states, joined.states) == (0, 4, 4, 4)
    assert not exlm.expand_anchors
    assert exlm.transitions == "dense"


def test_strings_from_the_command_line_become_the_fields_types():
    objective = get_objective("mae-lm", mask_ratio="0.3", decoder_layers="2", decoder_hidden_size="64")
    assert (objective.mask_ratio, objective.decoder_layers, objective.decoder_hidden_size) == (0.3, 2, 64)
    assert get_objective("mlm", mask_fill="0.8,0.1,0.1").mask_fill == (0.8, 0.1, 0.1)
    exlm = get_objective("exlm", encoder_states="3", transitions="sparse", max_jump="6", transition_prior="1")
    assert (exlm.encoder_states, exlm.max_jump, exlm.transition_prior) == (3, 6, 1.0)
    assert get_objective("exlm", expand_anchors="true").expand_anchors is True
    assert get_objective("exlm-reference", expand_anchors="False").expand_anchors is False


@pytest.mark.parametrize("name", OBJECTIVES)
def test_round_trip_through_plain_values(name):
    objective = get_objective(name)
    assert objective_from_dict(objective.to_dict()) == objective


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("mae-ml", {}, "did you mean 'mae-lm'"),
        ("mlm", {"mask_ration": 0.2}, "did you mean 'mask_ratio'"),
        ("mlm", {"mask_ratio": 0}, "strictly between 0 and 1"),
        ("mlm", {"mask_ratio": 1.0}, "strictly between 0 and 1"),
        ("mlm", {"mask_ratio": "half"}, "cannot be read"),
        ("mlm", {"mask_unit": "words"}, "did you mean 'word'"),
        ("mlm", {"mask_fill": (0.8, 0.1, 0.2)}, "sum to 1"),
        ("mlm", {"encoder_states": 0}, "nothing to predict from"),
        ("mlm", {"decoder_states": 1}, "needs a decoder"),
        ("mlm", {"decoder_hidden_size": 64}, "needs a decoder"),
        ("mlm", {"decoder_masked_input": "carry"}, "needs a decoder"),
        ("mae-lm", {"decoder_masked_input": "carry"}, "encoder_states equal to decoder_states"),
        ("mae-lm", {"mask_fill": (0.8, 0.1, 0.1)}, "keeps them out"),
        ("mae-lm", {"decoder_states": 0}, "at least 1 state per masked position"),
        ("mlm", {"encoder_states": -1}, "cannot be negative"),
        ("mlm", {"positions": "consecutive"}, "leaves none: set encoder_states=0"),
        ("exlm", {"encoder_states": 1}, "k must be 2 or more, but 1 is set"),
        ("exlm", {"encoder_states": 0}, "nothing to predict from"),
        ("mae-exlm", {"decoder_states": 1}, "k must be 2 or more"),
        ("exlm-reference", {"encoder_states": 1}, "is about the states of a masked position"),
        ("mlm", {"transition_prior": 1}, "transition_prior is about the states of a masked position, but 1"),
        ("mae-lm", {"transitions": "sparse", "max_jump": 8}, "transitions is about the states"),
        ("mlm", {"state_positions": "embedding"}, "there is only one"),
        ("mae-exlm", {"state_positions": "rotary"}, "encoder_states=0 puts no more than one there"),
        ("exlm", {"state_positions": "rotatory"}, "did you mean 'rotary'"),
        ("exlm", {"transitions": "sparse"}, "needs max_jump"),
        ("exlm", {"max_jump": 8}, "set transitions=sparse too"),
        ("exlm", {"transitions": "sparse", "max_jump": 3}, "below the 4 states of a masked position no path"),
        ("exlm", {"transitions": "sparse", "max_jump": "many"}, "expected a whole number"),
        ("exlm", {"transition_prior": -1}, "cannot be negative"),
        ("exlm", {"transition_prior": "nan"}, "cannot be read: expected float"),
        ("exlm", {"expand_anchors": "perhaps"}, "expected true or false"),
        ("mae-exlm", {"expand_anchors": True}, "has no decoder"),
        (
            "mae-exlm",
            {"decoder_masked_input": "carry", "encoder_states": 2},
            "encoder_states equal to decoder_states",
        ),
    ],
)
def test_senseless_settings_are_refused_with_the_reason(name, fields, says):
    with pytest.raises(UserError, match=says):
        get_objective(name, **fields)
