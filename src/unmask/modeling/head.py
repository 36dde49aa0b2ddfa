"""The LM head: dense -> activation -> norm -> projection on the token table, over masked positions only.

The pieces are those of the family's stock `AutoModelForMaskedLM`, taken by name, so that a checkpoint's own head is
loaded and an MLM head can be handed back (`export`).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN


class HeadNames(NamedTuple):
    """Where a family keeps the pieces of its MLM head."""

    dense: str
    norm: str
    """Both empty where hidden states are projected as they are."""
    projection: str
    activation: str
    """A field of the config, or the name of a function that the family hard-codes."""
    bias: str = ""
    """The bias, where it is not `projection.bias`."""


_BERT = HeadNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    activation="hidden_act",
)
_ROBERTA = HeadNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", activation="gelu")

HEADS = {
    "bert": _BERT,
    "ernie": _BERT,
    "megatron-bert": _BERT,
    "nomic_bert": HeadNames(_BERT.dense, "cls.predictions.transform.layer_norm", _BERT.projection, "silu"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "electra": HeadNames(
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", activation="gelu"
    ),
    "modernbert": HeadNames("head.dense", "head.norm", "decoder", activation="classifier_activation"),
    "esm": _ROBERTA._replace(bias="lm_head.bias"),
    "mpnet": _ROBERTA,
    "jina_embeddings_v3": _ROBERTA,
    "deberta-v2": _BERT,
    "albert": HeadNames("predictions.dense", "predictions.LayerNorm", "predictions.decoder", activation="hidden_act"),
    "distilbert": HeadNames("vocab_transform", "vocab_layer_norm", "vocab_projector", activation="activation"),
    "eurobert": HeadNames("", "", "lm_head", activation="linear"),
}


def head_names(config: PreTrainedConfig) -> HeadNames | None:
    """Where the family keeps its head; None if that is not known."""
    return None if getattr(config, "legacy", True) is False else HEADS.get(config.model_type)


class Head(nn.Module):
    """dense -> activation -> norm -> projection, which is tied to the encoder's token table where the family ties.

    A family that is not in `HEADS` gets dense, GELU, LayerNorm and a tied projection (the papers' head), untrained.
    """

    def __init__(self, config: PreTrainedConfig, stock: PreTrainedModel | None, embedding: nn.Embedding) -> None:
        super().__init__()
        names = head_names(config)
        self.weight: nn.Parameter | None = None
        if names is None or stock is None:
            self.dense: nn.Module = nn.Linear(config.hidden_size, embedding.embedding_dim)
            self.activation = ACT2FN["gelu"]
            self.norm: nn.Module = nn.LayerNorm(embedding.embedding_dim, eps=1e-5)
            self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(embedding.num_embeddings))
            return
        self.dense = stock.get_submodule(names.dense) if names.dense else nn.Identity()
        self.activation = ACT2FN[getattr(config, names.activation, names.activation)]
        self.norm = stock.get_submodule(names.norm) if names.norm else nn.Identity()
        projection = stock.get_submodule(names.projection)
        self.bias = stock.get_parameter(names.bias) if names.bias else projection.bias
        if f"{names.projection}.weight" not in stock.all_tied_weights_keys:
            self.weight = projection.weight

    @torch.no_grad()
    def start_at(self, log_frequencies: np.ndarray) -> None:
        """Sets the bias [V] of a new head to the tokens' log frequencies, where the family has a bias.

        Otherwise the first thing that training finds is one constant vector that stands for them, and the states of all
        masked positions collapse to it.
        """
        if self.bias is not None:
            self.bias.copy_(torch.from_numpy(log_frequencies))

    def transform(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., e], the vector that is compared with the rows of the token table."""
        return self.norm(self.activation(self.dense(hidden)))

    def logits(self, hidden: Tensor, embedding: nn.Embedding) -> Tensor:
        """[..., d] -> [..., V]."""
        return F.linear(self.transform(hidden), self._table(embedding), self.bias)

    def emissions(self, hidden: Tensor, labels: Tensor, embedding: nn.Embedding) -> Tensor:
        """log P_u(y_t) [B, m, S], at least float32, for states u [B, S, d] and labels y [B, m] (0 where -100)."""
        features, kind = self.transform(hidden), hidden.device.type
        if torch.is_autocast_enabled(kind):
            features = features.to(torch.get_autocast_dtype(kind))
        table, few = self._table(embedding), max(1, STATES.get(kind, STATES["cuda"]) // hidden.shape[1])
        parts = zip(features.split(few), labels.clamp(min=0).split(few), strict=True)
        scores = torch.cat([_Emissions.apply(part, table, self.bias, own) for part, own in parts])
        return scores.masked_fill((labels == -100)[:, :, None], 0.0)

    def cross_entropy(self, hidden: Tensor, labels: Tensor, embedding: nn.Embedding) -> Tensor:
        """Sum over `labels` [B, m] (-100: left out) of -log p(label | hidden [B, m, d]), in nats, as a scalar."""
        return -self.emissions(hidden.flatten(0, 1)[:, None], labels.flatten()[:, None], embedding).sum()

    def _table(self, embedding: nn.Embedding) -> Tensor:
        """[V, e] the rows that features are compared with."""
        return embedding.weight if self.weight is None else self.weight


LOG2_E = 1 / math.log(2)
STATES = {"cpu": 1 << 11, "cuda": 1 << 15}
"""States that meet a block of the vocabulary together, by device: with more, blocks become too narrow to be fast."""
LOGITS = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Logits that are held at once, by device; of 2^18 ... 2^23 the fastest on 2 CPU cores."""


class _Emissions(torch.autograd.Function):
    """f_u·W_y + b_y - logsumexp_V(f_u·W + b), a few rows of W at a time, for all states together.

    Nothing of shape [S, V] is held: backward computes the logits again.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        """features [B, S, e], table [V, e], bias [V], labels [B, m] -> [B, m, S], at least float32."""
        with torch.autocast(features.device.type, enabled=False):
            flat = features.flatten(0, 1)
            sums = []
            for _, bits in _blocks(flat, table, bias):
                peak = bits.amax(1, keepdim=True)
                sums.append(bits.sub_(peak).exp2_().sum(1).log2_().add_(peak[:, 0]))
            normaliser = torch.stack(sums).div_(LOG2_E).logsumexp(0)
            own = table[labels].to(normaliser.dtype) @ features.mT.to(normaliser.dtype)
            if bias is not None:
                own += bias[labels][:, :, None]
        ctx.save_for_backward(features, table, bias, labels, normaliser)
        return own - normaliser.view(len(features), 1, -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, table, bias, labels, normaliser = ctx.saved_tensors
        flat, wide = features.flatten(0, 1), gradient.dtype
        total = gradient.sum(1).flatten()  # that log P's normaliser gets
        weighted = (flat * total[:, None]).to(flat.dtype)
        for_table, for_flat = torch.empty_like(table), torch.zeros_like(flat, dtype=wide)
        for_bias = None if bias is None else torch.empty_like(bias)
        normaliser = normaliser[:, None] * LOG2_E
        for rows, bits in _blocks(flat, table, bias):
            probability = bits.sub_(normaliser).exp2_()
            if for_bias is not None:
                for_bias[rows] = -(total @ probability)
            probability = probability.to(flat.dtype)
            for_table[rows] = (probability.T @ weighted).neg_()
            for_flat -= probability @ table[rows].to(flat.dtype)
        for_features = for_flat.mul_(total[:, None]).view_as(features)
        for_features += gradient.mT @ table[labels].to(wide)
        for_table.index_add_(0, labels.flatten(), (gradient @ features.to(wide)).flatten(0, 1).to(table.dtype))
        if for_bias is not None:
            for_bias.index_add_(0, labels.flatten(), gradient.sum(2).flatten().to(for_bias.dtype))
        return for_features.to(features.dtype), for_table, for_bias, None


def _blocks(features: Tensor, table: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """(rows of the table, logits [N, rows] / log 2 of features [N, e], at least float32), until all rows were there.

    To base 2, because PyTorch's `exp2` takes a quarter of its `exp`'s time on a CPU.
    """
    size = max(1, LOGITS.get(features.device.type, LOGITS["cuda"]) // max(1, len(features)))
    bias = None if bias is None else bias * LOG2_E
    for low in range(0, len(table), size):
        rows = slice(low, low + size)
        logits = F.linear(features, table[rows].to(features.dtype))
        bits = logits.to(torch.promote_types(features.dtype, torch.float32))
        yield rows, bits.mul_(LOG2_E) if bias is None else torch.add(bias[rows], bits, alpha=LOG2_E, out=bits)
