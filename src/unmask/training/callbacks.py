"""What a run shows while it goes on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from unmask.analysis.rank import Moments, rank_at, singular_values

SHOWN = {
    "loss": "loss {:.3f}",
    "learning_rate": "lr {:.1e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "eval_loss": "eval loss {:.3f}",
    "eval_token_loss": "token loss {:.3f}",
    "eval_accuracy": "accuracy {:.1%}",
    "real_token_rank": "real tokens' rank {:.0f}",
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


class RankCallback(TrainerCallback):
    """Logs `real_token_rank`, the effective rank of the last layer on fixed sequences without [MASK], at evaluations.

    MAE-LM's figure 3: the curve of a pretraining or a fine-tuning. ids: [B, L], whole sequences; hidden: the last
    hidden states [B, L, d] of the model that is trained; log: takes {name: value}, as `Trainer.log` does.
    """

    def __init__(
        self, ids: Tensor, hidden: Callable[[Tensor], Tensor], log: Callable[[dict[str, float]], None]
    ) -> None:
        self.ids, self.hidden, self.log = ids, hidden, log

    @torch.no_grad()
    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        moments: Moments | None = None
        training = model.training
        model.eval()
        for part in self.ids.split(32):
            hidden = self.hidden(part.to(model.device))
            moments = moments or Moments(hidden.shape[-1])
            moments.add(hidden.flatten(0, 1))
        model.train(training)
        assert moments is not None
        moments.end_group()
        self.log({"real_token_rank": float(rank_at(singular_values(moments.moment())))})


def show_progress(trainer: Trainer) -> None:
    """Replaces the stock callbacks, whose logs are dictionaries; no bar where the user switched it off."""
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(Bar)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Lines)
