"""Floating-point operations of a training step, by formula: what an objective costs before anything is measured.

A product of an [a, b] with a [b, c] matrix costs 2abc; what is not a matrix product is left out. For one sequence of v
visible tokens and m masked ones, with n = v + m x encoder_states and q the places that the decoder reads:

    encoder      2 n (weights of its linear layers) + 4 n² d per layer
    decoder      the same over v + m x decoder_states places; its last layer's queries are the q places that are read
    head         2 s (dense weights + V e + e for each label that a state is asked for), s = m x states
    alignment    transitions 2 S (their weights) + 2 S² d: only with states that are aligned

A training step is three times the forward pass: the gradients of both factors of every product. The recursion, T
targets over S states of which w = S - T + 1 can be reached at a step, is 4 (T-1) w² + 2 (T-1) S² for both passes
together. What is computed twice to save memory is counted once.
"""

from typing import NamedTuple, cast

from torch import nn

from unmask.modeling.decoder import Attention, Decoder, DecoderLayer
from unmask.modeling.pretraining import PretrainingModel

NOT_PER_TOKEN = ("pooler", "contact_head")  # parts of stock encoders that do not run on every token


class Flops(NamedTuple):
    """Of one sequence, forward and backward."""

    encoder: float
    decoder: float
    head: float
    alignment: float

    @property
    def total(self) -> float:
        return sum(self)


def training_flops(model: PretrainingModel, visible: int, masked: int) -> Flops:
    """FLOPs of a training step for each sequence of `visible` and `masked` tokens, by the part that spends them."""
    objective, config = model.objective, model.config.encoder
    width, layers = config.hidden_size, config.num_hidden_layers
    n = visible + masked * objective.encoder_states
    encoder = 2 * n * _linear_weights(model.encoder) + 4 * n * n * width * layers
    if (groups := getattr(getattr(model.encoder, "encoder", None), "albert_layer_groups", None)) is not None:
        encoder += 2 * n * _linear_weights(groups) * (layers / len(groups) - 1)  # layers that share their weights
    s = masked * objective.states
    read = s + (2 if objective.aligned and not objective.expand_anchors else 0)
    decoder = 0 if model.decoder is None else _decoder(model.decoder, visible, masked * objective.decoder_states, read)
    vocabulary, size = model.token_table.weight.shape
    asked = masked if objective.aligned else 1 if objective.states == 1 else 2  # by CTC: its label and the blank
    head = 2 * s * (_linear_weights(model.head) + (vocabulary + asked) * size)
    alignment = recursion = 0
    if model.transitions is not None:
        alignment = 2 * read * read * width + 2 * read * _linear_weights(model.transitions)
        steps = masked if objective.expand_anchors else masked + 2
        recursion = (steps - 1) * (4 * (read - steps + 1) ** 2 + 2 * read**2)
    return Flops(3 * encoder, 3 * decoder, 3 * head, 3 * alignment + recursion)


def _decoder(decoder: Decoder, visible: int, masked: int, read: int) -> float:
    """Forward FLOPs of the decoder for one sequence; read: places that are predicted from."""
    total, layers = 0.0, cast(list[DecoderLayer], list(decoder.layers))
    everything = visible + masked
    for module, places in ((decoder.visible_in, visible), (decoder.masked_in, masked), (decoder.out, read)):
        total += 2 * places * _linear_weights(module)
    for layer in layers:
        queries, contexts = masked, [visible]
        if decoder.attention == "self":
            queries, contexts = read if layer is layers[-1] else everything, [everything]
        elif "+" in decoder.attention:
            contexts = [masked, visible]
        for attention, context in zip(cast(list[Attention], list(layer.attentions)), contexts, strict=True):
            size = attention.query.out_features
            total += 4 * queries * size * size + 4 * context * size * size + 4 * queries * context * size
        total += 2 * queries * (layer.up.weight.numel() + layer.down.weight.numel())
    return total


def _linear_weights(module: nn.Module) -> int:
    """Weights of the linear layers that run on every token."""
    return sum(
        part.weight.numel()
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and not any(skipped in name for skipped in NOT_PER_TOKEN)
    )
