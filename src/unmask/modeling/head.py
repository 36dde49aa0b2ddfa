"""The LM head: dense -> activation -> norm -> projection on the token table, over masked positions only.

The pieces are those of the family's stock `AutoModelForMaskedLM`, taken by name, so that a checkpoint's own head is
loaded and an MLM head can be handed back (`export`).
"""

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
        """log P_u(y_t) [B, m, S], at least float32, for states u [B, S, d] and labels y [B, m] (0 where -100).

        h_u·W_y + b_y - logsumexp_V(h_u·W + b): the logits over the vocabulary are held for a few states at a time.
        """
        table, features = self._table(embedding), self.transform(hidden)
        if torch.is_autocast_enabled(features.device.type):
            dtype = torch.get_autocast_dtype(features.device.type)
            features, table = features.to(dtype), table.to(dtype)
        bias = table.new_zeros(len(table)) if self.bias is None else self.bias.to(table.dtype)
        real = labels.clamp(min=0)
        scores = F.embedding(real, table) @ features.transpose(1, 2) + bias[real][:, :, None]
        normaliser = _LogNormaliser.apply(features.flatten(0, 1), table, bias).view(labels.shape[0], 1, -1)
        return (scores.to(normaliser.dtype) - normaliser).masked_fill((labels == -100)[:, :, None], 0.0)

    def _table(self, embedding: nn.Embedding) -> Tensor:
        """[V, e] the rows that features are compared with."""
        return embedding.weight if self.weight is None else self.weight

    def cross_entropy(self, hidden: Tensor, labels: Tensor, embedding: nn.Embedding) -> Tensor:
        """Sum over `labels` [B, m] (-100: left out) of -log p(label | hidden [B, m, d]), in nats, as a scalar."""
        return F.linear_cross_entropy(
            self.transform(hidden).flatten(0, 1),
            self._table(embedding),
            labels.flatten(),
            linear_bias=self.bias,
            reduction="sum",
        )


LOGITS = 1 << 22  # logits that are held at once; of 2^19 ... 2^24 the fastest on 2 CPU cores


class _LogNormaliser(torch.autograd.Function):
    """logsumexp_V(features·table + bias) [N], at least float32; the logits are computed again in backward."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        """features [N, e], table [V, e], bias [V], all of one type."""
        parts = []
        for part in features.split(max(1, LOGITS // len(table))):
            logits = _logits(part, table, bias)
            peak = logits.amax(-1, keepdim=True)
            parts.append(logits.sub_(peak).exp_().sum(-1).log_().add_(peak[:, 0]))
        normaliser = torch.cat(parts)
        ctx.save_for_backward(features, table, bias, normaliser)
        return normaliser

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, table, bias, normaliser = ctx.saved_tensors
        for_features = torch.empty_like(features)
        for_table, for_bias = (torch.zeros_like(x, dtype=normaliser.dtype) for x in (table, bias))
        rows = (x.split(max(1, LOGITS // len(table))) for x in (features, for_features, normaliser, gradient))
        for part, out, norm, grad in zip(*rows, strict=True):
            weights = _logits(part, table, bias).sub_(norm[:, None]).exp_()
            for_bias += grad @ weights
            weights, grad = weights.to(table.dtype), grad[:, None].to(table.dtype)
            torch.mm(weights, table, out=out)
            out *= grad
            for_table += weights.T @ (part * grad)
        return for_features, for_table.to(table.dtype), for_bias.to(bias.dtype)


def _logits(features: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    """[n, V], at least float32."""
    return F.linear(features, table, bias).to(torch.promote_types(table.dtype, torch.float32))
