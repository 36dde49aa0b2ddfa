"""What a run shows while it goes on."""

from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

SHOWN = {
    "loss": "loss {:.3f}",
    "learning_rate": "lr {:.1e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "eval_loss": "eval loss {:.3f}",
    "eval_token_loss": "token loss {:.3f}",
    "eval_accuracy": "accuracy {:.1%}",
}


class Bar(ProgressCallback):
    """The progress bar, without the dictionaries."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


class Lines(TrainerCallback):
    """One short line for each log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        shown = [form.format(logs[name]) for name, form in SHOWN.items() if logs and name in logs]
        if shown and state.is_world_process_zero:
            tqdm.write(f"step {state.global_step:>7,}   " + "   ".join(shown))


def show_progress(trainer: Trainer) -> None:
    """Replaces the stock callbacks, whose logs are dictionaries; no bar where the user switched it off."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(Bar)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Lines)
