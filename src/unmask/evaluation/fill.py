"""Fill the [MASK]s of a text by a run's marginal predictions."""

from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from unmask.data.masking import MaskedBatches, masked_example
from unmask.data.tokenizers import boundaries, prepared
from unmask.errors import UserError
from unmask.modeling.prediction import predict, predict_jointly
from unmask.modeling.pretraining import PretrainingModel


class Filling(NamedTuple):
    """A candidate for one masked position: its token as text, and its probability."""

    token: str
    probability: float


def masked_batch(model: PretrainingModel, tokenizer: PreTrainedTokenizerBase, text: str) -> dict[str, torch.Tensor]:
    """A text with [MASK]s as a masked batch of one sequence, without labels. Raises `UserError` if it cannot be one."""
    start, end = boundaries(tokenizer)  # as in pretraining, whether or not the tokenizer itself adds them
    inner = tokenizer(prepared(tokenizer, text), add_special_tokens=False)["input_ids"]
    ids = np.array([*([start] if start is not None else []), *inner, *([end] if end is not None else [])])
    masked = np.flatnonzero(ids == tokenizer.mask_token_id)
    if not len(masked):
        raise UserError(
            f"The text holds no {tokenizer.mask_token}: write {tokenizer.mask_token} where a token is missing."
        )
    if len(ids) > model.config.max_length:
        raise UserError(
            f"The text has {len(ids)} tokens but the model was trained on {model.config.max_length}: shorten it."
        )
    if len(masked) == len(ids):
        raise UserError(f"The text holds nothing but {tokenizer.mask_token}: give some of what stands around it.")
    example = masked_example(ids, masked, ids[masked], model.objective.expand_anchors)
    batch = MaskedBatches(tokenizer.pad_token_id)([example])
    del batch["labels"]
    return batch


def fill(model: PretrainingModel, tokenizer: PreTrainedTokenizerBase, text: str, top_k: int = 5) -> list[list[Filling]]:
    """For each [MASK] of `text`, in order, its `top_k` most probable tokens by the marginal prediction."""
    model.eval()
    fillings = []
    for _, log_probabilities in predict(model, **masked_batch(model, tokenizer, text)):
        for values, ids in zip(*log_probabilities.exp().topk(min(top_k, log_probabilities.shape[-1])), strict=True):
            fillings.append(
                [Filling(_shown(tokenizer, i), p) for i, p in zip(ids.tolist(), values.tolist(), strict=True)]
            )
    return fillings[1:-1] if model.objective.expand_anchors else fillings


def fill_jointly(model: PretrainingModel, tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """For each [MASK] of `text`, in order, its token in the most probable filling of all of them together."""
    model.eval()
    tokens = predict_jointly(model, **masked_batch(model, tokenizer, text))[0].tolist()
    tokens = tokens[1:-1] if model.objective.expand_anchors else tokens
    return [_shown(tokenizer, token) for token in tokens]


def _shown(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as text; white space, which would not be seen, as it is written in code."""
    text = tokenizer.decode([token])
    return text.strip() or repr(text)
