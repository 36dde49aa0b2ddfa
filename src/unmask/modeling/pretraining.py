"""The three blocks: encoder, decoder, head, put together as the objective says.

    encoder input = visible tokens + masked positions x encoder_states
    decoder input = encoder output (visible) + masked positions x decoder_states      (only if decoder_layers > 0)
    prediction    = the hidden states of the masked block -> LM head -> loss

Nothing is interleaved: visible tokens come first, then the masked block, each token carrying its position. With k > 1
states the masked block is k times as long, and the loss sums over all alignments of states to targets (ExLM).
"""

import contextlib
import dataclasses
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

from unmask.alignment import log_likelihood, single_label
from unmask.errors import UserError
from unmask.modeling import cpu, relative, rotary
from unmask.modeling.decoder import Decoder, gather_rows
from unmask.modeling.head import Head
from unmask.modeling.positions import encode, max_positions, position_offset, probe
from unmask.modeling.transitions import Transitions
from unmask.modeling.vertices import Vertices, expand, state_numbers, vertices_of
from unmask.objectives import Objective, objective_from_dict


@strict
class PretrainingConfig(PreTrainedConfig):
    """encoder: the config of a transformers encoder; objective: the fields of an `Objective`; max_length: tokens of a
    sequence with its boundary tokens; mask_token_id: the id of [MASK]; blank_token_id: [UNK], CTC's blank."""

    model_type = "unmask"
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "encoder": SubConfigSpec(config_class=AutoConfig, model_type="modernbert")
    }

    encoder: PreTrainedConfig | dict | None = None
    objective: dict | None = None
    max_length: int = 128
    mask_token_id: int = 4
    blank_token_id: int | None = None
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
    """loss: scalar, nats per target token; masked_states: [B, m, d], or [B, S, d] vertices, what is predicted from."""

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
        self.has_new_head = stock is None
        self.objective: Objective = objective_from_dict(config.objective or {})
        if stock is None:
            stock = self._new_stock(config)
        self.encoder: PreTrainedModel = stock.base_model
        relative.install(self.encoder, self.objective.relative_positions)
        cpu.install(self.encoder)
        self.state_embeddings: torch.nn.Embedding | None = None
        self._tell_states_apart(config)
        self.head = Head(config.encoder, None if stock is self.encoder else stock, self.token_table)
        self.decoder = self._new_decoder(config) if self.objective.decoder_layers else None
        self.transitions = self._new_transitions(config) if self.objective.aligned else None
        self.offset = position_offset(self.encoder)
        self._check(config)
        self.post_init()
        if not self._is_loaded:
            probe(self.encoder)
            for new in (self.decoder, self.transitions):
                if new is not None:
                    new.start()

    @classmethod
    def from_encoder(
        cls,
        encoder: str,
        objective: Objective,
        *,
        mask_token_id: int,
        max_length: int,
        blank_token_id: int | None = None,
        vocab_size: int | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Continue from a checkpoint (folder or Hub name), with its own MLM head where it has one.

        vocab_size: what the tokenizer needs; more than the checkpoint has raises `UserError`.
        """
        try:
            config = AutoConfig.from_pretrained(encoder, trust_remote_code=trust_remote_code)
            if isinstance(config, PretrainingConfig):
                raise UserError(
                    f"'{encoder}' is a checkpoint of a pretraining run: continue from the stock encoder of that run, "
                    "in the folder encoder beside it, or resume the run."
                )
            auto = AutoModelForMaskedLM if type(config) in MODEL_FOR_MASKED_LM_MAPPING else AutoModel
            stock, info = auto.from_pretrained(
                encoder,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
        except UserError:
            raise
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
            blank_token_id=blank_token_id,
        )
        model = cls(config, stock=stock)
        prefix = f"{stock.base_model_prefix}."
        model.has_new_head = stock is stock.base_model or any(
            not name.startswith(prefix) for name in info["missing_keys"]
        )
        return model

    @property
    def token_table(self) -> torch.nn.Embedding:
        """The encoder's token embeddings [V, e], shared by the decoder's [MASK] input and the head."""
        return self.encoder.get_input_embeddings()

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.token_table

    def compile_layers(self, **options: Any) -> None:
        """`torch.compile(**options)` for each layer of encoder and decoder by itself; layers alike share the result."""
        for layer in _layers(self):
            layer.compile(**options)

    @property
    def _is_loaded(self) -> bool:
        """Whether a saved model is being built, which was proved and started when it was made."""
        return self.token_table.weight.device.type == "meta"

    def _new_stock(self, config: PretrainingConfig) -> PreTrainedModel:
        """The stock model of `config.encoder`, with its MLM head; ready for 2-D positions if it can be."""
        two_dimensional = self.objective.encoder_states > 1 and self.objective.state_positions in ("auto", "rotary")
        if two_dimensional:
            config.encoder = rotary.two_dimensional(config.encoder)
        auto = AutoModelForMaskedLM if type(config.encoder) in MODEL_FOR_MASKED_LM_MAPPING else AutoModel
        stock = auto.from_config(config.encoder)
        if two_dimensional:
            rotary.write_frequencies(stock.base_model)
        return stock

    def _tell_states_apart(self, config: PretrainingConfig) -> None:
        """Decides for `state_positions=auto`, and puts 2-D rotary positions or a table of states into the encoder."""
        chosen = self.objective.state_positions
        if chosen == "auto" and max(self.objective.states, self.objective.encoder_states) > 1:
            turns = self.objective.encoder_states > 1 and rotary.agrees(self.encoder)
            chosen = "rotary" if turns else "embedding"
            self.objective = dataclasses.replace(self.objective, state_positions=chosen)
            config.objective = self.objective.to_dict()
        if chosen == "rotary":
            agreed = self._is_loaded or rotary.agrees(self.encoder)
            rotary.install(self.encoder)
            if not agreed:
                raise UserError(
                    f"state_positions=rotary would change what {type(self.encoder).__name__} computes, because it was "
                    "trained with another rotary scheme: set state_positions=embedding."
                )
        if chosen == "embedding" and self.objective.encoder_states > 1:
            self.state_embeddings = torch.nn.Embedding(self.objective.encoder_states, self.token_table.embedding_dim)

    def _new_transitions(self, config: PretrainingConfig) -> Transitions:
        assert isinstance(config.encoder, PreTrainedConfig)
        objective = self.objective
        return Transitions(
            size=config.encoder.hidden_size,
            heads=config.encoder.num_attention_heads,
            places=objective.states * config.max_length,
            prior=objective.transition_prior,
            max_jump=objective.max_jump,
        )

    def _new_decoder(self, config: PretrainingConfig) -> Decoder:
        assert isinstance(config.encoder, PreTrainedConfig)
        width = config.encoder.hidden_size
        wanted = self.objective.decoder_hidden_size or 1.0
        size = round(wanted * width) if wanted <= 1 else round(wanted)
        heads = config.encoder.num_attention_heads
        if size % heads:
            raise UserError(
                f"decoder_hidden_size={size} does not divide among the encoder's {heads} attention heads: "
                f"choose a multiple of {heads}."
            )
        carried = self.objective.decoder_masked_input == "carry"
        k = self.objective.decoder_states
        return Decoder(
            size=size,
            encoder_size=width,
            masked_size=width if carried else self.token_table.embedding_dim,
            heads=heads,
            layers=self.objective.decoder_layers,
            max_length=config.max_length,
            attention=self.objective.decoder_attention,
            states=k if k > 1 and self.objective.state_positions != "none" else 0,
        )

    def _check(self, config: PretrainingConfig) -> None:
        if self.objective.states > 1 and not self.objective.aligned and config.blank_token_id is None:
            raise UserError(
                "transitions=none needs an unknown token as CTC's blank, but the tokenizer has none: use another one, "
                "or dense transitions."
            )
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
        """The objective's loss in nats per target; a masked batch in, shapes as in `data.masking`.

        With one state, the cross-entropy; with k, Σ -log Z over the sequences (ExLM §3); anchors are not targets.
        num_items_in_batch: targets of the whole step, where this batch is one part of an accumulated gradient.
        """
        batch = (visible_ids, visible_positions, masked_positions, masked_inputs, visible_mask, masked_mask)
        states = self.masked_states(*batch)
        if self.objective.states == 1:
            total = self.head.cross_entropy(states, labels, self.token_table)
        elif self.transitions is None:
            total = -self._position_by_position(states, labels)[labels != -100].sum()
        else:
            vertices = self.vertices(visible_positions, masked_positions, visible_mask, masked_mask)
            match = vertices.match(self.head.emissions(vertices.emitting(states), labels, self.token_table))
            links = self.transitions(states, vertices)
            total = -log_likelihood(match, links, vertices.targets, vertices.lengths).sum().to(states.dtype)
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
        """Hidden states that are predicted from, of the decoder if there is one, else of the encoder.

        [B, m, d] with one state per masked position; with k, those of the vertices [B, S, d], anchors included, or
        without transitions [B, m k, d].
        """
        objective, v = self.objective, visible_ids.shape[1]
        vertices = None
        if objective.aligned:
            vertices = self.vertices(visible_positions, masked_positions, visible_mask, masked_mask)
        hidden = self._encode(
            visible_ids, visible_positions, masked_positions, masked_inputs, visible_mask, masked_mask
        )
        if self.decoder is None:
            return hidden[:, v:] if vertices is None else gather_rows(hidden, vertices.where)
        k = objective.decoder_states
        positions = expand(masked_positions, k)
        if objective.decoder_masked_input == "carry":
            masked = hidden[:, v:]
        else:
            masked = self.token_table.weight[self.config.mask_token_id].expand(*positions.shape, -1)
        return self.decoder(
            hidden[:, :v],
            visible_positions,
            masked,
            positions,
            _joined(visible_mask, masked_mask, visible_ids, masked_positions, k),
            state_numbers(masked_positions, k),
            None if vertices is None else vertices.where,
        )

    def _encode(
        self,
        visible_ids: Tensor,
        visible_positions: Tensor,
        masked_positions: Tensor,
        masked_inputs: Tensor,
        visible_mask: Tensor | None,
        masked_mask: Tensor | None,
    ) -> Tensor:
        """The encoder's output [B, v + m x encoder_states, d]."""
        k = self.objective.encoder_states
        ids = torch.cat([visible_ids, expand(masked_inputs, k)], dim=1)
        positions = torch.cat([visible_positions, expand(masked_positions, k)], dim=1)
        mask = _joined(visible_mask, masked_mask, visible_ids, masked_positions, k)
        if self.objective.positions == "consecutive":
            positions = torch.arange(visible_ids.shape[1], device=positions.device).expand_as(visible_ids)
        numbers = None
        if k > 1:
            numbers = torch.cat([torch.zeros_like(visible_ids), state_numbers(masked_positions, k)], dim=1)
        turned = numbers if self.objective.state_positions == "rotary" else None
        with self._added_to_tokens(numbers):
            return encode(self.encoder, positions, mask, self.offset, turned, input_ids=ids)

    def _added_to_tokens(self, numbers: Tensor | None) -> contextlib.AbstractContextManager:
        """Adds the states' embeddings where the encoder looks up its tokens' (numbers [B, n]; 0: nothing to add).

        A hook, because not every family takes `inputs_embeds`, and some of them skip positions or norms then.
        """
        table = self.state_embeddings
        if table is None or numbers is None:
            return contextlib.nullcontext()
        added = table((numbers - 1).clamp(min=0)) * (numbers > 0)[:, :, None]
        return self.token_table.register_forward_hook(lambda module, args, output: output + added)

    def _position_by_position(self, states: Tensor, labels: Tensor) -> Tensor:
        """log P(y_t) [B, m] of each position's k states [B, m k, d] by CTC, the unknown token being the blank."""
        own = states.unflatten(1, (labels.shape[1], -1)).flatten(0, 1)
        pairs = torch.stack([labels, torch.full_like(labels, self.config.blank_token_id)], dim=-1).flatten(0, 1)
        label, blank = self.head.emissions(own, pairs, self.token_table).unbind(1)
        return single_label(label, blank).view_as(labels)

    def vertices(
        self,
        visible_positions: Tensor,
        masked_positions: Tensor,
        visible_mask: Tensor | None = None,
        masked_mask: Tensor | None = None,
        **_: Tensor,
    ) -> Vertices:
        """Where the vertices of a masked batch stand, k > 1; what else the batch holds does not matter."""
        k, anchors = self.objective.states, self.objective.expand_anchors
        return vertices_of(visible_positions, masked_positions, visible_mask, masked_mask, k, anchors)


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The members of its outermost module lists."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def _joined(
    visible_mask: Tensor | None, masked_mask: Tensor | None, visible_ids: Tensor, masked_positions: Tensor, k: int
) -> Tensor | None:
    """Mask [B, v + m k] of visible tokens and masked block; None where nothing is padded."""
    if visible_mask is None and (masked_mask is None or k == 0):
        return None
    parts = ((visible_mask, visible_ids, 1), (masked_mask, masked_positions, k))
    return torch.cat([expand(torch.ones_like(x, dtype=torch.bool) if m is None else m, n) for m, x, n in parts], dim=1)


AutoConfig.register(PretrainingConfig.model_type, PretrainingConfig)
AutoModel.register(PretrainingConfig, PretrainingModel)

__all__ = ["PretrainingConfig", "PretrainingModel", "PretrainingOutput"]
