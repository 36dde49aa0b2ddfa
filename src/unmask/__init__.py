"""unmask: masked pretraining that keeps the artificial [MASK] token from harming the encoder."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unmask.training.pretrain import pretrain

__all__ = ["pretrain"]


def __getattr__(name: str) -> Any:
    """`unmask.pretrain`, imported when it is asked for: it brings torch and transformers along."""
    if name == "pretrain":
        from unmask.training.pretrain import pretrain

        return pretrain
    raise AttributeError(f"module 'unmask' has no attribute '{name}'")
