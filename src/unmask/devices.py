"""What the machine computes with."""

import time
from functools import cache
from typing import Any

import torch


@cache
def has_bf16() -> bool:
    """Whether the machine multiplies bfloat16 matrices clearly faster than float32 ones.

    Of CPUs with AVX512_BF16 one was measured at 0.55 times float32's speed and one at 4.5 times: so it is measured.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()):
        return False
    return _seconds_of_product(torch.float32) > 1.5 * _seconds_of_product(torch.bfloat16)


def _seconds_of_product(dtype: torch.dtype) -> float:
    """The least of five products of matrices [768, 768]."""
    x = torch.ones(768, 768, dtype=dtype)  # no random ones: a seed's numbers are the training's
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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
