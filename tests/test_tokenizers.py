import json
import os
import random
import string
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from unmask.data.corpus import open_corpus
from unmask.data.tokenizers import boundaries, load_tokenizer, train_tokenizer
from unmask.errors import UserError

ENGLISH = [
    "The capital of France is Paris.",
    "The capital of Italy is Rome, and the river there is the Tiber.",
    "A café naïvely sells déjà-vu; 42 people came.",
] * 3
MOLECULES = ["CC(=O)Oc1ccccc1C(=O)O", "C[C@@H](N)C(=O)[O-]", "c1cc[nH]c1", "ClCCBr", "[Na+].[Cl-]"]
UNSEEN = [
    "[13CH3-]",
    "[C@TH1H](F)(Cl)Br",
    "F/C=C\\F",
    "C%12CCCC%12",
    "[Fe+2]",
    "[Fe++]",
    "[238U]",
    "[se]1cccc1",
    "[nH+]1ccccc1",
    "[CH3:1][OH:2]>>[CH2:1]=[O:2]",
    "C[Si](C)(C)C#N",
    "[Og]",
    "*C(=O)$C:N~O",
    "[Rf@OH30](F)",
    "[Unknown]",
]


def train(kind, vocab_size=None, **options):
    corpus = MOLECULES if kind == "smiles" else ENGLISH
    return train_tokenizer(
        corpus, kind, vocab_size or {"smiles": 400, "char": 60, "wordpiece": 100}.get(kind, 280), **options
    )


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "char", "smiles"])
def test_every_kind(kind, tmp_path):
    tokenizer = train(kind)
    text = "C[C@@H](N)C" if kind == "smiles" else "the capital of Rome is Paris"
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id] == [0, 1, 4]
    assert boundaries(tokenizer) == (2, 3)
    assert (ids[0], ids[-1]) == (2, 3)
    assert 1 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text

    pair = tokenizer(text, "CC", return_token_type_ids=True)
    assert pair.input_ids.count(3) == 2
    assert pair.token_type_ids == [0] * len(ids) + [1] * (len(pair.input_ids) - len(ids))
    masked = tokenizer(text + " [MASK]C").input_ids
    assert masked == [*ids[:-1], 4, *masked[len(ids) :]]  # the space before [MASK] belongs to it

    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert loaded(text + " [MASK] C", text).data == tokenizer(text + " [MASK] C", text).data
        assert loaded.decode(ids) == tokenizer.decode(ids)
        assert boundaries(loaded) == (2, 3)


@pytest.mark.parametrize(("kind", "size"), [("bpe", 280), ("wordpiece", 90), ("smiles", 288), ("char", 20)])
def test_the_vocabulary_has_the_size_asked_for(kind, size):
    tokenizer = train(kind, size)
    assert len(tokenizer) == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))


@pytest.mark.parametrize("kind", ["bpe", "char", "smiles"])
def test_the_same_corpus_gives_the_same_tokenizer(kind):
    first, second = (json.loads(train(kind).backend_tokenizer.to_str()) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_bytes_know_everything(kind):
    text = " 中文 \t emoji 🙂\n"
    tokenizer = train(kind)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert 1 not in ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "char"])
def test_lowercase(kind):
    tokenizer = train(kind, lowercase=True)
    assert tokenizer("THE [MASK] Rome").input_ids == tokenizer("the [MASK] rome").input_ids
    assert 4 in tokenizer("THE [MASK] Rome").input_ids
    assert train(kind)("Rome").input_ids != train(kind)("rome").input_ids


def test_fewer_tokens_than_asked_for_are_said(caplog):
    assert len(train("char", 1000)) < 1000
    assert "not 1000" in caplog.text
    assert len(train("char", 10)) == 10
    assert "leaves out" in caplog.text


def test_smiles_atoms_are_tokens():
    tokenizer = train("smiles", 400)
    assert tokenizer.tokenize("C[C@@H](Br)Cl%12[nH]") == ["C", "[C@@H]", "(", "Br", ")", "Cl", "%12", "[nH]"]
    assert tokenizer.tokenize("[13CH3-]") == ["[", "1", "3", "C", "H", "3", "-", "]"]
    assert tokenizer.tokenize("[Sc@@]") == ["[", "Sc", "@@", "]"]
    assert tokenizer.tokenize("Sc1Sn") == ["S", "c", "1", "S", "n"]  # outside brackets: sulphur and an aromatic atom


ATOMS = "[13CH3-] [C@TH1H] [C@@] [Fe+2] [Fe++] [O--] [238U] [se] [nH+] [OH:2] [*] [2H] [Rf@OH30] [NH3+:12]"


@pytest.mark.parametrize("atom", ATOMS.split())
def test_a_bracket_atom_of_the_corpus_is_one_token(atom):
    assert train_tokenizer([f"C{atom}C"], "smiles", 400).tokenize(f"N{atom}N") == ["N", atom, "N"]


@pytest.mark.parametrize("smiles", MOLECULES + UNSEEN)
def test_smiles_have_no_unknowns_and_come_back(smiles):
    tokenizer = train("smiles")
    ids = tokenizer(smiles, split_special_tokens=True).input_ids
    assert 1 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == smiles


def test_any_bracket_atom_can_be_spelled():
    tokenizer, pick = train("smiles"), random.Random(0)
    for _ in range(2000):
        inside = "".join(pick.choices(string.ascii_letters + string.digits + "@+-:*", k=pick.randrange(1, 12)))
        ids = tokenizer(f"C[{inside}]", add_special_tokens=False, split_special_tokens=True).input_ids
        assert not {0, 1, 2, 3, 4} & set(ids)
        assert tokenizer.decode(ids) == f"C[{inside}]"


@pytest.mark.skipif("UNMASK_DATA" not in os.environ, reason="UNMASK_DATA names no folder with smiles/chembl.smi")
def test_chembl_has_no_unknowns():
    corpus = list(open_corpus(Path(os.environ["UNMASK_DATA"]) / "smiles" / "chembl.smi", sample_by="line"))
    tokenizer = train_tokenizer(corpus[:1000], "smiles", 400)
    ids = tokenizer(corpus).input_ids
    assert not any(1 in row for row in ids)
    assert tokenizer.batch_decode(ids[::20], skip_special_tokens=True) == corpus[::20]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "smiles"])
def test_a_vocabulary_smaller_than_its_alphabet_is_refused(kind):
    with pytest.raises(UserError, match="a vocabulary of 20 is too small"):
        train(kind, 20)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "char", "smiles"])
def test_an_empty_corpus_is_refused(kind):
    with pytest.raises(UserError, match="no documents"):
        train_tokenizer([], kind, 1000)


def test_what_the_user_asked_wrongly():
    with pytest.raises(UserError, match="did you mean 'bpe'"):
        train_tokenizer(ENGLISH, "bpee", 1000)
    with pytest.raises(UserError, match="lowercased"):
        train_tokenizer(MOLECULES, "smiles", 1000, lowercase=True)


def test_loading_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="gone"):
        load_tokenizer(tmp_path / "gone")
    whole = train("wordpiece")
    for missing in ("mask", "pad"):
        kept = {f"{role}_token": f"[{role.upper()}]" for role in ("mask", "pad") if role != missing}
        PreTrainedTokenizerFast(tokenizer_object=whole.backend_tokenizer, **kept).save_pretrained(tmp_path / missing)
        with pytest.raises(UserError, match=rf"tokenizer without \[{missing.upper()}\]"):
            load_tokenizer(tmp_path / missing)


def test_boundaries_fall_back_to_bos_and_eos():
    backend = train("wordpiece").backend_tokenizer
    assert boundaries(PreTrainedTokenizerFast(tokenizer_object=backend)) == (None, None)
    # Id 0 is an id, not a missing one.
    assert boundaries(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="[CLS]", eos_token="[PAD]")) == (2, 0)
    assert boundaries(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="[CLS]", cls_token="[PAD]"))[0] == 0
