"""The three blocks: encoder, decoder, head, put together as the objective says.

    encoder input = visible tokens + masked positions x encoder_states
    decoder input = encoder output (visible) + masked positions x decoder_states      (only if decoder_layers > 0)
    prediction    = the hidden states of the masked block -> LM head -> loss

Nothing is interleaved: visible tokens come first, then the masked block, each token carrying its position.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.configuration_utils import SubConfigSpec
from transformers.utils import ModelOutput

from unmask.errors import UserError
from unmask.modeling.decoder import Decoder
from unmask.modeling.head import Head
from unmask.modeling.positions import encode, max_positions, position_offset, probe
from unmask.objectives import Objective, objective_from_dict

LOGIT_ROWS = 1024  # masked positions whose logits over the vocabulary are held at once in evaluation


@strict
class PretrainingConfig(PreTrainedConfig):
    """encoder: the config of a transformers encoder; objective: the fields of an `Objective`; max_length: tokens of a
    sequence with its boundary tokens; mask_token_id: the id of [MASK]."""

    model_type = "unmask"
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "encoder": SubConfigSpec(config_class=AutoConfig, model_type="modernbert")
    }

    encoder: PreTrainedConfig | dict | None = None
    objective: dict | None = None
    max_length: int = 128
    mask_token_id: int = 4
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        # The base class would forget how the encoder computes attention, and masks are built for that.
        kwargs.setdefault("attn_implementation", getattr(self.encoder, "_attn_implementation", None))
        super().__post_init__(**kwargs)

    @property
    def initializer_range(self) -> float:
        """Standard deviation of the decoder's initial weights: the encoder's."""
        return getattr(self.encoder, "initializer_range", 0.02)


@dataclass
class PretrainingOutput(ModelOutput):
    """loss: scalar, nats per target token; masked_states: [B, m, d], what the head predicts from."""

    loss: Tensor | None = None
    masked_states: Tensor | None = None


class PretrainingModel(PreTrainedModel):
    """An encoder, a decoder if the objective has one, and an LM head, trained on masked batches (`data.masking`).

    Raises `UserError` for an encoder that does not honour positions, or that has fewer of them than `max_length`.
    """

    config_class = PretrainingConfig
    main_input_name = "visible_ids"
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: PretrainingConfig, stock: PreTrainedModel | None = None) -> None:
        """stock: the encoder, with or without an MLM head, to continue from; None: a new one from `config.encoder`."""
        super().__init__(config)
        if stock is None:
            auto = AutoModelForMaskedLM if type(config.encoder) in MODEL_FOR_MASKED_LM_MAPPING else AutoModel
            stock = auto.from_config(config.encoder)
        self.objective: Objective = objective_from_dict(config.objective or {})
        self.encoder: PreTrainedModel = stock.base_model
        self.head = Head(config.encoder, None if stock is self.encoder else stock, self.token_table)
        self.decoder = self._new_decoder(config) if self.objective.decoder_layers else None
        self.offset = position_offset(self.encoder)
        self._check_lengths(config)
        self.post_init()
        if self.token_table.weight.device.type != "meta":  # a saved model was proved and started when it was made
            probe(self.encoder)
            if self.decoder is not None:
                self.decoder.start()

    @classmethod
    def from_encoder(
        cls,
        encoder: str,
        objective: Objective,
        *,
        mask_token_id: int,
        max_length: int,
        vocab_size: int | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Continue from a checkpoint (folder or Hub name), with its own MLM head where it has one.

        vocab_size: what the tokenizer needs; more than the checkpoint has raises `UserError`.
        """
        try:
            config = AutoConfig.from_pretrained(encoder, trust_remote_code=trust_remote_code)
            auto = AutoModelForMaskedLM if type(config) in MODEL_FOR_MASKED_LM_MAPPING else AutoModel
            stock = auto.from_pretrained(
                encoder, trust_remote_code=trust_remote_code, use_safetensors=True, dtype=torch.float32
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"No encoder could be loaded from '{encoder}' ({reason}): give a folder or a Hub name that "
                "transformers can load, with safetensors weights."
            ) from error
        if vocab_size is not None and vocab_size > stock.config.vocab_size:
            raise UserError(
                f"The tokenizer has {vocab_size} tokens but the checkpoint '{encoder}' has embeddings for "
                f"{stock.config.vocab_size}: use the checkpoint's own tokenizer, or train a new encoder."
            )
        config = PretrainingConfig(
            encoder=stock.config,
            objective=objective.to_dict(),
            max_length=max_length,
            mask_token_id=mask_token_id,
        )
        return cls(config, stock=stock)

    @property
    def token_table(self) -> torch.nn.Embedding:
        """The encoder's token embeddings [V, e], shared by the decoder's [MASK] input and the head."""
        return self.encoder.get_input_embeddings()

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.token_table

    def _new_decoder(self, config: PretrainingConfig) -> Decoder:
        assert isinstance(config.encoder, PreTrainedConfig)
        width = config.encoder.hidden_size
        size = self.objective.decoder_hidden_size or width
        heads = config.encoder.num_attention_heads
        if size % heads:
            raise UserError(
                f"decoder_hidden_size={size} does not divide among the encoder's {heads} attention heads: "
                f"choose a multiple of {heads}."
            )
        carried = self.objective.decoder_masked_input == "carry"
        return Decoder(
            size=size,
            encoder_size=width,
            masked_size=width if carried else self.token_table.embedding_dim,
            heads=heads,
            layers=self.objective.decoder_layers,
            max_length=config.max_length,
        )

    def _check_lengths(self, config: PretrainingConfig) -> None:
        limit = max_positions(self.encoder)
        if limit is not None and config.max_length > limit:
            raise UserError(
                f"max_length is {config.max_length} tokens, but {type(self.encoder).__name__} has positions for "
                f"{limit}: set max_length to {limit} or less."
            )

    def forward(
        self,
        visible_ids: Tensor,
        visible_positions: Tensor,
        masked_positions: Tensor,
        masked_inputs: Tensor,
        labels: Tensor,
        visible_mask: Tensor | None = None,
        masked_mask: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> PretrainingOutput:
        """Mean cross-entropy over the real targets, in nats; a masked batch in, shapes as in `data.masking`.

        num_items_in_batch: targets of the whole step, where this batch is one part of an accumulated gradient.
        """
        states = self.masked_states(
            visible_ids, visible_positions, masked_positions, masked_inputs, visible_mask, masked_mask
        )
        total = self.head.cross_entropy(states, labels, self.token_table)
        targets = labels.ne(-100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return PretrainingOutput(loss=total / targets, masked_states=states)

    def masked_states(
        self,
        visible_ids: Tensor,
        visible_positions: Tensor,
        masked_positions: Tensor,
        masked_inputs: Tensor,
        visible_mask: Tensor | None = None,
        masked_mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, m, d] of the masked block, from the decoder if there is one, else from the encoder."""
        v = visible_ids.shape[1]
        in_encoder = bool(self.objective.encoder_states)
        both_masks = _joined(visible_mask, masked_mask, visible_ids, masked_positions)
        ids = torch.cat([visible_ids, masked_inputs], dim=1) if in_encoder else visible_ids
        positions = torch.cat([visible_positions, masked_positions], dim=1) if in_encoder else visible_positions
        if self.objective.positions == "consecutive":
            positions = _ranks(positions, both_masks if in_encoder else visible_mask)
        hidden = encode(self.encoder, positions, both_masks if in_encoder else visible_mask, self.offset, input_ids=ids)
        if self.decoder is None:
            return hidden[:, v:]
        if self.objective.decoder_masked_input == "carry":
            masked = hidden[:, v:]
        else:
            mask_embedding = self.token_table.weight[self.config.mask_token_id]
            masked = mask_embedding.expand(*masked_positions.shape, -1)
        return self.decoder(hidden[:, :v], visible_positions, masked, masked_positions, both_masks)

    @torch.no_grad()
    def predict(self, **batch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The marginal predictions of the masked positions, `LOGIT_ROWS` at a time: (rows, log p [rows, V]).

        rows index the flattened [B x m] masked positions.
        """
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "num_items_in_batch")}
        states = self.masked_states(**inputs).flatten(0, 1)
        for rows in torch.arange(len(states), device=states.device).split(LOGIT_ROWS):
            yield rows, self.head.logits(states[rows], self.token_table).float().log_softmax(-1)

    @torch.no_grad()
    def score(self, labels: Tensor, **batch: Tensor) -> Tensor:
        """What evaluation sums, [B, 5]: targets, objective's loss, token loss, joint loss (nats), hits of the argmax.

        For a softmax per masked position the three losses are one.
        """
        flat = labels.flatten()
        loss, hits = torch.zeros(2, *flat.shape, device=labels.device)
        for rows, log_probabilities in self.predict(**batch):
            target = flat[rows].clamp(min=0)
            loss[rows] = -log_probabilities.gather(1, target[:, None])[:, 0]
            hits[rows] = (log_probabilities.argmax(-1) == target).float()
        real = labels.ne(-100)
        loss, hits = ((x.view(labels.shape) * real).sum(1) for x in (loss, hits))
        return torch.stack([real.sum(1).float(), loss, loss, loss, hits], dim=1)


def _joined(
    visible_mask: Tensor | None, masked_mask: Tensor | None, visible_ids: Tensor, masked_positions: Tensor
) -> Tensor | None:
    """Mask [B, v + m] of visible tokens and masked block; None where nothing is padded."""
    if visible_mask is None and masked_mask is None:
        return None
    parts = ((visible_mask, visible_ids), (masked_mask, masked_positions))
    return torch.cat([torch.ones_like(x, dtype=torch.bool) if m is None else m for m, x in parts], dim=1)


def _ranks(positions: Tensor, mask: Tensor | None) -> Tensor:
    """Consecutive numbers 0, 1, 2, ... in the order of `positions` [B, n]; padded ones come last."""
    last_first = positions if mask is None else positions.masked_fill(~mask, torch.iinfo(positions.dtype).max)
    return last_first.argsort(dim=1).argsort(dim=1)


AutoConfig.register(PretrainingConfig.model_type, PretrainingConfig)
AutoModel.register(PretrainingConfig, PretrainingModel)

__all__ = ["PretrainingConfig", "PretrainingModel", "PretrainingOutput"]
