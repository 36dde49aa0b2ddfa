"""DNA and proteins: FASTA files, residues, words of k letters."""

import gzip

import pytest
from test_cli import flags, refused
from test_training import SMALL
from transformers import AutoTokenizer

from unmask.cli import main
from unmask.data.corpus import RECORD, open_corpus
from unmask.data.packing import tokenize
from unmask.data.tokenizers import overlapping, train_tokenizer
from unmask.errors import UserError

FASTA = """; an old-style comment
>chr1 a header with words ACGT
ACGTacgtNN
RYACGT

>chr2
acgt-ACGT*
>empty
>chr3
TTTT"""


@pytest.fixture
def fasta(tmp_path):
    path = tmp_path / "genome.fa"
    path.write_text(FASTA)
    return path


def test_records_without_headers_in_capitals(fasta, tmp_path):
    corpus = open_corpus(fasta)
    assert list(corpus) == ["ACGTACGTNNRYACGT", "ACGTACGT*", "TTTT"]
    assert sum(corpus.skipped.values()) == 1, "one gap"
    with gzip.open(tmp_path / "genome.fa.gz", "wt") as file:
        file.write(FASTA)
    assert list(open_corpus(tmp_path / "genome.fa.gz")) == list(corpus)


def test_what_is_no_fasta_is_named(tmp_path):
    (tmp_path / "x.fasta").write_text("\nACGT\n>late\nACGT\n")
    with pytest.raises(UserError, match="line 2: a FASTA file begins with a '>' line"):
        list(open_corpus(tmp_path / "x.fasta"))


def test_a_chromosome_becomes_several_documents_and_loses_nothing(tmp_path):
    letters = "ACGTTGCAAT" * (RECORD // 4)
    lines = "\n".join(letters[i : i + 70] for i in range(0, len(letters), 70))
    (tmp_path / "long.fna").write_text(f">long\n{lines}\n>short\nAC\n")
    *pieces, short = open_corpus(tmp_path / "long.fna")
    assert "".join(pieces) == letters
    assert max(map(len, pieces)) == RECORD
    assert short == "AC"


def test_residues_are_tokens_ambiguous_ones_too():
    tokenizer = train_tokenizer(["MKV*"], "residue", 32)
    assert len(tokenizer) == 32
    assert tokenizer.tokenize("MKVXB*[MASK]U") == [*"MKVXB*", "[MASK]", "U"]


def test_words_of_k_letters():
    tokenizer = train_tokenizer(["ACGT"], "3-mer", 96)
    assert len(tokenizer) == 5 + 27 + 64
    assert tokenizer.tokenize("ACGTTTNNACGTA") == ["ACG", "TTT", "N", "N", "ACG", "T", "A"]
    with pytest.raises(UserError, match="too small"):
        train_tokenizer(["ACGT"], "3-mer", 50)


def test_overlapping_words(tmp_path):
    assert overlapping("ACGTN", 3) == "ACG CGT GTN"
    assert overlapping("AC", 3) == "AC"
    assert overlapping("ACGT[MASK]CGT", 3) == "ACG CGT [MASK] CGT"
    tokenizer = train_tokenizer(["ACGTACGT"], "3-mer-overlapping", 96)
    tokenizer.save_pretrained(tmp_path / "tok")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tok")
    (tmp_path / "x.fa").write_text(">a\nACGTNA\n")
    for each in (tokenizer, loaded):
        tokens = tokenize(open_corpus(tmp_path / "x.fa"), each, tmp_path / "cache")
        # an ambiguous word is spelled by what it consists of
        assert each.convert_ids_to_tokens(tokens.document(0)) == ["ACG", "CGT", "G", "T", "N", "T", "N", "A"]


@pytest.mark.parametrize("kind", ["residue", "3-mer", "3-mer-overlapping"])
def test_from_a_genome_to_a_filled_mask(kind, tmp_path, capsys):
    (tmp_path / "g.fa").write_text("".join(f">{i}\n{'ACGTTGCA' * 9}\n" for i in range(60)))
    tok, run = tmp_path / "tok", tmp_path / "run"
    size = 32 if kind == "residue" else 96
    words = ["tokenizer", "--data", str(tmp_path / "g.fa"), "--kind", kind, "--vocab_size", str(size)]
    assert main([*words, "--output_dir", str(tok)]) == 0
    values = {**SMALL, "data": tmp_path / "g.fa", "tokenizer": tok, "cache_dir": tmp_path / "c", "output_dir": run}
    assert main(["pretrain", "--objective", "mae-exlm", *flags(values), "--max_steps", "3"]) == 0
    capsys.readouterr()
    assert main(["fill", str(run), "ACGTTG[MASK]ACGTT", "--top_k", "2"]) == 0
    assert capsys.readouterr().out.count("%") == 2
    refused(
        ["tokenizer", "--data", str(tmp_path / "g.fa"), "--kind", kind, "--lowercase", "--output_dir", "x"],
        "capitals",
        capsys,
    )
