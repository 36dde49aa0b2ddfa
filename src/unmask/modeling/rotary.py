"""2-D rotary positions (ExLM §3): half of a head's frequencies turn with the token's position, half with its state.

A token that is not expanded has state 0, so it is turned exactly as by stock RoPE with `rope_type="proportional"`,
`partial_rotary_factor=0.5` and the base squared: what was pretrained with 2-D positions is a stock encoder afterwards.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from unmask.errors import UserError

MODULES = ("rotary_emb", "rotary_embeddings")
"""Where families keep the module that turns position ids into cosines and sines."""


class RotaryPositions2D(nn.Module):
    """Takes the place of a stock encoder's rotary module.

    bases: θ² by layer type (None where the family has one for all); head_size: d_h, divisible by 4.
    """

    def __init__(self, bases: dict[str | None, float], head_size: int) -> None:
        super().__init__()
        self.bases, self.head_size = bases, head_size

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, L, d_h] in x's type for (position, state) [B, L, 2], or positions [B, L] of state 0.

        Frequencies: f_i = θ^(-2i / (d_h / 2)). Nothing is kept in a buffer: it would not survive `from_pretrained`.
        """
        if position_ids.dim() == 2:
            position_ids = torch.stack([position_ids, torch.zeros_like(position_ids)], dim=-1)
        exponents = torch.arange(0, self.head_size // 2, 2, device=x.device, dtype=torch.float32) / self.head_size
        frequencies = self.bases[layer_type] ** -exponents
        angles = (position_ids[..., None].float() * frequencies).flatten(-2)  # [B, L, d_h / 2]: positions, then states
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotary_name(encoder: PreTrainedModel) -> str | None:
    """The attribute of the encoder's rotary module; None where there is none."""
    return next((name for name in MODULES if getattr(encoder, name, None) is not None), None)


def two_dimensional(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of an encoder's config whose stock model turns tokens as 2-D positions turn those of state 0.

    Without plain RoPE, or with a head size that 4 does not divide, the copy is unchanged. So it is for ESM, which takes
    the frequencies from its checkpoint (`write_frequencies`).
    """
    config = copy.deepcopy(config)
    rope = getattr(config, "rope_parameters", None)
    for parameters in _by_layer_type(rope).values() if rope and _head_size(config) % 4 == 0 else ():
        if parameters["rope_type"] == "default":
            base = float(parameters["rope_theta"]) ** 2
            parameters |= {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": base}
    return config


def install(encoder: PreTrainedModel) -> None:
    """Puts 2-D positions in the place of the encoder's rotary module; its config is that of `two_dimensional`.

    Raises `UserError` for an encoder without a rotary module, or with a head size that 4 does not divide.
    """
    name = rotary_name(encoder)
    if name is None:
        raise UserError(
            f"2-D rotary positions need an encoder with rotary positions, which {type(encoder).__name__} has not: set "
            "state_positions=embedding."
        )
    setattr(encoder, name, _replacement(encoder))


def agrees(encoder: PreTrainedModel) -> bool:
    """Whether the encoder's rotary module already turns tokens as 2-D positions do, so that they change nothing."""
    name = rotary_name(encoder)
    if name is None or _head_size(encoder.config) % 4:
        return False
    theirs, ours = getattr(encoder, name), _replacement(encoder)
    x, places = torch.zeros(1, 64, 1), torch.arange(64)[None]
    kinds = [kind for kind in ours.bases if kind is None or kind in encoder.config.layer_types]
    calls = [((x, places) if kind is None else (x, places, kind)) for kind in kinds]
    pairs = [(a, b) for call in calls for a, b in zip(theirs(*call), ours(*call), strict=True)]
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-4) for a, b in pairs)


def _replacement(encoder: PreTrainedModel) -> RotaryPositions2D:
    size = _head_size(encoder.config)
    if size % 4:
        raise UserError(
            f"2-D rotary positions need a head size divisible by 4, but {type(encoder).__name__} has {size}: choose "
            "another width or number of heads, or set state_positions=embedding."
        )
    return RotaryPositions2D(_bases(encoder.config), size)


def _head_size(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@torch.no_grad()
def write_frequencies(stock: PreTrainedModel) -> None:
    """Writes the frequencies of state 0 into a stock encoder that keeps them in its checkpoint (ESM)."""
    name = rotary_name(stock)
    if name is not None and f"{name}.inv_freq" in stock.state_dict():
        frequencies = getattr(stock, name).inv_freq
        half = len(frequencies) // 2
        exponents = torch.arange(half) / (2 * half)
        frequencies.copy_(torch.cat([_bases(stock.config)[None] ** -exponents, torch.zeros(half)]))


def _by_layer_type(rope: dict[str, Any]) -> dict[str | None, dict[str, Any]]:
    nested: dict[str | None, dict[str, Any]] = {
        kind: parameters for kind, parameters in rope.items() if isinstance(parameters, dict)
    }
    return nested or {None: rope}


def _bases(config: PreTrainedConfig) -> dict[str | None, float]:
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return {None: float(config.rope_theta) ** 2}
    return {kind: float(parameters["rope_theta"]) for kind, parameters in _by_layer_type(rope).items()}
