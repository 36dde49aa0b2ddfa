"""Entropy, lattice, corruption and the report, from runs to files; the report in a browser where there is one."""

import itertools
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from test_cli import refused

from unmask.analysis import entropy, report
from unmask.analysis.lattice import Lattice, Vertex, draw, lattice
from unmask.analysis.rank import RankAnalysis
from unmask.cli import main
from unmask.data.masking import MaskedBatches, MaskedRows, Vocabulary
from unmask.errors import UserError
from unmask.experiments.analyses import _Rows, predictor
from unmask.modeling.prediction import alignments, predict
from unmask.objectives import Objective

SMALL = ["--num_hidden_layers", "1", "--hidden_size", "32", "--vocab_size", "300", "--max_length", "32"]
SMALL += ["--per_device_train_batch_size", "8", "--disable_tqdm", "True", "--eval_strategy", "no"]


@pytest.fixture(scope="module")
def runs(corpus_file, tmp_path_factory):
    """A run of each of three objectives, hardly trained."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("mlm", "mae-lm", "exlm"):
        argv = ["pretrain", "--objective", name, "--data", str(corpus_file), "--max_steps", "3", *SMALL]
        assert main([*argv, "--output_dir", str(folder / name)]) == 0
    return folder


@pytest.mark.parametrize("name", ["mlm", "exlm"])
def test_entropy_is_that_of_the_marginal_prediction(runs, name):
    model, tokenizer = predictor(str(runs / name), 32)
    rows = _Rows(np.array([2, *row, 3]) for row in np.random.default_rng(0).integers(10, 290, (9, 30)))
    found = entropy.analyse(model, tokenizer, rows, ratios=(0.2, 0.5), max_sequences=7)
    assert found["sequences"] == 7
    assert list(found["by_ratio"]) == ["0.2", "0.5"]
    masked = MaskedRows(rows, Objective(mask_ratio=0.2), Vocabulary(tokenizer), 0)
    batch = MaskedBatches(tokenizer.pad_token_id)([masked[i] for i in range(7)])
    logs = torch.cat([log_p for _, log_p in predict(model, **batch)])
    row = found["by_ratio"]["0.2"]
    assert row["tokens"] == len(logs) == 7 * 6
    assert row["entropy"] == pytest.approx(float(-(logs.exp() * logs).sum(-1).mean()), rel=1e-4)
    assert row["top1"] == pytest.approx(float(logs.exp().amax(-1).mean()), rel=1e-4)
    assert row["loss"] == pytest.approx(float(-logs.gather(1, batch["labels"].flatten()[:, None]).mean()), rel=1e-4)
    for cut in ("by_frequency", "by_part"):
        parts = [part for part in found[cut].values() if part["tokens"]]
        assert sum(part["tokens"] for part in parts) == row["tokens"], cut
        mean = sum(part["tokens"] * part["entropy"] for part in parts) / row["tokens"]
        assert mean == pytest.approx(row["entropy"], rel=1e-6)
    if name == "exlm":
        assert row["path_entropy_before"] > row["path_entropy_after"] > 0
        assert 1 <= row["states_used"] <= 4 * 6
        assert row["state_entropy"] <= row["entropy"] + 1e-6  # a mixture is at least as uncertain as its parts


def test_alignments_of_a_certain_graph(runs):
    """Where every link but to the next position's first state is cut, each token sits there."""
    model, _ = predictor(str(runs / "exlm"), 32)
    ids = torch.randint(10, 290, (2, 12))
    visible = torch.tensor([0, 1, 3, 4, 6, 7, 9, 11])
    masked = torch.tensor([2, 5, 8, 10])
    batch = {"visible_ids": ids[:, visible], "visible_positions": visible.expand(2, -1)}
    batch |= {
        "masked_positions": masked.expand(2, -1),
        "masked_inputs": torch.full((2, 4), 4),
        "labels": ids[:, masked],
    }
    order = [0, 1, 5, 9, 13, 17]

    def certain(states, vertices):
        links = torch.full((2, 18, 18), -torch.inf)
        for w, u in itertools.pairwise(order):
            links[:, w, u] = 0.0
        return links

    model.transitions.forward = certain
    found = alignments(model, **batch)
    torch.testing.assert_close(found.states_used, torch.ones(2, 4).double())
    torch.testing.assert_close(found.at_own_position, torch.ones(2, 4).double())
    assert found.path_entropy_before.abs().max() < 1e-9
    assert found.path_entropy_after.abs().max() < 1e-9


def test_a_lattice_is_what_the_model_says(runs, tmp_path):
    model, tokenizer = predictor(str(runs / "exlm"), 32)
    found = lattice(model, tokenizer, "amber [MASK] cedar [MASK] .")
    assert [token for token in found.text if token == "[MASK]"] == ["[MASK]"] * 2
    assert len(found.vertices) == 2 * 4 + 2 == len(found.links)
    np.testing.assert_allclose(found.links[:-1].sum(1), 1, rtol=1e-5)
    assert found.best_path[0] == 0
    assert found.best_path[-1] == 9
    assert len(found.best_path) == 4
    occupancy = np.array([v.occupancy for v in found.vertices if v.state])
    np.testing.assert_allclose(occupancy.sum(0), 1, rtol=1e-6)
    draw(found, tmp_path / "lattice.svg")
    assert "position" in (tmp_path / "lattice.svg").read_text() or (tmp_path / "lattice.svg").stat().st_size > 5000
    assert main(["analyze", "lattice", str(runs / "exlm"), "amber [MASK] .", "--output", str(tmp_path / "l.png")]) == 0
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="give a run of exlm"):
        lattice(*predictor(str(runs / "mlm"), 32), "amber [MASK] .")


def test_the_commands_leave_tables_and_files(runs, corpus_file, tmp_path, capsys):
    names = [str(runs / "mlm"), str(runs / "mae-lm")]
    flags = ["--data", str(corpus_file), "--max_length", "32", "--max_tokens", "4000"]
    flags += ["--output_dir", str(tmp_path / "a")]
    assert main(["analyze", "rank", *names, *flags]) == 0
    found = json.loads((tmp_path / "a" / "rank.json").read_text())
    assert [len(each["layers"]) for each in found] == [2, 2]
    assert np.isfinite(found[0]["layers"][1]["plain"]["standard_error"])
    assert (tmp_path / "a" / "rank.svg").is_file()
    assert main(["analyze", "entropy", *names, *flags, "--max_sequences", "8"]) == 0
    assert set(json.loads((tmp_path / "a" / "entropy.json").read_text())) == set(names)
    # a stock encoder: ranks, and predictions where it has a head for them
    assert main(["analyze", "entropy", str(runs / "mlm" / "encoder"), *flags, "--max_sequences", "8"]) == 0
    stock, run = (json.loads((tmp_path / "a" / "entropy.json").read_text()) for _ in range(2))
    assert stock == run
    refused(["analyze", "entropy", str(runs / "mae-lm" / "encoder"), *flags], "holds no head", capsys)


@pytest.fixture(scope="module")
def page(runs, corpus_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    shared = {"scores": {"sst2": 0.6}, "eval_token_loss": 5.0}
    cells = [{"p": p, "k": k, **shared} for p, k in ((0.15, 1), (0.387, 2))]
    (folder / "corruption.json").write_text(json.dumps({"cells": cells}))
    names = [str(runs / name) for name in ("mlm", "exlm")]
    names.append(str(runs / "mae-lm" / "encoder"))
    flags = ["--data", str(corpus_file), "--max_length", "32", "--max_tokens", "1500", "--max_sequences", "6"]
    flags += ["--text", "amber [MASK] <script>alert(1)</script>", "--corruption", str(folder / "corruption.json")]
    assert main(["analyze", "report", *names, *flags, "--output_dir", str(folder)]) == 0
    return folder / "report.html"


def test_the_report_holds_everything_and_asks_for_nothing(page):
    text = page.read_text()
    assert all(f'<section id="{name}">' in text for name in ("rank", "entropy", "lattice", "corruption"))
    assert text.count("<svg") == text.count("<figure>") == 4
    assert not re.search(r'(src|href)="(https?:|//|file:)', text)
    assert "<script>alert" not in text
    assert text.count("<script>") == 1
    assert "prefers-color-scheme" in text or "color-scheme:light dark" in text
    assert text.count('download="') == 8
    assert len(json.loads((page.parent / "entropy.json").read_text())) == 2  # all that predict, in the files too


def test_tokens_and_names_are_escaped():
    evil = "<script>alert(1)</script>"
    row = {kind: {"effective_rank": 3, "standard_error": float("nan")} for kind in ("plain", "real", "mask", "all")}
    row["plain"] |= {"entropy_rank": 2.0, "participation_ratio": 1.0, "stable_rank": 1.0}
    layer = {"size": 4, **row, "overlap": {"unused_variance": 0.5, "angles": [90.0]}}
    graph = Lattice([evil], [Vertex(1, 1, [(evil, 0.5), ("$x", 0.2)], [1.0])], np.zeros((1, 1)), [0])
    found = report.build([RankAnalysis(evil, 10, 0.9, False, [layer])], {}, {evil: graph}, None)
    assert found.count("<script>") == 1  # the page's own
    assert "&lt;script&gt;alert(1)" in found


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium here")
def test_the_report_in_a_browser(page):
    argv = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    ended = subprocess.run([*argv, f"file://{page}"], capture_output=True, text=True, timeout=120)
    assert ended.stdout.count("<svg") == 4
    assert "CONSOLE" not in ended.stderr


def test_the_corruption_sweep_goes_on_where_it_stopped(corpus_file, tmp_path, monkeypatch, capsys):
    small = [*SMALL[:6], "--per_device_train_batch_size", "4", "--disable_tqdm", "True", "--eval_steps", "2"]
    argv = ["analyze", "corruption", "--data", str(corpus_file), "--max_steps", "2", *small]
    argv += ["--output_dir", str(tmp_path / "c"), "--cells"]
    assert main([*argv, "0.15,1", "0.387,2"]) == 0
    found = json.loads((tmp_path / "c" / "corruption.json").read_text())["cells"]
    assert [(cell["p"], cell["k"]) for cell in found] == [(0.15, 1), (0.387, 2)]
    config = (tmp_path / "c" / "p-0.387-k-2" / "config.yaml").read_text()
    assert "repeat=2" in config
    assert "max_length: 62" in config

    def again(**values):
        raise AssertionError("a finished cell was run again")

    monkeypatch.setattr("unmask.experiments.corruption.pretrain", again)
    assert main([*argv, "0.15,1", "0.387,2"]) == 0
    refused([*argv, "0.15"], "write p,k pairs", capsys)
    refused([*argv, "1.5,2"], "makes no sense", capsys)


def test_one_clear_sentence(runs, corpus_file, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("amber birch\n")
    rank, data = ["analyze", "rank", str(runs / "mlm")], ["--data", str(corpus_file)]
    refused(["analyze", "rnak", str(runs / "mlm")], "did you mean 'rank'", capsys)
    refused(["analyze", "rank", *data], "No model is named", capsys)
    refused(rank, "No text is given", capsys)
    refused([*rank, "--data", str(short)], "one sequence has 32", capsys)
    refused([*rank, *data, "--tau", "1.5"], "must lie in (0, 1]", capsys)
    refused(["analyze", "rank", str(tmp_path / "none"), *data], "No encoder can be loaded", capsys)
    refused(["analyze", "lattice", str(runs / "exlm")], "one run and one text", capsys)
    refused(["analyze", "lattice", str(runs / "exlm"), "no mask"], r"holds no [MASK]", capsys)
    refused(["analyze", "lattice", str(runs / "exlm"), "a [MASK]", "--output", "x.docx"], "ends in .svg", capsys)
