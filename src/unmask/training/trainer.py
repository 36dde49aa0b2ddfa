"""The transformers Trainer on masked batches: fixed evaluation masks, whole checkpoints, corpus tokens counted."""

import json
import logging
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import EvalPrediction, PreTrainedTokenizerBase, Trainer, TrainerState

from unmask.data.masking import EpochSampler, MaskedBatches, MaskedRows, SequenceRows, Vocabulary
from unmask.errors import UserError
from unmask.modeling.flops import training_flops
from unmask.modeling.positions import encode
from unmask.modeling.prediction import score
from unmask.modeling.pretraining import PretrainingModel
from unmask.objectives import Objective
from unmask.training.arguments import PretrainingArguments
from unmask.training.callbacks import RankCallback, show_progress

logger = logging.getLogger("unmask")

EVALUATION = Objective()  # unit token, ratio 0.15, all [MASK]: the same for every objective
EVALUATION_SEED = 0  # and for every run
MANIFEST = "complete.json"
RANK_ROWS = 64  # evaluation rows whose rank is logged


class PretrainingTrainer(Trainer):
    """Trains a `PretrainingModel` on rows of ids (`Blocks` or `Rows`).

    Evaluation returns, per target token: `eval_loss` (the objective's own), `eval_token_loss` (log-loss of the marginal
    prediction), `eval_joint_loss`, all in nats, and `eval_accuracy` of the marginal prediction's argmax.
    """

    def __init__(
        self,
        model: PretrainingModel,
        args: PretrainingArguments,
        train_rows: SequenceRows,
        eval_rows: SequenceRows | None,
        tokenizer: PreTrainedTokenizerBase,
        **kwargs: Any,
    ) -> None:
        vocabulary = Vocabulary(tokenizer)
        seed = args.seed if args.data_seed is None else args.data_seed
        anchors = model.objective.expand_anchors
        super().__init__(
            model=model,
            args=args,
            train_dataset=MaskedRows(train_rows, model.objective, vocabulary, seed, anchors),
            eval_dataset=None
            if eval_rows is None
            else MaskedRows(eval_rows, EVALUATION, vocabulary, EVALUATION_SEED, anchors),
            data_collator=MaskedBatches(vocabulary.pad_id),
            compute_metrics=_metrics,
            processing_class=tokenizer,
            **kwargs,
        )
        if args.torch_compile:
            model.compile_layers()
        show_progress(self)
        if eval_rows is not None:
            self.add_callback(RankCallback(_full(eval_rows), self._encoded, self.log))
        self._idle_seconds = self._started = 0.0
        self._seconds_before: float | None = None  # of a run that is resumed
        self._last_log: tuple[float, int] | None = None  # seconds, tokens
        self._saving_to: str | None = None
        self.tokens_per_second: float | None = None

    # --- data ---------------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        rows: MaskedRows = self.train_dataset
        batch = self.args.train_batch_size * self.args.world_size
        return EpochSampler(rows.rows.lengths, batch, rows.seed)

    def _track_num_input_tokens(self, inputs: dict[str, torch.Tensor]) -> None:
        """Counts corpus tokens, visible and masked, never states or padding."""
        parts = (("visible_ids", "visible_mask"), ("labels", "masked_mask"))
        tokens = sum(inputs[mask].sum() if mask in inputs else inputs[ids].numel() for ids, mask in parts)
        tokens = torch.as_tensor(tokens, device=self.args.device)
        self.state.num_input_tokens_seen += int(self.accelerator.gather(tokens).sum())

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """FLOPs of a step on one process, by formula (`modeling.flops`); padding is computed too."""
        model = self.accelerator.unwrap_model(self.model)
        (batch, visible), masked = inputs["visible_ids"].shape, inputs["labels"].shape[1]
        return round(batch * training_flops(model, visible, masked).total)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """The sums of `prediction.score`, [B, 5], in the place of logits."""
        inputs = self._prepare_inputs(inputs)
        with self.accelerator.autocast():
            scores = score(self.accelerator.unwrap_model(model), **inputs)
        return None, scores, scores[:, 0]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        start = time.perf_counter()
        metrics = super().evaluate(*args, **kwargs)
        self._idle_seconds += time.perf_counter() - start
        return metrics

    def _encoded(self, ids: torch.Tensor) -> torch.Tensor:
        """The encoder's last hidden states [B, L, d] of whole sequences [B, L], without [MASK]."""
        model = self.accelerator.unwrap_model(self.model)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        with self.accelerator.autocast():
            return encode(model.encoder, positions, None, model.offset, input_ids=ids)

    # --- speed --------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the corpus tokens per second since the last log of the training loss."""
        for name in ("loss", "eval_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise UserError(
                    f"{name} is {logs[name]} at step {self.state.global_step}: training has diverged; lower "
                    f"learning_rate ({self.args.learning_rate:g}) or max_grad_norm, and start again or from an earlier "
                    "checkpoint."
                )
        if "loss" in logs:
            now, tokens = time.perf_counter() - self._idle_seconds, self.state.num_input_tokens_seen
            if self._last_log is not None:
                logs["tokens_per_second"] = (tokens - self._last_log[1]) / (now - self._last_log[0])
            self._last_log = now, tokens
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; sets `tokens_per_second`: corpus tokens over the time not spent evaluating or saving."""
        self._idle_seconds, self._last_log, self._started = 0.0, None, time.perf_counter()
        self._seconds_before = None
        output = super().train(*args, **kwargs)
        tokens = self.state.num_input_tokens_seen - self._initial_num_input_tokens_seen
        self.tokens_per_second = tokens / (time.perf_counter() - self._started - self._idle_seconds)
        return output

    def restore(self, checkpoint: str) -> None:
        """Weights and state of a checkpoint, without training on."""
        self._load_from_checkpoint(checkpoint)
        self.state = TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json")))
        self.tokens_per_second = None

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return self._saving_to or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Writes the checkpoint beside its place, with a manifest, and moves it there: whole or not at all.

        Its history ends with the seconds of training until here, without those of evaluating and saving.
        """
        start = time.perf_counter()
        if self._seconds_before is None:
            self._seconds_before = training_seconds(self.state)
        seconds = self._seconds_before + start - self._started - self._idle_seconds
        self.state.log_history.append({"step": self.state.global_step, "training_seconds": seconds})
        name = f"checkpoint-{self.state.global_step}"
        final = Path(self.args.output_dir) / name
        staging = Path(self.args.output_dir) / ".incomplete"
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self._saving_to = str(staging)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving_to = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            written = staging / name
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(final)
                self.state.save_to_json(str(written / "trainer_state.json"))
            (written / "training_args.bin").unlink(missing_ok=True)  # a pickle that nothing here would read
            write_manifest(written)
            shutil.rmtree(final, ignore_errors=True)
            written.rename(final)
            staging.rmdir()
            self._rotate()
        self.accelerator.wait_for_everyone()
        self._idle_seconds += time.perf_counter() - start

    def _rotate(self) -> None:
        limit = self.args.save_total_limit
        if limit is not None:
            best = self.state.best_model_checkpoint
            for old in checkpoints(Path(self.args.output_dir))[: -max(limit, 1)]:
                if str(old) != best:
                    shutil.rmtree(old)


def training_seconds(state: TrainerState) -> float:
    """Seconds of training until the last checkpoint, without those of evaluating and saving; of the whole run."""
    return next((log["training_seconds"] for log in reversed(state.log_history) if "training_seconds" in log), 0.0)


def _full(rows: SequenceRows) -> torch.Tensor:
    """The longest rows [B, L] among the first 64, all of one length."""
    first = [rows[i] for i in range(min(len(rows), RANK_ROWS))]
    longest = max(len(row) for row in first)
    return torch.from_numpy(np.stack([row for row in first if len(row) == longest]).astype(np.int64))


def _metrics(prediction: EvalPrediction) -> dict[str, float]:
    targets, *sums = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    return dict(zip(("loss", "token_loss", "joint_loss", "accuracy"), (s / max(targets, 1) for s in sums), strict=True))


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    found = [p for p in run.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")))


def write_manifest(folder: Path) -> None:
    """Sizes and hashes of all files of a checkpoint; all of it reaches the disk before this returns."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    manifest = {str(p.relative_to(folder)): _fingerprint(p) for p in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*files, folder / MANIFEST, folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint has every file of its manifest, byte for byte."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all(_fingerprint(folder / name) == expected for name, expected in manifest.items())
    except (OSError, ValueError):
        return False


def newest_complete(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None; damaged ones are named in a warning and passed over."""
    for folder in reversed(checkpoints(run)):
        if is_complete(folder):
            return folder
        logger.warning("%s is damaged or incomplete and is passed over.", folder)
    return None


def find_checkpoint(run: Path) -> Path:
    """The newest complete checkpoint of a run folder, or the checkpoint folder itself; `UserError` if there is none."""
    if (run / "config.json").is_file() and (run / MANIFEST).is_file():
        if not is_complete(run):
            raise UserError(f"The checkpoint '{run}' is damaged: choose an older one.")
        return run
    if (run / "config.json").is_file():
        raise UserError(
            f"'{run}' is a stock checkpoint, without the decoder and the head that predict: give the output_dir of the "
            "`unmask pretrain` run that it came from."
        )
    found = newest_complete(run) if run.is_dir() else None
    if found is None:
        raise UserError(f"'{run}' holds no complete checkpoint: give the output_dir of an `unmask pretrain` run.")
    return found


def _fingerprint(path: Path) -> list[Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return [path.stat().st_size, digest.hexdigest()]
