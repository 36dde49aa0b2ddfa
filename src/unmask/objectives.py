"""Objectives: how many states a masked position gets, and where.

    encoder input = visible tokens + masked positions x encoder_states
    decoder input = encoder output (visible) + masked positions x decoder_states     (only if decoder_layers > 0)
    prediction    = the hidden states of the masked block -> LM head -> loss

Every objective and every ablation is one setting of the fields below; nothing else in the code asks for its name.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from unmask.errors import UserError, nearest

MASK_UNITS = ("token", "word", "span")
DECODER_MASKED_INPUTS = ("mask", "carry")
POSITIONS = ("original", "consecutive")


@dataclass(frozen=True)
class Objective:
    """What is masked, what the encoder and the decoder see of it, and where it is predicted.

    Raises `UserError` at construction for a combination that makes no sense.
    """

    encoder_states: int = 1
    """States a masked position has in the encoder: 1 puts [MASK] there (MLM), 0 keeps it out (MAE-LM)."""
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
                )
            ),
            (
                not fill_ok,
                f"mask_fill is {self.mask_fill}, but must be three shares of [MASK], random and unchanged ids that "
                "sum to 1, for example 0.8,0.1,0.1.",
            ),
            (
                self.encoder_states not in (0, 1),
                f"encoder_states is {self.encoder_states}, but must be 0 (no [MASK] in the encoder) or 1.",
            ),
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
                self.decoder_layers > 0 and self.decoder_states != 1,
                f"decoder_states is {self.decoder_states}, but a decoder predicts from 1 state per masked position.",
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
}


def get_objective(name: str, **overrides: Any) -> Objective:
    """The named objective with some fields overridden. Raises `UserError` for an unknown name or field."""
    if name not in OBJECTIVES:
        raise UserError(f"There is no objective '{name}': {nearest(name, OBJECTIVES)}")
    return objective_from_dict({**OBJECTIVES[name][1], **overrides})


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
        kind: Any = int if default is None else type(default)
        return kind(value)
    except (TypeError, ValueError):
        expected = "three numbers" if isinstance(default, tuple) else type(default).__name__
        raise UserError(
            f"{field}={value!r} cannot be read: expected {expected}, as in {field}={default or 256}."
        ) from None
