import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModel

from unmask import pretrain
from unmask.analysis.rank import effective_rank
from unmask.data.corpus import open_corpus
from unmask.data.masking import MaskedRows, Vocabulary
from unmask.data.packing import Blocks, tokenize
from unmask.data.tokenizers import load_tokenizer, train_tokenizer
from unmask.errors import UserError
from unmask.objectives import Objective
from unmask.training import trainer
from unmask.training.callbacks import RankCallback
from unmask.training.trainer import checkpoints, find_checkpoint, is_complete, newest_complete

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "max_length": 32,
    "per_device_train_batch_size": 4,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "eval_fraction": 0.2,
}


@pytest.fixture
def settings(corpus_file, tokenizer_folder, tmp_path):
    return {
        **SMALL,
        "data": [str(corpus_file)],
        "tokenizer": str(tokenizer_folder),
        "cache_dir": str(tmp_path / "cache"),
        "output_dir": str(tmp_path / "run"),
    }


METRICS = {
    "objective",
    "steps",
    "tokens",
    "eval_loss",
    "eval_token_loss",
    "eval_joint_loss",
    "eval_accuracy",
    "unigram_loss",
    "tokens_per_second",
    "parameters",
}


@pytest.mark.parametrize("objective", ["mlm", "mae-lm", "exlm", "mae-exlm", "exlm-reference"])
def test_a_run_learns_and_leaves_everything_behind(objective, settings, tmp_path):
    metrics = pretrain(**settings, objective=objective, max_steps=300, learning_rate=5e-3, warmup_steps=0.1)
    run = tmp_path / "run"
    assert json.loads((run / "metrics.json").read_text()) == metrics
    assert set(metrics) >= METRICS
    assert metrics["steps"] == 300
    assert metrics["eval_token_loss"] < metrics["unigram_loss"]
    if "exlm" in objective:
        assert all(np.isfinite(metrics[name]) for name in ("eval_loss", "eval_token_loss", "eval_joint_loss"))
        assert metrics["eval_loss"] > metrics["eval_joint_loss"], "Z⁰ is less than 1"
    else:
        assert metrics["eval_loss"] == metrics["eval_token_loss"] == metrics["eval_joint_loss"]
    state = json.loads((newest_complete(run) / "trainer_state.json").read_text())
    logged = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert logged[-1] < logged[0] - 0.3
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        p.name for p in (run / "encoder").iterdir()
    }
    assert [p.name for p in checkpoints(run)] == ["checkpoint-270", "checkpoint-300"]
    assert not list(run.rglob("*.bin")), "no pickles"
    assert not (run / ".incomplete").exists()


def test_a_new_model_starts_at_the_tokens_frequencies(settings):
    metrics = pretrain(**settings, max_steps=1, learning_rate=0.0, config_overrides=["initializer_range=0.01"])
    assert metrics["eval_token_loss"] == pytest.approx(metrics["unigram_loss"], abs=0.02)


def test_tokens_are_those_of_the_corpus(settings):
    metrics = pretrain(**settings, max_steps=3, packing="rows", num_train_epochs=1, save_strategy="no")
    repeated = pretrain(
        **{**settings, "output_dir": settings["output_dir"] + "2"}, objective="mae-lm", max_steps=3, packing="rows"
    )
    assert metrics["tokens"] == repeated["tokens"]
    assert 3 * 4 * 6 < metrics["tokens"] < 3 * 4 * 32


def test_evaluation_targets_are_the_same_for_every_objective_and_seed(settings):
    losses = set()
    for i, changes in enumerate(
        [
            {"objective": "mlm"},
            {"objective": "mae-lm", "seed": 7},
            {"set": ["mask_ratio=0.4", "mask_unit=span"]},
            {"objective": "exlm-reference"},
        ]
    ):
        metrics = pretrain(**{**settings, "output_dir": f"{settings['output_dir']}{i}"}, max_steps=1, **changes)
        losses.add(metrics["unigram_loss"])
    assert len(losses) == 1


@pytest.mark.parametrize(("objective", "field"), [("mae-lm", "decoder_layers=1"), ("exlm", "encoder_states=3")])
def test_the_config_runs_the_same_run_again(objective, field, settings, tmp_path):
    first = pretrain(**settings, max_steps=6, objective=objective, set=[field], seed=3)
    recipe = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    second = pretrain(**{**recipe, "output_dir": str(tmp_path / "again")})
    for name in METRICS - {"tokens_per_second"}:
        assert first[name] == second[name]
    weights = [load_file(tmp_path / name / "encoder" / "model.safetensors") for name in ("run", "again")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def _unsized(settings):
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    return {name: value for name, value in settings.items() if name not in sizes}


def test_continuing_from_an_exported_encoder(settings, tmp_path):
    pretrain(**settings, max_steps=30, learning_rate=5e-3)
    encoder = str(tmp_path / "run" / "encoder")
    more = {**_unsized(settings), "encoder": encoder, "output_dir": str(tmp_path / "more"), "tokenizer": None}
    metrics = pretrain(**more, max_steps=1, learning_rate=0.0, save_strategy="no")
    before = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["eval_token_loss"] == pytest.approx(before["eval_token_loss"], abs=1e-5)


def test_an_exlm_run_is_resumed_and_its_export_continued(settings, tmp_path):
    whole = pretrain(**settings, objective="exlm", max_steps=6, save_steps=2)
    halfway = tmp_path / "halfway"
    halfway.mkdir()
    (tmp_path / "run" / "checkpoint-4").rename(halfway / "checkpoint-4")
    resumed = {**settings, "output_dir": str(halfway), "objective": "exlm", "max_steps": 6, "save_steps": 2}
    metrics = pretrain(**resumed, resume_from_checkpoint="latest")
    assert metrics["eval_loss"] == whole["eval_loss"]
    more = {**_unsized(settings), "encoder": str(halfway / "encoder"), "output_dir": str(tmp_path / "more")}
    metrics = pretrain(**more, objective="exlm", max_steps=1, learning_rate=0.0)
    assert metrics["eval_token_loss"] < metrics["unigram_loss"] + 0.3, "a new head starts at the tokens' frequencies"
    config = json.loads((newest_complete(tmp_path / "more") / "config.json").read_text())
    assert config["objective"]["state_positions"] == "rotary"


def test_a_data_set_in_memory_and_a_corpus_shorter_than_a_block(settings):
    dataset = Dataset.from_dict({"text": ["amber birch cedar", "delta ember fjord grove"], "n": [1, 2]})
    metrics = pretrain(**{**settings, "data": dataset, "eval_fraction": 0}, max_steps=2)
    assert metrics["steps"] == 2
    assert metrics["eval_loss"] is None


SCRIPT = """
import json, os, signal, sys
from transformers import TrainerCallback
from unmask.training import trainer
from unmask import pretrain

settings, kill_at = json.loads(sys.argv[1]), int(sys.argv[2])

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

show = trainer.show_progress
trainer.show_progress = lambda t: (show(t), t.add_callback(Kill))
pretrain(**settings)
"""


def run_script(settings: dict, kill_at: int = -1) -> int:
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings), str(kill_at)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-2000:]
    return done.returncode


def test_resume_is_exact(settings, tmp_path):
    """Killed in the middle of epoch 2 and resumed, with the newest checkpoint cut short: bitwise the same weights."""
    settings |= {
        "gradient_accumulation_steps": 2,
        "dataloader_num_workers": 2,
        "config_overrides": ["attention_dropout=0.1", "mlp_dropout=0.1", "embedding_dropout=0.1"],
        "num_train_epochs": 3,
        "save_steps": 4,
        "eval_steps": 6,
        "data": [settings["data"][0]],
    }
    assert run_script(settings | {"output_dir": str(tmp_path / "straight")}) == 0
    state = json.loads((newest_complete(tmp_path / "straight") / "trainer_state.json").read_text())
    steps = state["global_step"] // 3
    kill_at = steps + steps // 2
    assert kill_at % 4, "not at a checkpoint"
    stopped = settings | {"output_dir": str(tmp_path / "stopped")}
    assert run_script(stopped, kill_at) == -signal.SIGKILL
    assert not (tmp_path / "stopped" / "metrics.json").exists()
    newest = checkpoints(tmp_path / "stopped")[-1]
    assert kill_at - 4 < int(newest.name.split("-")[1]) < kill_at
    with open(newest / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    assert newest_complete(tmp_path / "stopped") != newest
    assert run_script(stopped | {"resume_from_checkpoint": "latest"}, kill_at + 3) == -signal.SIGKILL
    assert run_script(stopped | {"resume_from_checkpoint": "latest"}) == 0
    weights = [load_file(newest_complete(tmp_path / name) / "model.safetensors") for name in ("straight", "stopped")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    metrics = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("straight", "stopped")]
    assert metrics[0]["tokens"] == metrics[1]["tokens"]
    assert metrics[0]["eval_token_loss"] == metrics[1]["eval_token_loss"]
    assert metrics[0]["training_flops"] == metrics[1]["training_flops"] > 0
    state = json.loads((newest_complete(tmp_path / "stopped") / "trainer_state.json").read_text())
    seconds = [log["training_seconds"] for log in state["log_history"] if "training_seconds" in log]
    assert len(seconds) == -(-state["global_step"] // 4)  # one for each checkpoint, none for what was lost
    assert 0 < seconds[0] < seconds[-1] == metrics[1]["training_seconds"]
    assert seconds == sorted(seconds)


def test_the_rank_of_real_tokens_is_logged_at_every_evaluation(settings):
    metrics = pretrain(**settings, max_steps=4, eval_steps=2, save_steps=2)
    output = Path(settings["output_dir"])
    state = json.loads((newest_complete(output) / "trainer_state.json").read_text())
    logged = [log["real_token_rank"] for log in state["log_history"] if "real_token_rank" in log]
    assert len(logged) == len([log for log in state["log_history"] if "eval_loss" in log]) == 2
    model = AutoModel.from_pretrained(output / "encoder").eval()
    assert 1 < logged[-1] <= model.config.hidden_size
    assert metrics["steps"] == 4


def test_rank_callback_is_the_effective_rank():
    hidden = torch.randn(40, 8, 16, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 2, 16)
    logs = []
    callback = RankCallback(torch.arange(40)[:, None], lambda ids: hidden[ids[:, 0]], logs.append)
    model = torch.nn.Linear(1, 1).train()
    model.device = torch.device("cpu")
    callback.on_evaluate(None, None, None, model=model)
    assert logs == [{"real_token_rank": effective_rank(hidden.flatten(0, 1))}]
    assert model.training


def test_damaged_checkpoints_are_seen(settings, tmp_path):
    pretrain(**settings, max_steps=4, save_steps=2)
    run = tmp_path / "run"
    two, four = checkpoints(run)
    assert is_complete(two)
    assert find_checkpoint(run) == four
    content = bytearray((four / "optimizer.pt").read_bytes())
    content[100] ^= 1
    (four / "optimizer.pt").write_bytes(content)
    assert find_checkpoint(run) == two
    with pytest.raises(UserError, match="is damaged"):
        find_checkpoint(four)
    (two / "rng_state.pth").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_checkpoint(run)


def test_a_failed_save_leaves_no_checkpoint(settings, tmp_path, monkeypatch):
    def fails(folder):
        raise OSError("disk full")

    monkeypatch.setattr(trainer, "write_manifest", fails)
    with pytest.raises(OSError, match="disk full"):
        pretrain(**settings, max_steps=4, save_steps=2)
    assert checkpoints(tmp_path / "run") == []


def test_the_same_seed_gives_the_same_run_and_another_does_not(settings, tmp_path):
    losses = []
    for i, seed in enumerate([1, 1, 2]):
        metrics = pretrain(**{**settings, "output_dir": str(tmp_path / str(i))}, max_steps=5, seed=seed)
        losses.append(metrics["eval_loss"])
    assert losses[0] == losses[1] != losses[2]


def test_unigram_loss_by_hand(settings, tmp_path):
    text = ["a a a b"] * 30
    (tmp_path / "ab.txt").write_text("\n".join(text))
    train_tokenizer(text, "char", 8).save_pretrained(tmp_path / "tok")
    changes = {
        "data": [str(tmp_path / "ab.txt")],
        "tokenizer": str(tmp_path / "tok"),
        "eval_data": [str(tmp_path / "ab.txt")],
    }
    metrics = pretrain(**{**settings, **changes}, max_steps=1)
    tokenizer = load_tokenizer(str(tmp_path / "tok"))
    counts = {"a": 90 + 1, "b": 30 + 1, " ": 90 + 1, "specials": 5}
    rows = MaskedRows(
        Blocks(tokenize(open_corpus([str(tmp_path / "ab.txt")]), tokenizer, tmp_path / "c"), 32),
        Objective(),
        Vocabulary(tokenizer),
        0,
    )
    targets = tokenizer.convert_ids_to_tokens(np.concatenate([rows[i]["labels"] for i in range(len(rows))]).tolist())
    expected = -np.mean([np.log(counts[t] / sum(counts.values())) for t in targets])
    assert metrics["unigram_loss"] == pytest.approx(expected, rel=1e-9)


def test_a_failed_overwrite_keeps_the_old_run(settings, tmp_path):
    pretrain(**settings, max_steps=1)
    with pytest.raises(UserError, match="nowhere"):
        pretrain(**{**settings, "data": ["nowhere.txt"]}, max_steps=1, overwrite=True)
    assert find_checkpoint(tmp_path / "run")
    assert (tmp_path / "run" / "encoder" / "model.safetensors").exists()


def test_resuming_with_another_model_is_refused(settings):
    pretrain(**settings, max_steps=2)
    with pytest.raises(UserError, match="another encoder_states"):
        pretrain(**settings, max_steps=4, objective="mae-lm", resume_from_checkpoint="latest")
    with pytest.raises(UserError, match="another num_hidden_layers"):
        pretrain(**{**settings, "num_hidden_layers": 3}, max_steps=4, resume_from_checkpoint="latest")
    assert pretrain(**settings, max_steps=4, resume_from_checkpoint="latest")["steps"] == 4


def test_without_a_tokenizer_a_bpe_is_trained_once(settings, tmp_path):
    changes = {**settings, "tokenizer": None, "vocab_size": 290}
    pretrain(**changes, max_steps=1)
    (first,) = (tmp_path / "cache").glob("bpe-290-*")
    before = first.stat().st_mtime_ns
    pretrain(**{**changes, "output_dir": str(tmp_path / "two")}, max_steps=1)
    assert first.stat().st_mtime_ns == before
    config = json.loads((tmp_path / "two" / "encoder" / "config.json").read_text())
    assert config["vocab_size"] == 290


def test_run_folders_are_never_overwritten_unasked(settings, tmp_path):
    pretrain(**settings, max_steps=1)
    with pytest.raises(UserError, match="already holds a run"):
        pretrain(**settings, max_steps=1)
    assert pretrain(**settings, max_steps=2, overwrite=True)["steps"] == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        pretrain(**{**settings, "output_dir": str(tmp_path / "other")}, max_steps=1, overwrite=True)
    assert Path(tmp_path / "other" / "thesis.tex").read_text() == "precious"


def test_torch_compile_is_layer_by_layer(settings, tmp_path, monkeypatch):
    """accelerate is not asked to compile the model as a whole, and the recipe still says that it was compiled."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kwargs: compiled.append(self))
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("the whole model was compiled"))
    pretrain(**settings | {"torch_compile": True, "max_steps": 2, "objective": "mae-lm"})
    assert [type(layer).__name__ for layer in compiled][-1] == "DecoderLayer"
    assert len(compiled) == SMALL["num_hidden_layers"] + 4, "the encoder's and the decoder's"
    assert yaml.safe_load(Path(settings["output_dir"], "config.yaml").read_text())["torch_compile"] is True
