"""Objectives: how many states a masked position gets, and where.

    encoder input = visible tokens + masked positions x encoder_states
    decoder input = encoder output (visible) + masked positions x decoder_states     (only if decoder_layers > 0)
    prediction    = the hidden states of the masked block -> LM head -> loss

Every objective and every ablation is one setting of the fields below; nothing else in the code asks for its name.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from unmask.errors import UserError, nearest

MASK_UNITS = ("token", "word", "span")
DECODER_MASKED_INPUTS = ("mask", "carry")
POSITIONS = ("original", "consecutive")
STATE_POSITIONS = ("auto", "rotary", "embedding", "none")
TRANSITIONS = ("dense", "sparse")


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
    decoder_hidden_size: int | None = None
    """Width of the decoder; None: the encoder's."""
    decoder_masked_input: str = "mask"
    """`mask`: a fresh [MASK] embedding; `carry`: the encoder's own output at the masked position."""
    positions: str = "original"
    """`original`, or `consecutive`: the encoder numbers the visible tokens 0, 1, 2, ... (misaligned ablation)."""
    state_positions: str = "auto"
    """How the k states of a masked position differ: `rotary` (2-D RoPE), `embedding` (learned), or `none`; `auto`:
    rotary where the encoder has rotary positions that are trained anew, else embedding."""
    transitions: str = "dense"
    """Links between states: `dense`, or `sparse` (at most `max_jump` vertices ahead)."""
    max_jump: int | None = None
    """Vertices that a link of `sparse` transitions may go ahead."""
    transition_prior: float = 3.0
    """Start of the learned preference for links to the next masked position; 0: none, as published."""
    expand_anchors: bool = False
    """Expand and predict the first and the last token of a sequence too, as the reference does."""
    mask_ratio: float = 0.15
    """Share of the maskable tokens that is masked, in (0, 1)."""
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
                self.transitions == "dense" and self.max_jump is not None,
                f"max_jump={self.max_jump} limits sparse transitions: set transitions=sparse too.",
            ),
            (
                self.max_jump is not None and self.max_jump < k,
                f"max_jump is {self.max_jump}, but below the {k} states of a masked position no path reaches the end.",
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

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


FIELDS = {field.name: field for field in dataclasses.fields(Objective)}

OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "mlm": ("BERT / RoBERTa: [MASK] in the encoder, predicted from it", {}),
    "mae-lm": (
        "Meng et al., ICLR 2024: [MASK] only in a 4-layer decoder, the encoder sees real tokens alone",
        {"encoder_states": 0, "decoder_layers": 4, "decoder_states": 1},
    ),
    "exlm": (
        "Zheng et al., ICML 2025: 4 states per [MASK], linked by transitions, with a prior on them that is ours",
        {"encoder_states": 4},
    ),
    "exlm-reference": (
        "ExLM as in the reference implementation: boundary tokens expanded and predicted, no prior",
        {"encoder_states": 4, "expand_anchors": True, "transition_prior": 0.0},
    ),
    "mae-exlm": (
        "both at once: [MASK] only in a 4-layer decoder, where it has 4 states",
        {"encoder_states": 0, "decoder_layers": 4, "decoder_states": 4},
    ),
}


def get_objective(name: str, **overrides: Any) -> Objective:
    """The named objective with some fields overridden. Raises `UserError` for an unknown name or field."""
    if name not in OBJECTIVES:
        raise UserError(f"There is no objective '{name}': {nearest(name, OBJECTIVES)}")
    named = objective_from_dict(OBJECTIVES[name][1])
    objective = objective_from_dict({**OBJECTIVES[name][1], **overrides})
    if objective.states < 2 <= named.states:
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
    default = FIELDS[field].default
    try:
        if value is None or (default is None and str(value).lower() == "none"):
            return None
        if isinstance(default, tuple):
            parts = value.replace("(", "").replace(")", "").split(",") if isinstance(value, str) else value
            return tuple(float(part) for part in parts)
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
        kind: Any = int if default is None else type(default)
        number = kind(value)
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError
        return number
    except (TypeError, ValueError, KeyError):
        expected, example = {
            tuple: ("three numbers", default),
            bool: ("true or false", "true"),
            type(None): ("a whole number", 8),
        }.get(type(default), (type(default).__name__, default))
        raise UserError(f"{field}={value!r} cannot be read: expected {expected}, as in {field}={example}.") from None
