"""The decoder (MAE-LM §4): shallow, post-norm, learned positions, no dropout; thrown away after pretraining.

It is one and the same for every encoder. It reads the encoder's output at the visible positions and a fresh [MASK]
embedding at the masked ones, once for each of their states, and predicts there.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from unmask.modeling.cpu import attention


class Attention(nn.Module):
    """Post-norm multi-head attention of `x` over `context`."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(size, size)
        self.key_value = nn.Linear(size, 2 * size)
        self.out = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size, eps=1e-5)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, q, D], context [B, n, D], mask [B or 1, 1, q or 1, n] (True: attend) or None -> [B, q, D]."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), *self.key_value(context).chunk(2, dim=-1))
        )
        attended = attention(query, key, value, mask)
        return self.norm(x + self.out(attended.transpose(1, 2).flatten(2)))


class DecoderLayer(GradientCheckpointingLayer):
    """One attention, or two (over the masked block, then over the encoder's output), then the feed-forward."""

    def __init__(self, size: int, heads: int, attentions: int) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention(size, heads) for _ in range(attentions))
        self.up = nn.Linear(size, 4 * size)
        self.down = nn.Linear(4 * size, size)
        self.norm = nn.LayerNorm(size, eps=1e-5)

    def forward(self, x: Tensor, *over: Tensor | None) -> Tensor:
        """x [B, q, D]; over: each attention's context and mask, one after the other -> [B, q, D]."""
        for part, context, mask in zip(self.attentions, over[::2], over[1::2], strict=True):
            x = part(x, context, mask)
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Decoder(nn.Module):
    """Predicts masked positions from the visible ones and their own positions.

    size: width D of the decoder; encoder_size: width d of the encoder's output and of what the head takes;
    masked_size: width of the masked positions' inputs; max_length: rows of the position table; states: rows of the
    state table, 0 for none; attention (MAE-LM, table 3): `self` over visible and masked positions together, or
    queries that are the masked positions alone: `cross` over the encoder's output, `self+cross`, `causal+cross`.
    """

    def __init__(
        self,
        *,
        size: int,
        encoder_size: int,
        masked_size: int,
        heads: int,
        layers: int,
        max_length: int,
        states: int,
        attention: str,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.visible_in = nn.Identity() if size == encoder_size else nn.Linear(encoder_size, size)
        self.masked_in = nn.Identity() if size == masked_size else nn.Linear(masked_size, size)
        self.positions = nn.Embedding(max_length, size)
        self.states = nn.Embedding(states, size) if states else None
        self.norm = nn.LayerNorm(size, eps=1e-5)
        self.layers = nn.ModuleList(DecoderLayer(size, heads, 1 + ("+" in attention)) for _ in range(layers))
        self.out = nn.Identity() if size == encoder_size else nn.Linear(size, encoder_size)

    @torch.no_grad()
    def start(self) -> None:
        """Initial values with which a new decoder learns (docs/design.md, "Masked states must not collapse").

        Positions start as sinusoids in as many dimensions as a head has; head h of the first layer's attention over the
        visible positions starts at the neighbour -1, +1, -2, +2, ...; what else the layers do starts at zero.
        """
        length, size = self.positions.weight.shape
        layers = cast(list[DecoderLayer], list(self.layers))
        first = cast(Attention, layers[0].attentions[-1])
        width = size // first.heads
        frequencies = torch.pi * torch.linspace(0.02, 1, width // 2) ** 1.3  # no two positions look alike
        angles = torch.arange(length)[:, None] * frequencies
        waves = slice(0, 2 * len(frequencies))
        nn.init.zeros_(self.positions.weight)
        self.positions.weight[:, waves] = 2 * torch.cat([angles.sin(), angles.cos()], dim=1)
        # A masked position's query is all position, a visible one's key has its share; the right one stands out by 10.
        energy = 2 * width
        scale = (10 * width**0.5 / (size * (energy / (size + energy)) ** 0.5)) ** 0.5
        queries, keys, values = first.query.weight, first.key_value.weight[:size], first.key_value.weight[size:]
        for head in range(first.heads):
            rows = slice(head * width, head * width + 2 * len(frequencies))
            offset = (head // 2 + 1) * (1 if head % 2 else -1)
            cos, sin = (frequencies * offset).cos().diag(), (frequencies * offset).sin().diag()
            queries[rows], keys[rows] = 0, 0
            queries[rows, waves] = scale * torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])
            keys[rows, waves] = scale * torch.eye(2 * len(frequencies))
        values.mul_(2)
        first.out.weight.mul_(2)
        for layer in layers:
            for part in cast(list[Attention], list(layer.attentions)):
                if part is not first:
                    nn.init.zeros_(part.out.weight)
            nn.init.zeros_(layer.down.weight)

    def forward(
        self,
        visible: Tensor,
        visible_positions: Tensor,
        masked: Tensor,
        masked_positions: Tensor,
        mask: Tensor | None = None,
        state_numbers: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, q, d] of the masked block, or of the `wanted` places in [visible ; masked].

        visible: [B, v, d] output of the encoder; masked: [B, n, masked_size], the [MASK] embedding or the encoder's
        own output there (`carry`); positions: [B, v] and [B, n]; mask: [B, v + n], True where real, None if all are;
        state_numbers: [B, n], from 1; wanted: [B, q], with `self` attention alone.
        """
        v = visible.shape[1]
        masked_in = self.masked_in(masked)
        if self.states is not None and state_numbers is not None:
            masked_in = masked_in + self.states(state_numbers - 1)
        x = torch.cat([self.visible_in(visible), masked_in], dim=1)
        x = self.norm(x + self.positions(torch.cat([visible_positions, masked_positions], dim=1)))
        attend = None if mask is None else mask[:, None, None, :]
        if self.attention == "self":
            for layer in self.layers[:-1]:
                x = layer(x, x, attend)
            # Only these are read, so the last layer is computed for them alone.
            queries = x[:, v:] if wanted is None else gather_rows(x, wanted)
            return self.out(self.layers[-1](queries, x, attend))
        memory, x = x[:, :v], x[:, v:]
        over_memory = None if attend is None else attend[..., :v]
        over_masked = None if attend is None else attend[..., v:]
        if self.attention == "causal+cross":
            before = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            over_masked = before if over_masked is None else over_masked & before
        for layer in self.layers:
            own = (x, over_masked) if "+" in self.attention else ()
            x = layer(x, *own, memory, over_memory)
        return self.out(x)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows `index` [B, q] of x [B, n, d] -> [B, q, d]."""
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
