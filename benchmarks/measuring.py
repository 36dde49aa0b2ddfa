"""What the benchmarks share: encoders, batches, training steps, the machine's peak, and memory by kind."""

import platform
import statistics
import time
import weakref
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForMaskedLM, BertConfig, ModernBertConfig, PreTrainedConfig

from unmask.data.masking import MaskedBatches, MaskedRows, Vocabulary
from unmask.devices import has_bf16
from unmask.modeling.flops import training_flops
from unmask.modeling.pretraining import PretrainingConfig, PretrainingModel
from unmask.objectives import get_objective

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASK, BLANK, SPECIAL = 4, 5, 6  # [PAD] 0, [CLS] 2, [SEP] 3


def encoder_config(model_type: str, layers: int, width: int, vocab_size: int, length: int) -> PreTrainedConfig:
    """An encoder with its family's own dropout: ModernBERT 0, BERT 0.1."""
    shared = {"vocab_size": vocab_size, "hidden_size": width, "num_hidden_layers": layers, "pad_token_id": 0}
    shared |= {"num_attention_heads": max(2, width // 64), "max_position_embeddings": length}
    if model_type == "bert":
        return BertConfig(**shared, intermediate_size=4 * width)
    return ModernBertConfig(
        **shared,
        intermediate_size=-(-8 * width // 3 // 64) * 64,
        layer_types=["full_attention"] * layers,
        bos_token_id=2,
        eos_token_id=3,
        cls_token_id=2,
        sep_token_id=3,
    )


class Ids(Vocabulary):
    """A vocabulary without a tokenizer."""

    def __init__(self, size: int) -> None:
        self.size, self.mask_id, self.pad_id = size, MASK, 0
        self.special, self.ordinary = np.arange(size) < SPECIAL, np.arange(SPECIAL, size)


class Step:
    """A training step, forward, backward and AdamW, of `objective`, or of the stock masked language model.

    stock: what `run_mlm.py` runs, `AutoModelForMaskedLM` on whole sequences with logits for every token, SDPA. All have
    the same sequences and masks, and compute under autocast in bfloat16 where the machine has it.
    """

    def __init__(
        self,
        objective: str,
        *,
        model_type: str = "modernbert",
        layers: int = 6,
        width: int = 256,
        vocab_size: int = 16384,
        batch: int = 32,
        length: int = 128,
        **fields: Any,
    ) -> None:
        torch.manual_seed(0)
        encoder = encoder_config(model_type, layers, width, vocab_size, length)
        chosen = get_objective("mlm" if objective == "stock" else objective, **fields)
        ids = np.random.default_rng(0).integers(SPECIAL, vocab_size, (batch, (length - 2) // chosen.repeat))
        rows = [np.array([2, *row, 3]) for row in ids.tolist()]
        masked = MaskedRows(rows, chosen, Ids(vocab_size), 0, chosen.expand_anchors)
        batches = MaskedBatches(0)([masked[i] for i in range(batch)])
        config = PretrainingConfig(
            encoder=encoder,
            objective=chosen.to_dict(),
            max_length=length,
            mask_token_id=MASK,
            blank_token_id=BLANK,
        )
        ours = PretrainingModel(config)
        m = int(batches["labels"].ne(-100).sum()) - (2 * batch if chosen.expand_anchors else 0)
        self.tokens, self.targets = batch * length, m
        flops = training_flops(ours, batches["visible_ids"].shape[1], batches["labels"].shape[1])
        if objective == "stock":  # the head reads every token
            flops = flops._replace(head=flops.head * length / batches["labels"].shape[1])
            torch.manual_seed(0)  # the weights that ours began with
            self.model = AutoModelForMaskedLM.from_config(encoder_config(model_type, layers, width, vocab_size, length))
            whole = torch.from_numpy(np.stack(rows))
            labels = torch.full_like(whole, -100).scatter(1, batches["masked_positions"], batches["labels"])
            inputs = whole.scatter(1, batches["masked_positions"], batches["masked_inputs"])
            batches = {"input_ids": inputs, "attention_mask": torch.ones_like(whole), "labels": labels}
        else:
            self.model = ours
        self.flops, self.parts = flops.total * batch, flops
        self.model.to(DEVICE).train()
        self.batch = {name: tensor.to(DEVICE) for name, tensor in batches.items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def forward(self) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=has_bf16()):
            return self.model(**self.batch).loss

    def __call__(self) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def in_turns(steps: dict[str, Any], repeats: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each step, all of them in turns, so that all see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + warm_up):
        for name, step in steps.items():
            took = step()
            if repeat >= warm_up:
                seconds[name].append(took)
    return seconds


def ratios(over: list[float], under: list[float]) -> list[float]:
    """[least, median, largest] ratio of measurements that were taken in turns."""
    pairs = [a / b for a, b in zip(over, under, strict=True)]
    return [min(pairs), statistics.median(pairs), max(pairs)]


def matmul_peak(seconds: float = 3.0) -> float:
    """FLOP/s of the fastest matrix product in a few seconds, in the type that training computes in."""
    dtype, best = torch.bfloat16 if has_bf16() else torch.float32, 0.0
    sizes = (1024, 2048, *((4096, 8192) if DEVICE == "cuda" else ()))
    for n in sizes:
        x, begin = torch.randn(n, n, device=DEVICE).to(dtype), time.perf_counter()
        while time.perf_counter() - begin < seconds / len(sizes):
            start = time.perf_counter()
            x @ x
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best


def machine() -> dict[str, str]:
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "machine": torch.cuda.get_device_name() if DEVICE == "cuda" else cpu,
        "type": "bfloat16 autocast" if has_bf16() else "float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class Activations(TorchDispatchMode):
    """The most bytes at once that a step holds beside its weights: `peak`.

    What has the shape of a weight, its gradient or its copy in another type, is left out.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.weights = {p.shape for p in model.parameters()} | {p.shape[::-1] for p in model.parameters()}
        self.held = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.held:
                storage = tensor.untyped_storage()
                size = 0 if tensor.shape in self.weights else storage.nbytes()
                self.held.add(storage.data_ptr())
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage.data_ptr(), size)
        return result

    def _free(self, pointer: int, size: int) -> None:
        self.held.discard(pointer)
        self.now -= size


def activation_bytes(step: Step) -> int:
    """Of a forward and a backward pass."""
    with Activations(step.model) as watch:
        step.forward().backward()
    step.optimizer.zero_grad()
    return watch.peak
