"""Fine-tuning and probing from data files to results: leaked labels, shuffled ones, resumption, bad input."""

import json
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import WORDS, encoder_config, sentences
from test_cli import refused
from transformers import AutoModel, AutoModelForSequenceClassification

from unmask.cli import main
from unmask.errors import UserError
from unmask.evaluation import benchmark, glue, moleculenet, squad, table
from unmask.evaluation.finetune import Settings, finetune, loss_of
from unmask.evaluation.probe import Features, probe
from unmask.evaluation.tasks import CLASSIFICATION, MULTI_LABEL, REGRESSION, Split, Task
from unmask.experiments import curve
from unmask.modeling import cpu
from unmask.modeling.stock import Encoder


@pytest.fixture(scope="module")
def encoder_folder(tokenizer, tmp_path_factory) -> Path:
    """A random BERT of 2 layers with the shared tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoders") / "bert"
    config = encoder_config("bert", vocab_size=len(tokenizer), num_hidden_layers=2, initializer_range=0.1)
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def labelled(count: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Beginnings of sentences behind a word that says the class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    return [f"{('wrong', 'right')[y]} {s[:60]}" for y, s in zip(labels, sentences(count, seed), strict=True)], labels


def task_of(kind: str, shuffled: bool = False) -> Task:
    splits = {}
    for name, count, seed in (("train", 320, 1), ("dev", 200, 2)):
        texts, labels = labelled(count, seed)
        if shuffled:
            labels = np.random.default_rng(seed).permutation(labels)
        if kind == REGRESSION:
            labels = 100.0 + 7 * labels
        if kind == MULTI_LABEL:
            labels = np.stack([labels, 1 - labels], 1).astype(float)
            labels[::3, 0] = np.nan
        splits[name] = Split([(text,) for text in texts], labels)
    metric = {CLASSIFICATION: "accuracy", REGRESSION: "spearman", MULTI_LABEL: "roc_auc"}[kind]
    names = {CLASSIFICATION: ("no", "yes"), REGRESSION: ("value",), MULTI_LABEL: ("yes", "no")}[kind]
    return Task("toy", kind, names, (metric,), splits)


SETTINGS = Settings(learning_rate=2e-3, batch_size=16, epochs=4, max_length=64)


def tuned(encoder_folder: Path, task: Task, seed: int = 1, settings: Settings = SETTINGS) -> np.ndarray:
    encoder = Encoder(str(encoder_folder))
    rows = {name: encoder.encode(split.texts, settings.max_length, name) for name, split in task.splits.items()}
    return finetune(encoder, task, rows, settings, seed)["dev"]


def headline(task: Task, scores: np.ndarray) -> float:
    return task.headline(scores, np.arange(len(scores)))


def test_the_model_that_is_tuned_is_the_stock_one_with_the_fast_attention(encoder_folder, monkeypatch):
    stock = AutoModelForSequenceClassification.from_pretrained(encoder_folder, num_labels=3).eval()
    model = Encoder(str(encoder_folder)).load(AutoModelForSequenceClassification, num_labels=3).eval()
    model.load_state_dict(stock.state_dict())
    weights = []
    monkeypatch.setattr(cpu, "_softmax", lambda *args, own=cpu._softmax: weights.append(own(*args)) or weights[-1])
    ids = torch.randint(6, stock.config.vocab_size, (3, 20))
    mask = torch.arange(20) < torch.tensor([20, 7, 12])[:, None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, logits = (m(input_ids=ids, attention_mask=mask.long()).logits.float() for m in (stock, model))
    assert len(weights) == stock.config.num_hidden_layers
    torch.testing.assert_close(logits, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", [CLASSIFICATION, REGRESSION, MULTI_LABEL])
def test_leaked_labels_are_learned_by_fine_tuning(encoder_folder, kind):
    task = task_of(kind)
    scores = tuned(encoder_folder, task)
    assert headline(task, scores) > 0.85 if kind == REGRESSION else headline(task, scores) > 0.97
    if kind == REGRESSION:  # predictions are in the labels' unit
        assert 99 < scores.min() < scores.max() < 108


@pytest.mark.parametrize("kind", [CLASSIFICATION, REGRESSION, MULTI_LABEL])
def test_leaked_labels_are_learned_by_a_probe(encoder_folder, kind):
    task = task_of(kind)
    assert headline(task, probe(Features(Encoder(str(encoder_folder)), 64), task, None, 1)["dev"]) > 0.85


def test_shuffled_labels_score_at_chance(encoder_folder):
    task = task_of(CLASSIFICATION, shuffled=True)
    chance = 4 * (0.25 / 200) ** 0.5
    assert abs(headline(task, tuned(encoder_folder, task)) - 0.5) < chance
    probed = probe(Features(Encoder(str(encoder_folder)), 64), task, None, 1)["dev"]
    assert abs(headline(task, probed) - 0.5) < chance


def test_one_seed_gives_one_result_and_another_another(encoder_folder):
    task, short = task_of(CLASSIFICATION), Settings(1e-3, 16, 1, 64, max_train_samples=100)
    first, again, other = (tuned(encoder_folder, task, seed, short) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_early_stopping_keeps_the_best_epoch(encoder_folder):
    task = task_of(CLASSIFICATION)
    best = tuned(encoder_folder, task, 1, Settings(2e-3, 16, 8, 64, early_stopping=1))
    assert headline(task, best) > 0.97


def test_stock_head_and_loss(encoder_folder):
    """The stock model's own loss where nothing is missing; what was not measured moves nothing."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder_folder, num_labels=3, problem_type="multi_label_classification"
    ).eval()
    ids, labels = torch.randint(6, 200, (4, 9)), torch.randint(0, 2, (4, 3)).float()
    output = model(input_ids=ids, labels=labels)
    torch.testing.assert_close(loss_of(MULTI_LABEL)(output, labels), output.loss)
    labels[1, 2] = labels[3, 0] = torch.nan
    logits = output.logits.detach().requires_grad_()
    output.logits = logits
    loss_of(MULTI_LABEL)(output, labels).backward()
    assert torch.equal(logits.grad == 0, labels.isnan())
    known = ~labels.isnan()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits[known], labels[known])
    torch.testing.assert_close(loss_of(MULTI_LABEL)(output, labels), expected)


def test_probe_encodes_what_is_asked_for_once(encoder_folder, monkeypatch):
    asked = []
    encode = Encoder.encode
    monkeypatch.setattr(
        Encoder, "encode", lambda self, texts, *a: asked.extend(t for (t,) in texts) or encode(self, texts, *a)
    )
    features, task = Features(Encoder(str(encoder_folder)), 64), task_of(CLASSIFICATION)
    for seed in (1, 2):
        probe(features, task, 50, seed)
    assert len(asked) == len(set(asked)) <= 50 + 50 + 200


# --- files ------------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_glue_as_its_download_unpacks(tmp_path, caplog):
    write(tmp_path / "CoLA" / "train.tsv", 'gj04\t1\t\tThe "cat sat.', "gj04\t0\t*\tCat the sat.")
    write(tmp_path / "CoLA" / "dev.tsv", "gj04\t1\t\tOne.", "gj04\t0\t*\tTwo.")
    write(tmp_path / "CoLA" / "test.tsv", "index\tsentence", "0\tThree.")
    cola = glue.load("cola", tmp_path, None, with_test=True)
    assert cola.splits["train"].texts == [('The "cat sat.',), ("Cat the sat.",)]
    assert cola.splits["train"].labels.tolist() == [1, 0]
    assert cola.splits["test"] == ([("Three.",)], None)
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    for split in ("train", "dev"):
        write(tmp_path / "MRPC" / f"{split}.tsv", header, '1\t7\t8\tA "b.\tC.', "0\t1\t2\tD.\tE.", "1\t3\t4\tbroken")
    with caplog.at_level(logging.WARNING, logger="unmask"):
        mrpc = glue.load("mrpc", tmp_path, None)
    assert mrpc.splits["train"].texts == [('A "b.', "C."), ("D.", "E.")]
    assert "1 of 3 rows left out" in caplog.text
    mnli = "index\tsentence1\tsentence2\tlabel1\tgold_label"
    names = ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
    for name in names:
        write(
            tmp_path / "MNLI" / f"{name}.tsv", mnli, "0\tp\th\tneutral\tcontradiction", "1\tp\th\tneutral\tentailment"
        )
    found = glue.load("mnli", tmp_path, None, with_test=True)
    assert found.splits["dev_mismatched"].labels.tolist() == [2, 0]
    assert found.scored_splits() == ["dev", "dev_mismatched"]
    assert {"test", "test_mismatched"} < set(found.splits)


def test_glue_as_plain_tsv_and_a_dev_split_alone(tmp_path):
    rows = [f"question {i}\tsentence {i}\t{('entailment', 'not_entailment')[i % 2]}" for i in range(10)]
    write(tmp_path / "QNLI" / "dev.tsv", "question\tsentence\tlabel", *rows)
    with pytest.raises(UserError, match=r"--split_dev 0\.2"):
        glue.load("qnli", tmp_path, None)
    task = glue.load("qnli", tmp_path, 0.2)
    assert (len(task.splits["train"].texts), len(task.splits["dev"].texts)) == (8, 2)
    assert not set(task.splits["train"].texts) & set(task.splits["dev"].texts)
    write(tmp_path / "STS-B" / "train.tsv", "sentence1\tsentence2\tscore", "a\tb\t4.750", "c\td\t0")
    write(tmp_path / "STS-B" / "dev.tsv", "sentence1\tsentence2\tscore", "a\tb\t1")
    assert glue.load("stsb", tmp_path, None).splits["train"].labels.tolist() == [4.75, 0.0]


def test_server_files(tmp_path):
    glue.write_server_file(tmp_path / "RTE.tsv", "rte", np.array([[2.0, 1.0], [0.0, 1.0]]))
    assert (tmp_path / "RTE.tsv").read_text() == "index\tprediction\n0\tentailment\n1\tnot_entailment\n"
    glue.write_server_file(tmp_path / "CoLA.tsv", "cola", np.array([[2.0, 1.0], [0.0, 1.0]]))
    assert (tmp_path / "CoLA.tsv").read_text() == "index\tprediction\n0\t0\n1\t1\n"
    glue.write_server_file(tmp_path / "STS-B.tsv", "stsb", np.array([5.4, 2.5]))
    assert (tmp_path / "STS-B.tsv").read_text() == "index\tprediction\n0\t5.000\n1\t2.500\n"


MOLECULES = ["c1ccccc1C", "c1ccccc1CC", "c1ccccc1CCC", "c1ccccc1CCCC", "c1ccccc1O", "c1ccccc1CO", "c1ccccc1N", "CCO"]
MOLECULES += ["C1CCCCC1", "C1CCCC1", "c1ccncc1", "C1CCNCC1"]


def test_moleculenet_missing_labels_and_unparsable_rows(tmp_path, caplog):
    pytest.importorskip("rdkit")
    rows = [f"{smiles},{i % 2},{'' if i % 3 else 1}" for i, smiles in enumerate([*MOLECULES, "no molecule"])]
    write(tmp_path / "tox21.csv", "smiles,A,B", *rows)
    with caplog.at_level(logging.WARNING, logger="unmask"):
        task = moleculenet.load("tox21", tmp_path)
    assert "1 of 13 rows left out" in caplog.text
    assert "have no two classes in the test split and are not in its score" in caplog.text
    assert sum(len(split.texts) for split in task.splits.values()) == len(MOLECULES)
    assert task.labels == ("A", "B")
    together = np.concatenate([split.labels for split in task.splits.values()])
    assert np.isnan(together[:, 1]).sum() == 8
    assert set(together[~np.isnan(together[:, 1]), 1]) == {1.0}
    assert (task.selected_on, task.reported_on) == ("valid", "test")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_tables_of_every_format_are_one_task(tmp_path, suffix):
    frame = pd.DataFrame({"q": ["a, b", "c", "d", "NA"], "a": ["e", "f", "g", "h"], "label": ["x", "y", "y", "x"]})
    path = tmp_path / f"t{suffix}"
    match suffix:
        case ".csv":
            frame.to_csv(path, index=False)
        case ".tsv":
            frame.to_csv(path, index=False, sep="\t")
        case ".jsonl":
            frame.to_json(path, orient="records", lines=True)
        case _:
            frame.to_parquet(path)
    task = table.load(path, path, ["q", "a"], ["label"])
    assert task.splits["dev"].texts == [("a, b", "e"), ("c", "f"), ("d", "g"), ("NA", "h")]
    assert (task.kind, task.labels) == (CLASSIFICATION, ("x", "y"))
    assert task.splits["dev"].labels.tolist() == [0, 1, 1, 0]


def test_the_kind_of_a_table_follows_from_its_labels(tmp_path):
    many = [f"text {i},{i / 7},{i % 2},{'' if i % 5 else 1}" for i in range(120)]
    path = write(tmp_path / "t.csv", "text,value,flag,other", *many)
    assert table.load(path, None, ["text"], ["value"], split_dev=0.2).kind == REGRESSION
    assert table.load(path, None, ["text"], ["flag"], split_dev=0.2).kind == CLASSIFICATION
    several = table.load(path, None, ["text"], ["flag", "other"], split_dev=0.2)
    assert several.kind == MULTI_LABEL
    assert np.isnan(several.splits["train"].labels).any()


# --- SQuAD ------------------------------------------------------------------------------------------------------------

CONTEXT = " ".join(sentences(12, 5))


def squad_data() -> squad.SquadData:
    middle = CONTEXT.index(WORDS[3], len(CONTEXT) // 2)
    answer = CONTEXT[middle : CONTEXT.index(" ", middle + len(WORDS[3]) + 1)]
    questions = [
        squad.Question("a", "amber birch ?", CONTEXT, [(answer, middle)]),
        squad.Question("b", "cedar " * 90 + "?", CONTEXT, []),
        squad.Question("c", "delta ?", "ember fjord grove", [("fjord", 6), ("grove", 12)]),
    ]
    return squad.SquadData(questions, questions)


def test_squad_windows_cover_the_paragraph_and_point_at_the_answer(encoder_folder):
    data, encoder = squad_data(), Encoder(str(encoder_folder))
    found = squad.windows(data.dev, encoder, 48)
    assert sum(window.question == 0 for window in found) > 3
    for number, question in enumerate(data.dev):
        own = [window for window in found if window.question == number]
        assert all(len(window.offsets) <= 48 for window in own)
        covered = {i for w in own for span in w.offsets if span for i in range(*span)}
        assert covered >= {i for i, character in enumerate(question.context) if character != " "}
        spans = [(w, *squad.span_of(w, question)) for w in own]
        texts = {question.context[w.offsets[i][0] : w.offsets[j][1]].strip() for w, i, j in spans if j}
        assert texts == ({question.answers[0][0]} if question.answers else set())


def test_squad_certain_logits_give_the_gold_answers(encoder_folder, tmp_path):
    data, encoder = squad_data(), Encoder(str(encoder_folder))
    found = squad.windows(data.dev, encoder, 48)
    start, end = np.zeros((2, len(found), 48))
    for place, window in enumerate(found):
        first, last = squad.span_of(window, data.dev[window.question])
        start[place, first], end[place, last] = (9.0, 9.0) if last else (4.0, 4.0)
    result = squad.outcome(data, found, start, end)
    assert result.scores["exact"] == result.scores["f1"] == 100.0
    assert (result.scores["HasAns_total"], result.scores["NoAns_total"]) == (2, 1)
    assert result.predictions["b"] == ""
    assert result.null_odds["b"] > 0 > result.null_odds["a"]
    squad.write_files(tmp_path / "files", result)
    nbest = json.loads((tmp_path / "files" / "nbest_predictions.json").read_text())
    assert nbest["a"][0]["text"] == data.dev[0].answers[0][0]
    assert sum(entry["probability"] for entry in nbest["a"]) == pytest.approx(1)
    assert {p.name for p in (tmp_path / "files").iterdir()} == {
        "predictions.json",
        "nbest_predictions.json",
        "null_odds.json",
    }


def squad_json(path: Path, questions: list[squad.Question]) -> Path:
    paragraphs = [
        {
            "context": q.context,
            "qas": [
                {"id": q.id, "question": q.text, "answers": [{"text": t, "answer_start": s} for t, s in q.answers]}
            ],
        }
        for q in questions
    ]
    return write(path, json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))


def test_squad_from_files_to_a_table(encoder_folder, tmp_path, capsys):
    for split in ("train", "dev"):
        squad_json(tmp_path / "squad" / f"{split}-v2.0.json", squad_data().dev)
    argv = ["evaluate", "squad", str(encoder_folder), "--data_dir", str(tmp_path / "squad"), "--seeds", "1"]
    assert main([*argv, "--output_dir", str(tmp_path / "out"), "--disable_tqdm", "--published"]) == 0
    assert "published" in capsys.readouterr().out
    assert list((tmp_path / "out" / "cells").glob("squad-seed1-*/null_odds.json"))
    report = json.loads((tmp_path / "out" / "squad.json").read_text())
    scores = report["cells"][0]["scores"]["dev"]
    assert {"f1", "exact", "HasAns_f1", "NoAns_exact", "best_f1_thresh", "threshold"} <= set(scores)
    with pytest.raises(UserError, match="does not fit at character 500"):
        squad.read(squad_json(tmp_path / "bad.json", [squad.Question("q", "?", "short", [("text", 500)])]))


# --- the whole way ----------------------------------------------------------------------------------------------------


@pytest.fixture
def toy_glue(tmp_path) -> Path:
    for split, count, seed in (("train", 200, 3), ("dev", 80, 4)):
        texts, labels = labelled(count, seed)
        rows = [f"{text}\t{label}" for text, label in zip(texts, labels, strict=True)]
        write(tmp_path / "glue" / "SST-2" / f"{split}.tsv", "sentence\tlabel", *rows)
        pairs = [f"{text}\t{text}\t{5 * label}" for text, label in zip(texts, labels, strict=True)]
        write(tmp_path / "glue" / "STS-B" / f"{split}.tsv", "sentence1\tsentence2\tscore", *pairs)
    write(tmp_path / "glue" / "SST-2" / "test.tsv", "index\tsentence", "0\twrong birch", "1\tright birch")
    return tmp_path / "glue"


def test_two_encoders_side_by_side_and_nothing_twice(encoder_folder, toy_glue, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    torch.manual_seed(1)
    AutoModel.from_config(AutoModel.from_pretrained(encoder_folder).config).save_pretrained(other)
    Encoder(str(encoder_folder)).tokenizer.save_pretrained(other)
    flags = ["--tasks", "sst2", "--data_dir", str(toy_glue), "--seeds", "2", "--learning_rates", "1e-5,2e-3"]
    flags += [
        "--batch_sizes",
        "16",
        "--epochs",
        "6",
        "--resamples",
        "50",
        "--disable_tqdm",
        "--output_dir",
        str(tmp_path / "out"),
        "--published",
        "--test",
    ]
    argv = ["evaluate", "glue", str(encoder_folder), str(other), *flags]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "less" in printed
    assert "RoBERTa (MAE-LM's), published" in printed
    report = json.loads((tmp_path / "out" / "glue.json").read_text())
    assert len(report["cells"]) == 2 * 2 * 2
    best = report["scores"][str(encoder_folder)]["sst2"]
    assert best["settings"]["learning_rate"] == 2e-3
    assert best["settings_tried"] == 2
    assert best["headline"] == np.median(best["dev"]["accuracy"]["seeds"]) > 0.9
    assert {"torch", "transformers", "unmask"} <= set(report["versions"])
    value, low, high = report["differences"][str(other)]["mean"]
    assert low <= value <= high
    files = sorted((tmp_path / "out" / "glue-server").glob("*/SST-2.tsv"))
    assert len(files) == 2
    assert files[0].read_text() == "index\tprediction\n0\t0\n1\t1\n"

    def again(*args, **kwargs):
        raise AssertionError("a finished cell was run again")

    monkeypatch.setattr(benchmark, "finetune", again)
    assert main(argv) == 0
    assert json.loads((tmp_path / "out" / "glue.json").read_text())["scores"] == report["scores"]
    with pytest.raises(AssertionError):
        main([*argv, "--epochs", "1"])  # another setting is another cell
    (toy_glue / "SST-2" / "dev.tsv").write_text("sentence\tlabel\namber birch\t0\nlagoon\t1\n")
    with pytest.raises(AssertionError):
        main(argv)  # and so are other data


def test_checkpoints_against_their_cost(corpus_file, toy_glue, tmp_path, capsys):
    pretrained = ["pretrain", "--objective", "mae-lm", "--data", str(corpus_file), "--num_hidden_layers", "1"]
    pretrained += ["--hidden_size", "32", "--vocab_size", "300", "--max_length", "32", "--max_steps", "6"]
    run = str(tmp_path / "run")
    assert main([*pretrained, "--save_steps", "2", "--save_total_limit", "9", "--output_dir", run]) == 0
    flags = ["--checkpoints", "--tasks", "sst2,stsb", "--data_dir", str(toy_glue), "--seeds", "1"]
    assert main(["evaluate", "probe", run, *flags, "--output_dir", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "curve.json").read_text())["runs"][run]
    assert [point["step"] for point in found] == [2, 4, 6]
    for cost in curve.COSTS:
        assert 0 < found[0][cost] < found[1][cost] < found[2][cost], cost
    assert found[2]["flops"] == pytest.approx(3 * found[0]["flops"], rel=0.1)
    assert set(found[0]["tasks"]) == {"sst2", "stsb"}
    assert (tmp_path / "out" / "curve.svg").read_text().count("<path") > 10


def point(score: float, cost: float) -> dict[str, float]:
    return {"score": score, **dict.fromkeys(curve.COSTS, cost)}


def test_the_share_of_the_cost_at_which_a_score_is_reached():
    points = {"base": [point(0.5, 10), point(0.8, 100)], "fast": [point(0.6, 20), point(0.9, 60)]}
    points["slow"] = [point(0.5, 50), point(0.7, 500)]
    found = curve.reached(points)
    assert found["fast"] == pytest.approx(dict.fromkeys(curve.COSTS, 0.2 + (0.2 / 0.3) * 0.4))
    assert found["slow"] == {}


# --- what a user can do wrong -----------------------------------------------------------------------------------------


def cases(folder: Path) -> dict[str, tuple[list[str], str]]:
    """By what is wrong: arguments, and what the sentence says."""
    good = write(folder / "good.csv", "text,label", *(f"text {i},{'ab'[i % 2]}" for i in range(8)))
    table = ["table", "{encoder}", "--train"]
    with_dev = [*table, str(good), "--dev"]

    def dev(name: str, *rows: str) -> list[str]:
        return [*with_dev, str(write(folder / name, "text,label", *rows))]

    one_class = str(write(folder / "5.csv", "text,label", "x,a", "y,a"))
    glue = ["glue", "{encoder}"]
    here = ["--data_dir", str(folder)]
    return {
        "a label outside the set": (dev("1.csv", "x,a", "y,c"), "row 2: the label is 'c'"),
        "an empty split": (dev("2.csv"), "dev split of good is empty"),
        "no such column": ([*with_dev, str(good), "--text_column", "txt"], "has no column 'txt': did you mean 'text'"),
        "a label that is missing": (dev("3.csv", "x,"), "row 1 has no label"),
        "an empty text": (dev("4.csv", "x,a", " ,b"), "1 rows without a text"),
        "one class": ([*table, one_class, "--dev", str(good)], "5.csv' have the label 'a'"),
        "labels that are words": ([*with_dev, str(good), "--kind", "regression"], "must be a finite number"),
        "no such kind": ([*with_dev, str(good), "--kind", "regresion"], "did you mean 'regression'"),
        "no table": (["table", "{encoder}"], "--train train.csv"),
        "no dev": ([*table, str(good)], "--split_dev 0.2"),
        "a table that is none": ([*table, str(write(folder / "t.docx", "x"))], "CSV, TSV, JSONL"),
        "a misspelt task": ([*glue, "--tasks", "ssst2", *here], "did you mean 'sst2'"),
        "a misspelt benchmark": (["gleu", "{encoder}"], "did you mean 'glue'"),
        "no encoder": (["glue", "--tasks", "sst2"], "No encoder is named"),
        "no such encoder": (["glue", str(folder / "none"), *here], "No encoder can be loaded"),
        "an encoder twice": ([*glue, "{encoder}"], "named twice"),
        "no such folder": ([*glue, "--data_dir", str(folder / "none")], "There is no folder"),
        "a folder without the task": ([*glue, "--tasks", "rte", *here], "RTE/train.tsv"),
        "no seeds": ([*glue, "--seeds", "0"], "must be at least 1"),
        "a grid of words": ([*with_dev, str(good), "--learning_rates", "high"], "must be numbers with commas"),
        "no checkpoints": ([*with_dev, str(good), "--checkpoints"], "holds no complete checkpoints"),
        "no squad": (["squad", "{encoder}", *here], "holds no train-v2.0.json"),
        "the hub without network": ([*glue, "--tasks", "rte"], "--data_dir FOLDER"),
    }


def test_one_clear_sentence(encoder_folder, tmp_path, capsys):
    for argv, says in cases(tmp_path).values():
        argv = [a.format(encoder=encoder_folder) for a in argv]
        refused(["evaluate", *argv, "--output_dir", str(tmp_path / "out")], says, capsys)
        assert not list(tmp_path.glob("out/*.json"))


MOLECULE_CASES = [
    (["C,1", "N,0"], "has no column 'smiles': its first line must be a header"),
    (["smiles,A", "C,1", "N,2"], "row 2: 'A' is '2', but must be 0, 1, or empty"),
    (["smiles,A", "x y,1", "!!,0"], "train split of bace is empty"),
]


@pytest.mark.parametrize("case", range(len(MOLECULE_CASES)))
def test_one_clear_sentence_for_molecules(case, encoder_folder, tmp_path, capsys):
    pytest.importorskip("rdkit")
    lines, says = MOLECULE_CASES[case]
    write(tmp_path / "bace.csv", *lines)
    refused(
        ["evaluate", "moleculenet", str(encoder_folder), "--tasks", "bace", "--data_dir", str(tmp_path)], says, capsys
    )


def test_cut_texts_are_counted(encoder_folder, caplog):
    encoder = Encoder(str(encoder_folder))
    with caplog.at_level(logging.WARNING, logger="unmask"):
        rows = encoder.encode([("amber " * 50,), ("birch",)], 16, "toy (dev)")
    assert "toy (dev): 1 of 2 texts cut to 16 tokens" in caplog.text
    assert len(rows[0]["input_ids"]) == 16
