"""Objectives: how many states a masked position gets, and where.

    encoder input = visible tokens + masked positions x encoder_states
    decoder input = encoder output (visible) + masked positions x decoder_states     (only if decoder_layers > 0)
    prediction    = the hidden states of the masked block -> LM head -> loss

Every objective and every ablation is one setting of the fields below; nothing else in the code asks for its name.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from unmask.errors import UserError, nearest

MASK_UNITS = ("token", "word", "span")
DECODER_MASKED_INPUTS = ("mask", "carry")
POSITIONS = ("original", "consecutive")
STATE_POSITIONS = ("auto", "rotary", "embedding", "none")
TRANSITIONS = ("dense", "sparse", "none")
DECODER_ATTENTIONS = ("self", "self+cross", "causal+cross", "cross")


@dataclass(frozen=True)
class Objective:
    """What is masked, what the encoder and the decoder see of it, and where it is predicted.

    Raises `UserError` at construction for a combination that makes no sense.
    """

    encoder_states: int = 1
    """States a masked position has in the encoder: 0 keeps [MASK] out (MAE-LM), 1 puts it there (MLM), k (ExLM)."""
    decoder_layers: int = 0
    """Layers of the decoder that is thrown away after pretraining; 0: predict from the encoder."""
    decoder_states: int = 0
    """States a masked position has in the decoder."""
    decoder_hidden_size: float | None = None
    """Width of the decoder; below 1: share of the encoder's width; None: the encoder's."""
    decoder_attention: str = "self"
    """`self` over visible and masked positions together; or queries at masked positions alone: `cross` over the
    encoder's output, `self+cross`, `causal+cross`."""
    decoder_masked_input: str = "mask"
    """`mask`: a fresh [MASK] embedding; `carry`: the encoder's own output at the masked position."""
    positions: str = "original"
    """`original`, or `consecutive`: the encoder numbers the visible tokens 0, 1, 2, ... (misaligned ablation)."""
    relative_positions: bool = True
    """False: leave out the relative position bias of an encoder that has one (MPNet)."""
    state_positions: str = "auto"
    """How the k states of a masked position differ: `rotary` (2-D RoPE), `embedding` (learned), or `none`; `auto`:
    rotary where the encoder has rotary positions that are trained anew, else embedding."""
    transitions: str = "dense"
    """Links between states: `dense`, `sparse` (at most `max_jump` vertices ahead), or `none`: each position's states
    are aligned to its own token by CTC, the unknown token being the blank."""
    max_jump: int | None = None
    """Vertices that a link of `sparse` transitions may go ahead."""
    transition_prior: float = 3.0
    """Start of the learned preference for links to the next masked position; 0: none, as published."""
    expand_anchors: bool = False
    """Expand and predict the first and the last token of a sequence too, as the reference does."""
    mask_ratio: float = 0.15
    """Share of the maskable tokens that is masked, in (0, 1)."""
    mask_ratio_high: float | None = None
    """With it, each batch draws its ratio from [mask_ratio, mask_ratio_high]."""
    repeat: int = 1
    """Copies of each token, at positions of their own, each masked by itself with probability mask_ratio."""
    mask_unit: str = "token"
    """`token`, `word` (whole words) or `span` (SpanBERT's geometric lengths)."""
    mask_fill: tuple[float, float, float] = (1.0, 0.0, 0.0)
    """Shares of [MASK], random and unchanged ids at masked positions that enter the encoder; BERT: 0.8, 0.1, 0.1."""

    def __post_init__(self) -> None:
        for refused, why in self._refusals():
            if refused:
                raise UserError(why)

    def _refusals(self) -> list[tuple[bool, str]]:
        """(refused?, one sentence that says why) for every rule."""
        fill_ok = len(self.mask_fill) == 3 and min(self.mask_fill) >= 0 and abs(sum(self.mask_fill) - 1) < 1e-6
        return [
            (
                not 0 < self.mask_ratio < 1,
                f"mask_ratio is {self.mask_ratio}, but must lie strictly between 0 and 1, for example 0.15.",
            ),
            *(
                (
                    getattr(self, field) not in allowed,
                    f"{field} is '{getattr(self, field)}': {nearest(str(getattr(self, field)), allowed)}",
                )
                for field, allowed in (
                    ("mask_unit", MASK_UNITS),
                    ("decoder_masked_input", DECODER_MASKED_INPUTS),
                    ("positions", POSITIONS),
                    ("state_positions", STATE_POSITIONS),
                    ("transitions", TRANSITIONS),
                    ("decoder_attention", DECODER_ATTENTIONS),
                )
            ),
            (
                not fill_ok,
                f"mask_fill is {self.mask_fill}, but must be three shares of [MASK], random and unchanged ids that "
                "sum to 1, for example 0.8,0.1,0.1.",
            ),
            (self.encoder_states < 0, f"encoder_states is {self.encoder_states}, but cannot be negative."),
            (self.decoder_layers < 0, f"decoder_layers is {self.decoder_layers}, but cannot be negative."),
            (
                self.decoder_layers == 0 and self.encoder_states == 0,
                "encoder_states=0 leaves nothing to predict from without a decoder: set decoder_layers, for example 4.",
            ),
            (
                self.decoder_layers == 0 and self.decoder_states > 0,
                f"decoder_states={self.decoder_states} needs a decoder: set decoder_layers, for example 4.",
            ),
            (
                self.decoder_layers == 0 and self.decoder_hidden_size is not None,
                f"decoder_hidden_size={self.decoder_hidden_size} needs a decoder: set decoder_layers, for example 4.",
            ),
            (
                self.decoder_layers > 0 and self.decoder_states < 1,
                f"decoder_states is {self.decoder_states}, but a decoder predicts from at least 1 state per masked "
                "position.",
            ),
            (
                self.decoder_masked_input == "carry"
                and (self.decoder_layers == 0 or self.encoder_states != self.decoder_states),
                "decoder_masked_input=carry hands the encoder's output at masked positions to the decoder, so it needs "
                "a decoder and encoder_states equal to decoder_states.",
            ),
            (
                self.encoder_states == 0 and self.mask_fill != (1.0, 0.0, 0.0),
                "mask_fill says what stands at masked positions in the encoder, but encoder_states=0 keeps them out: "
                "leave mask_fill at 1,0,0.",
            ),
            (
                self.positions == "consecutive" and self.encoder_states > 0,
                "positions=consecutive closes the gaps of masked positions in the encoder, but encoder_states="
                f"{self.encoder_states} leaves none: set encoder_states=0.",
            ),
            (
                self.decoder_layers == 0 and self.decoder_attention != "self",
                f"decoder_attention={self.decoder_attention} needs a decoder: set decoder_layers, for example 4.",
            ),
            (
                self.decoder_hidden_size is not None and self.decoder_hidden_size <= 0,
                f"decoder_hidden_size is {self.decoder_hidden_size}, but must be a width, or a share of the encoder's.",
            ),
            (
                self.mask_ratio_high is not None and not self.mask_ratio < self.mask_ratio_high < 1,
                f"mask_ratio_high is {self.mask_ratio_high}: it must lie between mask_ratio ({self.mask_ratio}) and 1.",
            ),
            (self.repeat < 1, f"repeat is {self.repeat}, but there must be at least 1 copy of a token."),
            (
                self.repeat > 1 and (self.mask_unit != "token" or self.mask_ratio_high is not None),
                f"repeat={self.repeat} masks each copy by itself: leave mask_unit at token and mask_ratio_high unset.",
            ),
            *self._refusals_of_states(),
        ]

    def _refusals_of_states(self) -> list[tuple[bool, str]]:
        k = self.states
        return [
            *(
                (
                    k < 2 and getattr(self, field) != FIELDS[field].default,
                    f"{field} is about the states of a masked position, but {k} is predicted from: set encoder_states, "
                    "or decoder_states with a decoder, to 2 or more.",
                )
                for field in ("transitions", "max_jump", "transition_prior", "expand_anchors")
            ),
            (
                max(k, self.encoder_states) < 2 and self.state_positions != "auto",
                "state_positions tells the states of a masked position apart, but there is only one: set encoder_states"
                ", or decoder_states with a decoder, to 2 or more.",
            ),
            (
                self.encoder_states < 2 and self.state_positions == "rotary",
                f"state_positions=rotary turns states in the encoder, but encoder_states={self.encoder_states} puts no "
                "more than one there: leave it at auto, or set encoder_states to 2 or more.",
            ),
            (self.transition_prior < 0, f"transition_prior is {self.transition_prior}, but cannot be negative."),
            (
                self.transitions == "sparse" and self.max_jump is None,
                f"transitions=sparse needs max_jump, how many vertices a link may go ahead: for example {2 * k}.",
            ),
            (
                self.transitions != "sparse" and self.max_jump is not None,
                f"max_jump={self.max_jump} limits sparse transitions: set transitions=sparse too.",
            ),
            (
                self.max_jump is not None and self.max_jump < k,
                f"max_jump is {self.max_jump}, but below the {k} states of a masked position no path reaches the end.",
            ),
            (
                self.transitions == "none" and (self.expand_anchors or self.transition_prior != 3.0),
                "transitions=none aligns each position by itself, with no anchors to expand and no transitions to have "
                "a prior on: leave expand_anchors and transition_prior alone.",
            ),
            (
                self.transitions == "none" and self.state_positions == "none",
                "With neither state_positions nor transitions the states of a masked position are all alike: set one.",
            ),
            (
                self.aligned and self.decoder_attention != "self",
                f"decoder_attention={self.decoder_attention} has queries at masked positions alone, but state alignment"
                " begins and ends at visible tokens: leave it at self, or set transitions=none.",
            ),
            (
                self.expand_anchors and self.decoder_layers > 0,
                "expand_anchors puts the boundary tokens into the masked block, as the reference's ExLM does, which has"
                " no decoder: set decoder_layers=0.",
            ),
        ]

    @property
    def states(self) -> int:
        """States per masked position where the prediction is read."""
        return self.decoder_states if self.decoder_layers else self.encoder_states

    @property
    def aligned(self) -> bool:
        """Whether paths through the states of a whole sequence are summed over, between its boundary tokens."""
        return self.states > 1 and self.transitions != "none"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


FIELDS = {field.name: field for field in dataclasses.fields(Objective)}


class Named(NamedTuple):
    """An entry of the table: what it is, which other one it starts from, and the fields that differ from that."""

    description: str
    parent: str | None
    fields: dict[str, Any]


AT_EQUAL_COST = "mlm++"
"""MLM that trains for as long as another objective takes: only a comparison knows how long that is."""

OBJECTIVES: dict[str, Named] = {
    "mlm": Named("BERT / RoBERTa: [MASK] in the encoder, predicted from it", None, {}),
    AT_EQUAL_COST: Named(
        "MLM for as many steps as cost what another objective costs: `unmask compare exlm mlm++`", "mlm", {}
    ),
    "mlm-38": Named("MLM at the mask ratio of 38.7% (ExLM, figure of k and p)", "mlm", {"mask_ratio": 0.387}),
    "repeated-mlm": Named("analysis of ExLM: 4 copies of each token, each masked by itself", "mlm", {"repeat": 4}),
    # MAE-LM and its ablations
    "mae-lm": Named(
        "Meng et al., ICLR 2024: [MASK] only in a 4-layer decoder, the encoder sees real tokens alone",
        "mlm",
        {"encoder_states": 0, "decoder_layers": 4, "decoder_states": 1},
    ),
    "mae-lm-carry": Named(
        "decoder added to MLM: [MASK] in the encoder, whose output goes on into the decoder",
        "mae-lm",
        {"encoder_states": 1, "decoder_masked_input": "carry"},
    ),
    "mae-lm-reset": Named(
        "[MASK] in the encoder, but fresh [MASK] embeddings in the decoder", "mae-lm", {"encoder_states": 1}
    ),
    "mae-lm-random": Named(
        "random real tokens in place of [MASK] in the encoder",
        "mae-lm",
        {"encoder_states": 1, "mask_fill": (0.0, 1.0, 0.0)},
    ),
    "mae-lm-misaligned": Named(
        "the encoder numbers its tokens 0, 1, 2, ... without gaps", "mae-lm", {"positions": "consecutive"}
    ),
    "mae-lm-no-relative": Named(
        "no relative position bias in the encoder (MPNet)", "mae-lm", {"relative_positions": False}
    ),
    "mae-lm-self-cross": Named(
        "decoder: self attention over masked positions, then cross", "mae-lm", {"decoder_attention": "self+cross"}
    ),
    "mae-lm-causal-cross": Named(
        "decoder: causal self attention, then cross", "mae-lm", {"decoder_attention": "causal+cross"}
    ),
    "mae-lm-cross": Named("decoder: cross attention only", "mae-lm", {"decoder_attention": "cross"}),
    "mae-lm-2-layers": Named("decoder of 2 layers", "mae-lm", {"decoder_layers": 2}),
    "mae-lm-6-layers": Named("decoder of 6 layers", "mae-lm", {"decoder_layers": 6}),
    "mae-lm-narrow": Named("decoder half as wide as the encoder", "mae-lm", {"decoder_hidden_size": 0.5}),
    "mae-lm-r2": Named(
        "ours, after R²MAE (NeurIPS 2025): each batch draws its mask ratio from 10% to 40%",
        "mae-lm",
        {"mask_ratio": 0.1, "mask_ratio_high": 0.4},
    ),
    # ExLM and its ablations
    "exlm": Named(
        "Zheng et al., ICML 2025: 4 states per [MASK], linked by transitions, with a prior on them that is ours",
        "mlm",
        {"encoder_states": 4},
    ),
    "exlm-reference": Named(
        "as in the reference implementation: boundary tokens expanded and predicted, no prior",
        "exlm",
        {"expand_anchors": True, "transition_prior": 0.0},
    ),
    "exlm-k2": Named("2 states", "exlm", {"encoder_states": 2}),
    "exlm-k8": Named("8 states", "exlm", {"encoder_states": 8}),
    "exlm-38": Named("at the mask ratio of 38.7%", "exlm", {"mask_ratio": 0.387}),
    "exlm-no-2d": Named(
        "no 2-D positions: only their transitions tell a position's states apart", "exlm", {"state_positions": "none"}
    ),
    "exlm-no-transitions": Named("each position by itself, by CTC", "exlm", {"transitions": "none"}),
    "exlm-sparse": Named("links to the next 8 vertices at most", "exlm", {"transitions": "sparse", "max_jump": 8}),
    "mae-exlm": Named(
        "ours, both papers at once: [MASK] only in a 4-layer decoder, where it has 4 states",
        "mae-lm",
        {"decoder_states": 4},
    ),
}


def fields_of(name: str) -> dict[str, Any]:
    """The fields that make a named objective, its parents' included. Raises `UserError` for an unknown name."""
    if name not in OBJECTIVES:
        raise UserError(f"There is no objective '{name}': {nearest(name, OBJECTIVES)}")
    named = OBJECTIVES[name]
    return {**(fields_of(named.parent) if named.parent else {}), **named.fields}


def get_objective(name: str, **overrides: Any) -> Objective:
    """The named objective with some fields overridden. Raises `UserError` for an unknown name or field."""
    fields = fields_of(name)
    objective = objective_from_dict({**fields, **overrides})
    if objective.states < 2 <= objective_from_dict(fields).states:
        raise UserError(
            f"{name} predicts from k states per masked position, so k must be 2 or more, but {objective.states} is set:"
            " with one state it is mlm, or mae-lm with a decoder."
        )
    return objective


def objective_from_dict(fields: dict[str, Any]) -> Objective:
    """An `Objective` from plain values (a YAML file, a saved config, `--set` strings), each converted to its type."""
    for field in fields:
        if field not in FIELDS:
            raise UserError(f"An objective has no field '{field}': {nearest(field, FIELDS)}")
    return Objective(**{field: _convert(field, value) for field, value in fields.items()})


def _convert(field: str, value: Any) -> Any:
    default: Any = FIELDS[field].default
    try:
        if value is None or (default is None and str(value).lower() == "none"):
            return None
        if isinstance(default, tuple):
            parts = value.replace("(", "").replace(")", "").split(",") if isinstance(value, str) else value
            return tuple(float(part) for part in parts)
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
        kind = type(default)
        if default is None:
            kind = float if "float" in str(FIELDS[field].type) else int
        number = kind(value)
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError
        return number
    except (TypeError, ValueError, KeyError):
        expected, example = {
            tuple: ("three numbers", default),
            bool: ("true or false", "true"),
            type(None): ("a number", 0.5) if "float" in str(FIELDS[field].type) else ("a whole number", 8),
        }.get(type(default), (type(default).__name__, default))
        raise UserError(f"{field}={value!r} cannot be read: expected {expected}, as in {field}={example}.") from None
