"""What the machine computes with."""

from typing import Any

import torch


def has_bf16() -> bool:
    """Whether the machine multiplies bfloat16 matrices faster than float32 ones.

    On a CPU that takes AMX: with AVX512_BF16 alone, bfloat16 was measured at 0.55 times float32's speed.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported()


def device() -> torch.device:
    """Where a model runs that no Trainer places."""
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def trainer_defaults(bf16: bool | None = None, fp16: bool = False) -> dict[str, Any]:
    """`TrainingArguments` that depend on the machine: bfloat16 where it is faster, no pinned memory without CUDA."""
    chosen: dict[str, Any] = {"bf16": (not fp16 and has_bf16()) if bf16 is None else bf16}
    if chosen["bf16"] and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        chosen["use_cpu"] = True  # transformers asks for this before it computes in bfloat16 on a CPU
    if not torch.cuda.is_available():
        chosen["dataloader_pin_memory"] = False
    return chosen
