"""Metrics against scikit-learn and SciPy where they stand, the golden files, and definitions written out."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import pearsonr, rankdata
from sklearn.metrics import roc_auc_score

from unmask.evaluation import metrics
from unmask.evaluation.compare import Difference, paired_bootstrap
from unmask.evaluation.moleculenet import random_smiles, rdkit_chem, scaffold_split

GOLDEN = Path(__file__).parent / "golden"
SHARED = Path(__file__).parents[2] / "shared" / "data" / "moleculenet"


@pytest.mark.parametrize("with_probability", [False, True])
def test_squad_is_the_official_scripts(with_probability):
    golden = json.loads((GOLDEN / "squad_metric.json").read_text())
    probability = golden["no_answer_probability"] if with_probability else None
    expected = golden["summary_with_no_answer_probability" if with_probability else "summary"]
    found = metrics.squad(golden["references"], golden["predictions"], probability)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-9), name
    for question, answers in golden["references"].items():
        exact, f1 = metrics.exact_and_f1(answers, golden["predictions"][question])
        assert (exact, f1) == pytest.approx((golden["exact"][question], golden["f1"][question]), abs=1e-9)


def test_a_question_without_a_prediction_is_named():
    with pytest.raises(ValueError, match="'b' for one"):
        metrics.squad({"a": ["x"], "b": []}, {"a": "x"})


def confusion(labels, scores):
    chosen = scores.argmax(1)
    return [int(((labels == y) & (chosen == p)).sum()) for y, p in ((1, 1), (0, 0), (0, 1), (1, 0))]


@pytest.mark.parametrize("seed", range(5))
def test_classification_metrics_by_their_definitions(seed):
    rng = np.random.default_rng(seed)
    labels, scores = rng.integers(0, 2, 50), rng.normal(size=(50, 2))
    tp, tn, fp, fn = confusion(labels, scores)
    found = metrics.score(("accuracy", "f1", "matthews"), labels, scores)
    assert found["accuracy"] == pytest.approx((tp + tn) / 50)
    assert found["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    root = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert found["matthews"] == pytest.approx((tp * tn - fp * fn) / root)


def test_correlations_by_their_definitions():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 80).astype(float)  # with ties
    scores = labels + rng.normal(size=80)
    found = metrics.score(("pearson", "spearman"), labels, scores)
    a, b = labels - labels.mean(), scores - scores.mean()
    assert found["pearson"] == pytest.approx((a @ b) / ((a @ a) * (b @ b)) ** 0.5)
    assert found["spearman"] == pytest.approx(pearsonr(rankdata(labels), rankdata(scores)).statistic)
    assert metrics.score(("pearson", "spearman"), labels, np.ones(80)) == {"pearson": 0.0, "spearman": 0.0}


def test_roc_auc_leaves_out_what_was_not_measured():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, (60, 4)).astype(float)
    scores = rng.normal(size=(60, 4)) + labels
    labels[::3, 0] = np.nan
    labels[:, 1] = 1.0  # one class alone
    labels[:, 3] = np.nan  # never measured
    known = ~np.isnan(labels[:, 0])
    each = [roc_auc_score(labels[known, 0], scores[known, 0]), roc_auc_score(labels[:, 2], scores[:, 2])]
    assert metrics.roc_auc(labels, scores) == pytest.approx(np.mean(each))
    assert metrics.tasks_without_both_classes(labels) == [1, 3]
    as_zero = np.nan_to_num(labels[:, :1])
    assert metrics.roc_auc(as_zero, scores[:, :1]) != pytest.approx(each[0])
    assert np.isnan(metrics.roc_auc(np.ones((5, 1)), scores[:5, :1]))


@pytest.mark.parametrize("name", ["bace", "bbbp"])
def test_scaffold_split_is_deepchems(name):
    pytest.importorskip("rdkit")
    if not SHARED.is_dir():
        pytest.skip("MoleculeNet's files are not here")
    from unmask.evaluation.table import read_table

    golden = json.loads((GOLDEN / f"scaffold_{name}.json").read_text())
    smiles = list(read_table(SHARED / f"{name}.csv")["smiles"])
    train, valid, test = scaffold_split(smiles)
    assert len(smiles) == golden["rows"]
    assert sorted(train) == sorted(golden["train"])
    assert sorted(valid) == sorted(golden["valid"])
    assert sorted(test) == sorted(golden["test"])


def test_scaffolds_stay_together_and_unparsable_rows_are_in_none():
    pytest.importorskip("rdkit")
    smiles = ["c1ccccc1C", "no molecule", *("c1ccccc1" + "C" * n for n in range(2, 9)), "C1CCCCC1", "c1ccncc1"]
    train, valid, test = scaffold_split(smiles)
    assert sorted([*train, *valid, *test]) == [i for i in range(len(smiles)) if i != 1]
    assert set(train) == {0, *range(2, 9)}  # 8 of 10 share a ring
    assert (len(valid), len(test)) == (1, 1)


def test_enumerated_smiles_are_the_same_molecule():
    pytest.importorskip("rdkit")
    chem = rdkit_chem()
    smiles = "CC(=O)Oc1ccccc1C(=O)O"
    others = {random_smiles(smiles, seed) for seed in range(1, 20)}
    assert len(others) > 5
    assert {chem.CanonSmiles(other) for other in others} == {chem.CanonSmiles(smiles)}
    assert random_smiles(smiles, 3) == random_smiles(smiles, 3)


def hits(predictions, rows):
    return float(predictions[rows].mean())


def test_bootstrap_interval_is_that_of_the_paired_difference():
    """Two systems that agree but on a few rows: the interval is that of the rows on which they differ."""
    rng = np.random.default_rng(0)
    first = [(rng.random(400) < 0.7).astype(float)]
    second = [first[0].copy()]
    second[0][:40] = 1.0
    value, draws = paired_bootstrap(hits, first, second, 2000)
    each = second[0] - first[0]
    assert value == pytest.approx(each.mean())
    found = Difference.of(value, draws)
    error = each.std() / 400**0.5
    assert found.low == pytest.approx(value - 1.96 * error, abs=0.3 * error)
    assert found.high == pytest.approx(value + 1.96 * error, abs=0.3 * error)


def test_bootstrap_takes_seeds_too():
    rng = np.random.default_rng(0)
    first = [(rng.random(2000) < p).astype(float) for p in (0.5, 0.5, 0.5)]
    second = [(rng.random(2000) < p).astype(float) for p in (0.4, 0.6, 0.8)]
    value, draws = paired_bootstrap(hits, first, second, 500)
    assert value == pytest.approx(0.1, abs=0.03)
    low, high = Difference.of(value, draws)[1:]
    assert low < 0  # one seed is worse by 0.1: rows alone would give 0.1 ± 0.02
    assert high > 0.2
