"""Fill the [MASK]s of a text by a run's marginal predictions."""

from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from unmask.errors import UserError
from unmask.modeling.pretraining import PretrainingModel


class Filling(NamedTuple):
    """A candidate for one masked position: its token as text, and its probability."""

    token: str
    probability: float


def masked_batch(model: PretrainingModel, tokenizer: PreTrainedTokenizerBase, text: str) -> dict[str, torch.Tensor]:
    """A text with [MASK]s as a masked batch of one sequence, without labels. Raises `UserError` if it cannot be one."""
    ids = torch.tensor(tokenizer(text)["input_ids"])
    masked = ids == tokenizer.mask_token_id
    if not masked.any():
        raise UserError(
            f"The text holds no {tokenizer.mask_token}: write {tokenizer.mask_token} where a token is missing."
        )
    if len(ids) > model.config.max_length:
        raise UserError(
            f"The text has {len(ids)} tokens but the model was trained on {model.config.max_length}: shorten it."
        )
    places = torch.arange(len(ids))
    return {
        "visible_ids": ids[~masked][None],
        "visible_positions": places[~masked][None],
        "masked_positions": places[masked][None],
        "masked_inputs": ids[masked][None],
    }


def fill(model: PretrainingModel, tokenizer: PreTrainedTokenizerBase, text: str, top_k: int = 5) -> list[list[Filling]]:
    """For each [MASK] of `text`, in order, its `top_k` most probable tokens."""
    model.eval()
    fillings = []
    for _, log_probabilities in model.predict(**masked_batch(model, tokenizer, text)):
        for values, ids in zip(*log_probabilities.exp().topk(min(top_k, log_probabilities.shape[-1])), strict=True):
            fillings.append(
                [Filling(tokenizer.decode([i]).strip(), p) for i, p in zip(ids.tolist(), values.tolist(), strict=True)]
            )
    return fillings
