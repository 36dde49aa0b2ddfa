"""MoleculeNet (Wu et al., 2018): eight classification sets of molecules as SMILES, split by scaffold.

Missing labels stay missing, in training and in scoring. The score is ROC-AUC on the test split, the mean over its tasks
that have both classes; hyperparameters are chosen on the valid split.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unmask.errors import UserError
from unmask.evaluation.metrics import tasks_without_both_classes
from unmask.evaluation.table import read_table
from unmask.evaluation.tasks import MULTI_LABEL, Split, Task, read_flags

logger = logging.getLogger("unmask")

TASKS = ("bbbp", "bace", "clintox", "sider", "tox21", "toxcast", "muv", "hiv")
SMILES_COLUMNS = ("smiles", "mol")

PUBLISHED = {
    "SMILES-BERT (ExLM's)": {"bace": 77.8, "bbbp": 68.6, "tox21": 75.1, "sider": 61.2, "muv": 75.1, "clintox": 89.8}
    | {"toxcast": 64.9, "mean": 73.2},
    "D-MPNN": {"bace": 80.9, "bbbp": 71.0, "tox21": 75.9, "sider": 57.0, "muv": 78.6, "clintox": 90.6}
    | {"toxcast": 65.5, "mean": 74.2},
    "GraphMVP": {"bace": 81.2, "bbbp": 72.4, "tox21": 75.9, "sider": 63.9, "muv": 77.7, "clintox": 79.1}
    | {"toxcast": 63.1, "mean": 73.3},
    "ExLM": {"bace": 79.6, "bbbp": 72.8, "tox21": 78.2, "sider": 64.5, "muv": 78.8, "clintox": 91.6}
    | {"toxcast": 66.9, "mean": 76.1},
}
"""ExLM's table (Zheng et al. 2025) in percent, from a secondary source; HIV is not in it."""


def rdkit_chem() -> Any:
    """RDKit's Chem module, silenced. Raises `UserError` if RDKit is not installed."""
    try:
        from rdkit import Chem, RDLogger
    except ImportError:
        raise UserError(
            "Molecules are split by scaffold with RDKit, which is not installed: pip install 'unmask[molecules]'."
        ) from None
    RDLogger.DisableLog("rdApp.*")  # type: ignore[attr-defined]
    return Chem


def scaffold_split(smiles: Sequence[str]) -> tuple[list[int], list[int], list[int]]:
    """(train, valid, test) row numbers, 80/10/10, as DeepChem's ScaffoldSplitter has them; unparsable rows are in none.

    Molecules with one Bemis-Murcko scaffold stay together; the largest groups go to train, what would overflow it to
    valid, then to test.
    """
    chem = rdkit_chem()
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    groups: dict[str, list[int]] = defaultdict(list)
    for row, text in enumerate(smiles):
        molecule = chem.MolFromSmiles(text)
        if molecule is not None:
            groups[MurckoScaffoldSmiles(mol=molecule, includeChirality=False)].append(row)
    parsed = sum(map(len, groups.values()))
    train: list[int] = []
    valid: list[int] = []
    test: list[int] = []
    for rows in sorted(groups.values(), key=lambda rows: (len(rows), rows[0]), reverse=True):
        if len(train) + len(rows) <= 0.8 * parsed:
            train += rows
        elif len(train) + len(valid) + len(rows) <= 0.9 * parsed:
            valid += rows
        else:
            test += rows
    return train, valid, test


def load(name: str, data_dir: Path | None) -> Task:
    """A set from `NAME.csv` (or .csv.gz) in a folder: a column of SMILES and one for each task, empty: not measured."""
    if data_dir is None:
        raise UserError(
            "MoleculeNet has no stable place to download from: give the folder of its CSV files with --data_dir, "
            f"{name}.csv in it."
        )
    path = next((p for p in (data_dir / f"{name}.csv", data_dir / f"{name}.csv.gz") if p.is_file()), None)
    if path is None:
        raise UserError(f"'{data_dir}' holds no {name}.csv: give the folder of MoleculeNet's CSV files.")
    table = read_table(path)
    column = next((c for c in SMILES_COLUMNS if c in table.columns), None)
    if column is None:
        raise UserError(
            f"'{path}' has no column 'smiles': its first line must be a header, but reads "
            f"'{', '.join(map(str, table.columns[:4]))}'."
        )
    names = tuple(c for c in table.columns if c not in (*SMILES_COLUMNS, "mol_id", "num", "name", "activity"))
    smiles = [str(text) for text in table[column]]
    labels = read_flags(table[list(names)].to_numpy(dtype=object), names, f"'{path}'")
    rows = dict(zip(("train", "valid", "test"), scaffold_split(smiles), strict=True))
    unparsed = len(smiles) - sum(map(len, rows.values()))
    if unparsed:
        logger.warning(
            "%s: %d of %d rows left out, because RDKit cannot parse their SMILES.", path, unparsed, len(smiles)
        )
    splits = {split: Split([(smiles[i],) for i in places], labels[places]) for split, places in rows.items()}
    for split in ("valid", "test"):
        alone = tasks_without_both_classes(labels[rows[split]])
        if alone:
            logger.warning(
                "%s: %d of %d tasks have no two classes in the %s split and are not in its score: %s.",
                name,
                len(alone),
                len(names),
                split,
                ", ".join(names[t] for t in alone[:5]) + (", ..." if len(alone) > 5 else ""),
            )
    return Task(name, MULTI_LABEL, names, ("roc_auc",), splits, selected_on="valid", reported_on="test")


def random_smiles(smiles: str, seed: int) -> str:
    """Another SMILES of the same molecule, its atoms in a random order (enumeration, for training)."""
    chem = rdkit_chem()
    return chem.MolToRandomSmilesVect(chem.MolFromSmiles(smiles), 1, randomSeed=seed)[0]
