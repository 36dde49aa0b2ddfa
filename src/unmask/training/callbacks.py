"""What a run shows while it goes on."""

from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer

SHOWN = {
    "loss": "loss {:.3f}",
    "learning_rate": "lr {:.1e}",
    "eval_loss": "eval loss {:.3f}",
    "eval_token_loss": "token loss {:.3f}",
    "eval_accuracy": "accuracy {:.1%}",
}


class CompactProgress(ProgressCallback):
    """A progress bar, and one short line for each log instead of a dictionary."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            shown = [form.format(logs[name]) for name, form in SHOWN.items() if logs and name in logs]
            if shown:
                self.training_bar.write(f"step {state.global_step:>7,}   " + "   ".join(shown))


def compact_progress(trainer: Trainer) -> None:
    """Replaces the stock progress bar, unless the user switched it off (`--disable_tqdm`)."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(CompactProgress)
    trainer.remove_callback(PrinterCallback)
