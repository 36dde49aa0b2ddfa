"""Two processes see the masks of one and train the same model (gloo, CPU)."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from test_training import SMALL

SCRIPT = """
import hashlib, json, os, sys, torch
torch.set_num_threads(1)
from unmask import pretrain
from unmask.training import trainer
settings, log = json.loads(sys.argv[1]), sys.argv[2]
step = trainer.PretrainingTrainer.training_step

def training_step(self, model, inputs, *args):
    rank = int(os.environ.get("RANK", 0))
    rows = [[ids.tolist(), places.tolist()] for ids, places in zip(inputs["labels"], inputs["masked_positions"])]
    with open(f"{log}-{rank}.jsonl", "a") as file:
        file.write(json.dumps([self.state.global_step, rows]) + "\\n")
    return step(self, model, inputs, *args)

trainer.PretrainingTrainer.training_step = training_step
pretrain(**settings)
"""


@pytest.mark.parametrize("objective", ["mlm", "exlm"])
def test_two_processes_train_as_one(objective, corpus_file, tokenizer_folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    common = {
        **SMALL,
        "objective": objective,
        "data": [str(corpus_file)],
        "tokenizer": str(tokenizer_folder),
        "cache_dir": str(tmp_path / "cache"),
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "eval_strategy": "no",
        "learning_rate": 1e-2,
        "set": ["mask_ratio_high=0.4"],
    }
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29517"]
    for name, command, size in (("one", [sys.executable], 4), ("two", launch, 2)):
        settings = {**common, "per_device_train_batch_size": size, "output_dir": str(tmp_path / name)}
        settings |= {"ddp_backend": "gloo"} if name == "two" else {}
        done = subprocess.run(
            [*command, str(script), json.dumps(settings), str(tmp_path / f"log-{name}")],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    def batches(name: str) -> dict[int, list]:
        """The masked rows of each optimizer step, in any order."""
        steps: dict[int, list] = {}
        for path in sorted(tmp_path.glob(f"log-{name}-*.jsonl")):
            for step, rows in map(json.loads, path.read_text().splitlines()):
                steps.setdefault(step, []).extend(rows)
        return {step: sorted(map(str, rows)) for step, rows in steps.items()}

    assert batches("one") == batches("two")
    assert len(batches("one")) == 3
    losses = []
    for name in ("one", "two"):
        state = json.loads((tmp_path / name / "checkpoint-3" / "trainer_state.json").read_text())
        losses.append([entry["loss"] for entry in state["log_history"] if "loss" in entry])
        assert state["num_input_tokens_seen"] == 3 * 8 * 32
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    weights = [load_file(tmp_path / name / "encoder" / "model.safetensors") for name in ("one", "two")]
    for key in weights[0]:
        torch.testing.assert_close(weights[0][key], weights[1][key], atol=1e-4, rtol=1e-3)
