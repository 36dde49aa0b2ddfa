import gzip
import logging

import datasets
import pytest
import zstandard

from unmask.data import corpus as module
from unmask.data import documentation as docs
from unmask.data.corpus import open_corpus
from unmask.data.documentation import documentation
from unmask.errors import UserError


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("sample_by", "documents"),
    [
        ("line", ["one", "two", "three"]),
        ("paragraph", ["one\ntwo", "three"]),
        ("document", ["one\ntwo\n\n \nthree"]),
        ("auto", ["one\ntwo", "three"]),
    ],
)
def test_text_is_cut_the_same_with_bom_and_windows_line_ends(tmp_path, sample_by, documents):
    text = "one\ntwo\n\n \nthree\n\n"
    unix = write(tmp_path / "unix.txt", text)
    windows = write(tmp_path / "windows.smi", b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert list(open_corpus(unix, sample_by=sample_by)) == documents
    assert list(open_corpus(windows, sample_by=sample_by)) == documents


def test_auto_takes_lines_where_only_the_end_is_blank(tmp_path):
    corpus = open_corpus(write(tmp_path / "a.txt", "one\ntwo\n\n\n"))
    assert list(corpus) == ["one", "two"]
    assert corpus.skipped == {"empty": 2}
    assert list(corpus) == ["one", "two"]  # a second pass reads and counts anew
    assert corpus.skipped == {"empty": 2}


def test_compressed_files_of_several_frames_are_read_whole(tmp_path):
    parts = [b"one\n", b"two\n"]
    write(tmp_path / "a.txt.gz", b"".join(map(gzip.compress, parts)))
    write(tmp_path / "b.txt.zst", b"".join(map(zstandard.compress, parts)))
    write(tmp_path / "c.jsonl.gz", gzip.compress(b'{"text": "three"}\n'))
    write(tmp_path / "d.jsonl.zst", zstandard.compress(b'{"text": "four"}\n'))
    assert list(open_corpus(tmp_path)) == ["one", "two", "one", "two", "three", "four"]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_truncated_file_is_refused(tmp_path, compress):
    suffix = ".gz" if compress is gzip.compress else ".zst"
    lines = "".join(f"{number * 7919 % 10007}\n" for number in range(10_000)).encode()
    path = write(tmp_path / f"a.txt{suffix}", compress(lines)[:-100])
    with pytest.raises(UserError, match=r"a\.txt.*whole"):
        list(open_corpus(path))


def test_what_is_not_text_is_counted_and_named(tmp_path, caplog):
    write(tmp_path / "a.txt", b"good\nb\xffd\n\nna\xc3\xafve\nlate\n")
    write(tmp_path / "b.png", b"\x89PNG\0\0\nreadable\n")
    corpus = open_corpus(tmp_path, sample_by="line")
    with caplog.at_level(logging.WARNING, "unmask"):
        assert list(corpus) == ["good", "naïve", "late"]
    assert sorted(corpus.skipped.values()) == [1, 1, 1]
    assert "b.png" in caplog.text
    assert "UTF-8 in" in caplog.text
    assert "a.txt" in caplog.text


def test_nul_bytes_after_the_head_cost_their_line_only(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HEAD", 4)
    corpus = open_corpus(write(tmp_path / "a.txt", b"good\nb\0d\nlate\n"))
    assert list(corpus) == ["good", "late"]
    assert sum(corpus.skipped.values()) == 1


def test_folders_globs_and_lists(tmp_path):
    write(tmp_path / "b.txt", "b\n")
    write(tmp_path / "a" / "a.smi", "a\n")
    write(tmp_path / ".git" / "x.txt", "hidden\n")
    write(tmp_path / ".hidden.txt", "hidden\n")
    assert list(open_corpus(tmp_path)) == ["a", "b"]
    assert list(open_corpus(f"{tmp_path}/**")) == ["a", "b"]
    assert list(open_corpus(f"{tmp_path}/*.txt")) == ["b"]
    assert list(open_corpus([tmp_path / "b.txt", str(tmp_path / "a")])) == ["b", "a"]


def test_a_file_named_like_a_glob(tmp_path):
    write(tmp_path / "a[1].jsonl", '{"text": "one"}\n')
    write(tmp_path / "a1.jsonl", '{"text": "other"}\n')
    assert list(open_corpus(str(tmp_path / "a[1].jsonl"))) == ["one"]


def test_tables(tmp_path):
    table = datasets.Dataset.from_dict({"text": ["one", None, "NA"], "label": [0, 1, 2]})
    table.to_json(tmp_path / "t.jsonl")
    table.to_parquet(tmp_path / "t.parquet")
    table.save_to_disk(tmp_path / "arrow")
    datasets.DatasetDict({"test": table.select([0]), "train": table}).save_to_disk(tmp_path / "splits")
    write(tmp_path / "t.csv", 'text,label\none,0\n"",1\nNA,2\n')
    write(tmp_path / "t.tsv", "text\tlabel\none\t0\n\t1\nNA\t2\n")
    write(tmp_path / "t.json", '[{"text": "one"}, {"text": null}, {"text": "NA"}]')
    for source in [
        table,
        *(tmp_path / name for name in ["t.jsonl", "t.json", "t.parquet", "t.csv", "t.tsv", "arrow", "splits"]),
    ]:
        corpus = open_corpus(source)
        assert list(corpus) == ["one", "NA"], source
        assert corpus.skipped == {"empty": 1}, source


def test_empty_numbers_do_not_make_a_column_text(tmp_path):
    path = write(tmp_path / "t.csv", "smiles,task\nCCO,\nCC,1\n")
    assert list(open_corpus(path)) == ["CCO", "CC"]


def test_quotes_in_tsv_are_characters(tmp_path):
    path = write(tmp_path / "t.tsv", 'text\tlabel\n"To be\t1\nor not" to be\t2\n')
    assert list(open_corpus(path)) == ['"To be', 'or not" to be']


def test_the_text_column(tmp_path):
    one = datasets.Dataset.from_dict({"smiles": ["CCO"], "y": [1.0]})
    two = datasets.Dataset.from_dict({"question": ["q"], "answer": ["a"], "y": [1]})
    assert list(open_corpus(one)) == ["CCO"]
    assert list(open_corpus(two, text_column="answer")) == ["a"]
    with pytest.raises(UserError, match=r"question, answer, y.*text_column"):
        open_corpus(two)
    with pytest.raises(UserError, match=r"'anser'.*question, answer, y.*did you mean 'answer'"):
        open_corpus(two, text_column="anser")
    with pytest.raises(UserError, match=r"'y'.*not text"):
        open_corpus(two, text_column="y")


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(UserError, match="gone"):
        open_corpus(tmp_path / "gone.txt")
    with pytest.raises(UserError, match="no file matches"):
        open_corpus(f"{tmp_path}/*.txt")
    with pytest.raises(UserError, match="'no/such-data-set' is neither a file"):
        open_corpus("no/such-data-set")
    with pytest.raises(UserError, match="holds no files"):
        open_corpus(tmp_path)
    with pytest.raises(UserError, match="did you mean 'line'"):
        open_corpus(tmp_path, sample_by="lines")
    with pytest.raises(UserError, match=r"broken\.jsonl"):
        open_corpus(write(tmp_path / "broken.jsonl", '{"text": "one"'))
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "splits")
    with pytest.raises(UserError, match="no train split but test"):
        open_corpus(tmp_path / "splits")


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path):
    a, b = write(tmp_path / "a.txt", "one\n"), write(tmp_path / "b" / "a.txt", "one\n")
    first = open_corpus(a).fingerprint
    assert open_corpus(b).fingerprint == first
    assert open_corpus(a, sample_by="line").fingerprint != first
    assert open_corpus(a, text_column="x").fingerprint != first
    assert open_corpus([a, b]).fingerprint != first
    write(a, "two\n")
    assert open_corpus(a).fingerprint != first
    table = datasets.Dataset.from_dict({"text": ["a"], "title": ["b"]})
    assert open_corpus(table).fingerprint == open_corpus(table).fingerprint
    assert open_corpus(table).fingerprint != open_corpus(table, text_column="title").fingerprint


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages as site-packages: one large, one small."""
    words = "and this is a sentence of quite a few words that says what the thing is for and why it is there at all"
    functions = [f'def f{i}():\n    """Number {"x" * i} of a large package, {words}."""\n' for i in range(50)]
    write(tmp_path / "site" / "large" / "__init__.py", "\n".join(functions))
    small = f"""
class A:
    \'\'\'About A, {words}:

    >>> A()

    ======  ======
    a table it is
    ======  ======

        f(x) = [1, 2, 3] + {{4}} ** 2 / 7

    The end,
      of A.
    \'\'\'

    def short(self):
        \'\'\'Too short.\'\'\'
    def copy(self):
        \'\'\'Number  of a large
        package, {words}.\'\'\'
""".replace("'''", '"""')
    write(tmp_path / "site" / "small" / "a.py", small)
    write(tmp_path / "site" / "small" / "broken.py", '"""This does not parse"""\n(')
    monkeypatch.setattr(docs.np, "__file__", str(tmp_path / "site" / "numpy" / "__init__.py"))
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path / "cache"))
    return words


def test_documentation_is_prose_without_duplicates(packages):
    documents = list(documentation())
    assert len(documents) == 51
    assert documents[1] == f"About A, {packages}:\nThe end, of A."
    assert len(set(documents)) == len(documents)


def test_documentation_keeps_to_its_budget_and_takes_packages_in_turn(packages):
    corpus = documentation(megabytes=0.001)
    documents = list(corpus)
    assert 800 < sum(len(document.encode()) for document in documents) <= 1000
    assert any(document.startswith("About A") for document in documents)
    assert documentation(megabytes=0.001).fingerprint == corpus.fingerprint


def test_documentation_is_read_from_the_cache(packages, monkeypatch):
    documents = list(documentation())
    monkeypatch.setattr(docs, "_build", None)
    assert list(documentation()) == documents
