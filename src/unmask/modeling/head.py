"""The LM head: dense -> activation -> norm -> projection on the token table, over masked positions only.

The pieces are those of the family's stock `AutoModelForMaskedLM`, taken by name, so that a checkpoint's own head is
loaded and an MLM head can be handed back (`export`).
"""

from typing import NamedTuple

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
}


class Head(nn.Module):
    """dense -> activation -> norm -> projection, which is tied to the encoder's token table where the family ties.

    A family that is not in `HEADS` gets dense, GELU, LayerNorm and a tied projection (the papers' head), untrained.
    """

    def __init__(self, config: PreTrainedConfig, stock: PreTrainedModel | None, embedding: nn.Embedding) -> None:
        super().__init__()
        names = HEADS.get(config.model_type)
        self.weight: nn.Parameter | None = None
        if names is None or stock is None:
            self.dense: nn.Module = nn.Linear(config.hidden_size, embedding.embedding_dim)
            self.activation = ACT2FN["gelu"]
            self.norm: nn.Module = nn.LayerNorm(embedding.embedding_dim, eps=1e-5)
            self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(embedding.num_embeddings))
            return
        self.dense = stock.get_submodule(names.dense)
        self.activation = ACT2FN[getattr(config, names.activation, names.activation)]
        self.norm = stock.get_submodule(names.norm)
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
        return F.linear(self.transform(hidden), embedding.weight if self.weight is None else self.weight, self.bias)

    def cross_entropy(self, hidden: Tensor, labels: Tensor, embedding: nn.Embedding) -> Tensor:
        """Sum over `labels` [B, m] (-100: left out) of -log p(label | hidden [B, m, d]), in nats, as a scalar."""
        return F.linear_cross_entropy(
            self.transform(hidden).flatten(0, 1),
            embedding.weight if self.weight is None else self.weight,
            labels.flatten(),
            linear_bias=self.bias,
            reduction="sum",
        )
