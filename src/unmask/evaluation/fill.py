"""Fill the [MASK]s of a text by a run's marginal predictions."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from unmask.data.masking import text_batch
from unmask.data.tokenizers import shown
from unmask.modeling.prediction import predict, predict_jointly
from unmask.modeling.pretraining import PretrainingModel


class Filling(NamedTuple):
    """A candidate for one masked position: its token as text, and its probability."""

    token: str
    probability: float


def fill(model: PretrainingModel, tokenizer: PreTrainedTokenizerBase, text: str, top_k: int = 5) -> list[list[Filling]]:
    """For each [MASK] of `text`, in order, its `top_k` most probable tokens by the marginal prediction."""
    model.eval()
    fillings = []
    batch = text_batch(tokenizer, text, model.config.max_length, model.objective.expand_anchors)
    for _, log_probabilities in predict(model, **batch):
        for values, ids in zip(*log_probabilities.exp().topk(min(top_k, log_probabilities.shape[-1])), strict=True):
            fillings.append(
                [Filling(shown(tokenizer, i), p) for i, p in zip(ids.tolist(), values.tolist(), strict=True)]
            )
    return fillings[1:-1] if model.objective.expand_anchors else fillings


def fill_jointly(model: PretrainingModel, tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """For each [MASK] of `text`, in order, its token in the most probable filling of all of them together."""
    model.eval()
    batch = text_batch(tokenizer, text, model.config.max_length, model.objective.expand_anchors)
    tokens = predict_jointly(model, **batch)[0].tolist()
    tokens = tokens[1:-1] if model.objective.expand_anchors else tokens
    return [shown(tokenizer, token) for token in tokens]
