import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import FAMILIES, encoder_config
from test_training import SMALL
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from unmask.cli import main
from unmask.data.tokenizers import train_tokenizer
from unmask.experiments import compare

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")
RECIPES = Path(__file__).parents[1] / "recipes"


def flags(values: dict) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


@pytest.fixture
def base(corpus_file, tokenizer_folder, tmp_path):
    return {
        **SMALL,
        "data": corpus_file,
        "tokenizer": tokenizer_folder,
        "cache_dir": tmp_path / "cache",
        "output_dir": tmp_path / "run",
        "max_steps": 2,
    }


@pytest.mark.parametrize("objective", ["mae-lm", "mae-exlm"])
def test_from_a_text_file_to_a_filled_mask(objective, corpus_file, tmp_path, capsys):
    tok, run = str(tmp_path / "tok"), str(tmp_path / "run")
    assert main(["tokenizer", "--data", str(corpus_file), "--vocab_size", "300", "--output_dir", tok]) == 0
    small = flags({**SMALL, "data": corpus_file, "tokenizer": tok, "cache_dir": tmp_path / "cache", "output_dir": run})
    assert main(["pretrain", "--objective", objective, *small, "--max_steps", "60", "--learning_rate", "5e-3"]) == 0
    capsys.readouterr()
    assert main(["fill", run, "amber [MASK] cedar [MASK] .", "--top_k", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("%") == 6
    assert ("best together" in out) == (objective == "mae-exlm")
    assert main(["export", run, "--output_dir", str(tmp_path / "encoder")]) == 0
    assert f"| objective | {objective} |" in (tmp_path / "encoder" / "README.md").read_text()
    assert (tmp_path / "encoder" / "model.safetensors").read_bytes() == (
        tmp_path / "run" / "encoder" / "model.safetensors"
    ).read_bytes()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "encoder")) == 300


def test_a_recipe_with_flags_on_top(base, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in base.items()}
    lines = {**plain, "objective": "mae-lm", "data": [str(base["data"])], "set": ["mask_ratio=0.3"]}
    recipe.write_text(yaml.safe_dump(lines) + "learning_rate: 1e-4\nweight_decay: 2e-2\n")  # strings to YAML
    assert main(["pretrain", str(recipe), "--learning_rate", "5e-4", "--set", "decoder_layers=1"]) == 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["objective"] == "mae-lm"
    assert config["learning_rate"] == 5e-4
    assert config["weight_decay"] == 2e-2
    assert config["set"] == ["decoder_layers=1"]
    assert main(["pretrain", str(tmp_path / "run" / "config.yaml"), "--output_dir", str(tmp_path / "again")]) == 0
    refused(["pretrain", str(tmp_path / "none.yaml")], "none.yaml", capsys)
    recipe.write_text("objektive: mlm\n")
    refused(["pretrain", str(recipe), *flags(base)], "did you mean 'objective'", capsys)


def test_compare_prints_one_row_each(base, tmp_path, capsys):
    values = {**base, "output_dir": tmp_path / "both"}
    names = ["mlm", "mae-lm", "exlm", "mae-exlm"]
    assert main(["compare", *names, *flags(values)]) == 0
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in names)
    rows = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert [row["objective"] for row in rows] == names
    assert len({row["tokens"] for row in rows}) == len({row["unigram_loss"] for row in rows}) == 1


def test_mlm_plus_plus_takes_the_time_of_the_slowest(base, tmp_path, monkeypatch, capsys):
    """A step of MLM takes 2 s and its start 0 s here, one of another objective 7 s."""
    trained = []

    def pretrain(**values):
        trained.append(values)
        seconds = values["max_steps"] * (2 if values["objective"] == "mlm" else 7)
        scores = dict.fromkeys(("eval_token_loss", "eval_joint_loss", "unigram_loss", "eval_accuracy"))
        facts = {"objective": values["objective"], "steps": values["max_steps"], "tokens": 1, "tokens_per_second": 1}
        return {**facts, **scores, "training_seconds": seconds}

    monkeypatch.setattr(compare, "pretrain", pretrain)
    values = {**base, "output_dir": tmp_path / "both", "max_steps": 40}
    assert main(["compare", "mlm++", "exlm", *flags(values)]) == 0
    assert [(v["objective"], v["max_steps"]) for v in trained] == [("exlm", 40), ("mlm", 30), ("mlm", 140)]
    assert trained[-1]["output_dir"] == str(tmp_path / "both" / "mlm++")
    assert "140 steps of MLM cost the same" in capsys.readouterr().out
    trained.clear()
    assert main(["compare", "mlm", "exlm", "mlm++", *flags(values)]) == 0
    assert [v["max_steps"] for v in trained] == [40, 40, 140]  # no short run: MLM's own is there
    refused(["compare", "mlm++", *flags(values)], "name that too", capsys)
    refused(["pretrain", "--objective", "mlm++", *flags(values)], "unmask compare exlm mlm++", capsys)


def refused(argv: list[str], says: str, capsys) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in error
    assert error.startswith("unmask: ")
    assert "Traceback" not in error


CASES = {
    "missing file": ({"data": "nowhere/corpus.txt"}, "nowhere/corpus.txt"),
    "unknown objective": ({"objective": "mae-ml"}, "did you mean 'mae-lm'"),
    "unknown field": ({"set": "mask_ration=0.2"}, "did you mean 'mask_ratio'"),
    "not a field": ({"set": "mask_ratio"}, "field=value"),
    "a field as a flag": ({"mask_ratio": "0.2"}, "--set mask_ratio="),
    "unknown flag": ({"learning_rat": "0.2"}, "did you mean 'learning_rate'"),
    "mask_ratio": ({"set": "mask_ratio=1.5"}, "strictly between 0 and 1"),
    "no steps": ({"max_steps": 0}, "max_steps is 0"),
    "no batch": ({"per_device_train_batch_size": 0}, "must be at least 1"),
    "heads": ({"hidden_size": 33}, "choose a multiple of 2"),
    "one state": ({"objective": "exlm", "set": "encoder_states=1"}, "k must be 2 or more"),
    "2-D positions without rotary ones": (
        {"objective": "exlm", "model_type": "bert", "set": "state_positions=rotary"},
        "set state_positions=embedding",
    ),
    "unknown preset": ({"preset": "tinny"}, "did you mean 'tiny'"),
    "unknown architecture": ({"model_type": "modernbart"}, "did you mean 'modernbert'"),
    "unknown config field": ({"config_overrides": "hidden_sise=3"}, "did you mean 'hidden_size'"),
    "an encoder that fails the probe": ({"model_type": "fnet"}, "FNetModel"),
    "no number": ({"max_steps": "many"}, "invalid int value"),
    "no tokenizer": ({"tokenizer": "nowhere/tok"}, "nowhere/tok"),
    "no encoder": ({"encoder": "nowhere/encoder", "tokenizer": None, **dict.fromkeys(SIZES)}, "nowhere/encoder"),
    "no checkpoint": ({"resume_from_checkpoint": "nowhere/run"}, "nowhere/run"),
    "too short": ({"max_length": "4"}, "at least 8 tokens"),
}


@pytest.mark.parametrize(("changes", "says"), CASES.values(), ids=CASES)
def test_mistakes_get_one_sentence_and_leave_nothing(changes, says, base, tmp_path, capsys):
    values = {name: value for name, value in {**base, **changes}.items() if value is not None}
    refused(["pretrain", *flags(values)], says, capsys)
    assert not (tmp_path / "run").exists()


def test_corpora_that_cannot_be_used(base, tmp_path, capsys):
    def with_data(path):
        return ["pretrain", *flags({**base, "data": path})]

    (tmp_path / "empty.txt").write_text("\n\n")
    refused(with_data(tmp_path / "empty.txt"), "empty.txt", capsys)
    (tmp_path / "columns.csv").write_text("a,b\nx,y\n")
    refused(with_data(tmp_path / "columns.csv"), "a, b", capsys)
    (tmp_path / "binary.txt").write_bytes(b"\0\1\2" * 100)
    refused(with_data(tmp_path / "binary.txt"), "binary file", capsys)
    refused(with_data("no/such-dataset-anywhere"), "no/such-dataset-anywhere", capsys)
    assert not (tmp_path / "run").exists()


def test_bad_text_is_named_skipped_and_counted(base, corpus_file, tmp_path, capsys):
    folder = tmp_path / "mixed"
    folder.mkdir()
    good = corpus_file.read_bytes()
    (folder / "a.txt").write_bytes(good + b"caf\xe9 amber birch\n")
    (folder / "b.bin").write_bytes(b"\0" * 64)
    assert main(["pretrain", *flags({**base, "data": folder})]) == 0
    err = capsys.readouterr().err
    assert "not valid UTF-8" in err
    assert "a.txt: 1" in err
    assert "binary file" in err
    assert "b.bin: 1" in err


def test_sequences_too_short_to_mask_are_skipped_and_counted(base, tmp_path, capsys):
    train_tokenizer(["CCO"], "smiles", 300).save_pretrained(tmp_path / "smiles")
    (tmp_path / "rows.smi").write_text("CCO\nC1=CC=CC=C1\n" * 20 + "☃\n☃☃\n")
    values = {**base, "data": tmp_path / "rows.smi", "tokenizer": tmp_path / "smiles", "packing": "rows"}
    assert main(["pretrain", *flags({**values, "eval_fraction": 0})]) == 0
    assert "2 of 42 documents have no token to mask" in capsys.readouterr().err


def test_a_tokenizer_without_mask(base, tmp_path, capsys):
    tokenizer = train_tokenizer(["amber birch"], "char", 20)
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="[PAD]")
    plain.save_pretrained(tmp_path / "plain")
    refused(["pretrain", *flags({**base, "tokenizer": tmp_path / "plain"})], "without [MASK]", capsys)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_boundary_tokens(base, tmp_path, capsys):
    tokenizer = train_tokenizer(["amber birch"], "char", 20)
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
    )
    plain.save_pretrained(tmp_path / "plain")
    values = {**base, "tokenizer": tmp_path / "plain"}
    for objective in ("exlm", "mae-exlm"):
        refused(["pretrain", "--objective", objective, *flags(values)], "no boundary tokens", capsys)
    assert not (tmp_path / "run").exists()
    assert main(["pretrain", "--objective", "mae-lm", *flags(values)]) == 0


def test_a_checkpoint_whose_vocabulary_or_length_does_not_fit(base, tmp_path, capsys):
    AutoModelForMaskedLM.from_config(encoder_config("bert")).save_pretrained(tmp_path / "bert")
    base = {name: value for name, value in base.items() if name not in SIZES}
    refused(["pretrain", *flags({**base, "encoder": tmp_path / "bert"})], "tokenizer has 300 tokens", capsys)
    big = encoder_config("bert", vocab_size=300)
    AutoModelForMaskedLM.from_config(big).save_pretrained(tmp_path / "big")
    refused(["pretrain", *flags({**base, "encoder": tmp_path / "big", "max_length": 131})], "positions for 130", capsys)
    assert not (tmp_path / "run").exists()


def test_continuing_from_what_is_no_encoder_is_refused_with_the_right_folder(base, tmp_path, capsys):
    assert main(["pretrain", *flags(base)]) == 0
    more = {k: v for k, v in {**base, "output_dir": tmp_path / "more"}.items() if k not in SIZES}
    refused(["pretrain", *flags({**more, "encoder": tmp_path / "run"})], f"is '{tmp_path / 'run' / 'encoder'}'", capsys)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    refused(["pretrain", *flags({**more, "encoder": checkpoint})], "is a checkpoint of a pretraining run", capsys)
    encoder = tmp_path / "run" / "encoder"
    refused(["pretrain", *flags({**base, "output_dir": tmp_path / "more", "encoder": encoder})], "leave it out", capsys)
    refused(["fill", str(encoder), "a [MASK]"], "is a stock checkpoint, without the decoder and the head", capsys)
    assert not (tmp_path / "more").exists()


def test_a_finished_run_is_not_trained_on(base, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["pretrain", *flags(base)]) == 0
    before = json.loads((run / "metrics.json").read_text())
    assert main(["pretrain", *flags(base), "--resume_from_checkpoint"]) == 0
    assert "is finished: to train on, raise --max_steps" in capsys.readouterr().err
    assert json.loads((run / "metrics.json").read_text()) == before
    (run / "metrics.json").unlink()  # as if it had been stopped before its results were written
    assert main(["pretrain", *flags(base), "--resume_from_checkpoint"]) == 0
    after = json.loads((run / "metrics.json").read_text())
    assert after == before | {"tokens_per_second": None}
    assert not (run / "checkpoint-3").exists()


def test_diverged_training_fails(base, tmp_path, capsys):
    values = {**base, "learning_rate": 1e30, "max_steps": 6, "logging_steps": 1, "eval_strategy": "no"}
    refused(["pretrain", *flags(values)], "training has diverged", capsys)
    assert not (tmp_path / "run" / "encoder").exists()


def test_an_output_folder_that_holds_a_run(base, capsys):
    assert main(["pretrain", *flags(base)]) == 0
    refused(["pretrain", *flags(base)], "already holds a run", capsys)
    assert main(["pretrain", *flags(base), "--resume_from_checkpoint"]) == 0


@pytest.mark.parametrize("family", [*FAMILIES, "nomic_bert", "eurobert"])
@pytest.mark.parametrize("objective", ["mae-lm", "exlm"])
def test_every_tested_family_trains_from_a_flag(family, objective, base, tmp_path):
    values = {**base, "model_type": family, "objective": objective, "eval_fraction": 0}
    assert main(["pretrain", *flags(values)]) == 0
    config = json.loads((tmp_path / "run" / "encoder" / "config.json").read_text())
    assert config["model_type"] == family


def test_fill_and_export_refuse_what_is_no_run(tmp_path, capsys):
    refused(["fill", str(tmp_path / "none"), "a [MASK]"], "There is no run", capsys)
    refused(["export", str(tmp_path), "--output_dir", str(tmp_path / "x")], "no complete checkpoint", capsys)
    refused(["paint"], "did you mean 'pretrain'", capsys)
    refused(["fill"], "required", capsys)


def test_help_teaches_without_loading_torch():
    code = "import sys; from unmask.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pretrain" in done.stdout


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_takes_a_step(recipe, base, tmp_path):
    shrunk = {**base, "max_steps": 1, "max_length": 32}
    if "smiles" in recipe.stem:
        train_tokenizer(["CCO"], "smiles", 300).save_pretrained(tmp_path / "smiles")
        (tmp_path / "molecules.smi").write_text("CC(=O)Oc1ccccc1C(=O)O\nC[C@H](N)C(=O)O\n" * 20)
        shrunk |= {"data": tmp_path / "molecules.smi", "tokenizer": tmp_path / "smiles"}
    assert main(["pretrain", str(recipe), *flags(shrunk)]) == 0
