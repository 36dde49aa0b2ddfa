import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import EsmTokenizer, PreTrainedTokenizerFast
from transformers.models.canine import CanineTokenizer

from unmask.data import packing
from unmask.data.corpus import Corpus, open_corpus
from unmask.data.packing import Blocks, Rows, Tokens, default_cache_dir, tokenize
from unmask.data.tokenizers import train_tokenizer
from unmask.errors import UserError

START, END, MASK = 2, 3, 4
TEXT = ["a bc", "defg hi", "[MASK] [SEP] x", "j"]


def corpus_of(documents, fingerprint="f", reads=None):
    def read(skipped):
        if reads is not None:
            reads.append(1)
        yield from documents

    return Corpus("corpus", fingerprint, [read])


@pytest.fixture(scope="module")
def characters():
    return train_tokenizer(["abcdefghijklmnopqrstuvwxyz []MASKEP"], "char", 100)


def test_documents_are_stored_with_separators(tmp_path, characters):
    tokens = tokenize(corpus_of(TEXT), characters, tmp_path)
    assert tokens.tokens.dtype == np.uint16
    assert (tokens.start, tokens.end) == (START, END)
    assert [characters.decode(tokens.document(i)) for i in range(len(tokens))] == TEXT
    assert np.flatnonzero(tokens.tokens == END).tolist() == (tokens.starts + tokens.lengths).tolist()
    assert tokens.size == sum(map(len, TEXT)) + len(TEXT) - 1
    assert {p.name for p in tmp_path.iterdir()} == {tokens.path.parent.name}


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "char", "smiles"])
def test_special_tokens_spelled_in_the_text_stay_text(tmp_path, kind):
    tokenizer = train_tokenizer(["all of it [MASK] [SEP] [PAD] [CLS] CCO"], kind, 300)
    for text in ("it [MASK] it", "[SEP]", "[CLS][PAD] it"):
        tokens = tokenize(corpus_of([text], fingerprint=text), tokenizer, tmp_path)
        assert not np.isin(tokens.document(0), [0, 2, 3, 4]).any()
        assert len(tokens.document(0)) > 0
    assert MASK in tokenizer("it [MASK] it").input_ids  # as ever after


def test_a_special_token_known_to_the_model_as_a_piece_is_left_out(tmp_path, caplog):
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5, "b": 6}
    backend = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokens = tokenize(corpus_of(["a [MASK] b", "[SEP]", "b c"]), tokenizer, tmp_path)
    assert tokens.tokens.tolist() == [5, 6, END, 6, 1, END]
    for reason in ("spelled in the text: 2", "unknown to the tokenizer: 1", "without tokens: 1"):
        assert reason in caplog.text
    caplog.clear()
    tokenize(corpus_of([]), tokenizer, tmp_path)  # from the cache
    assert "spelled in the text: 2" in caplog.text


def test_slow_tokenizers(tmp_path):
    (tmp_path / "vocab.txt").write_text("<cls>\n<pad>\n<eos>\n<unk>\nL\nA\nG\n<mask>")
    esm = EsmTokenizer(str(tmp_path / "vocab.txt"))
    assert not esm.is_fast
    tokens = tokenize(corpus_of(["LAG", "A<mask>AL"]), esm, tmp_path)
    assert tokens.tokens.tolist() == [4, 5, 6, 2, 5, 5, 4, 2]
    tokens = tokenize(corpus_of(["ab"]), CanineTokenizer(), tmp_path)  # its special ids lie beyond 65,536
    assert tokens.tokens.dtype == np.uint32
    assert tokens.document(0).tolist() == [97, 98]
    assert tokens.end == 0xE001


def test_the_second_call_reads_the_cache(tmp_path, characters):
    reads = []
    first = tokenize(corpus_of(TEXT, reads=reads), characters, tmp_path)
    characters("a", padding="max_length", truncation=True, max_length=4)  # leaves its settings in the backend
    second = tokenize(corpus_of(TEXT, reads=reads), characters, tmp_path)
    assert len(reads) == 1
    assert second.path == first.path
    assert second.starts.tolist() == first.starts.tolist()
    other = train_tokenizer(["abc"], "char", 100)
    assert tokenize(corpus_of(TEXT), other, tmp_path).path != first.path
    assert tokenize(corpus_of(TEXT, "g"), characters, tmp_path).path != first.path


def test_what_the_corpus_skipped_is_said_again_from_the_cache(tmp_path, characters, caplog):
    (tmp_path / "a.txt").write_bytes(b"abc\nb\xffd\ndef\n")
    for _ in range(2):
        caplog.clear()
        assert len(tokenize(open_corpus(tmp_path / "a.txt"), characters, tmp_path / "cache")) == 2
        assert caplog.text.count("not valid UTF-8") == 1


def test_an_interrupted_run_leaves_nothing(tmp_path, characters, monkeypatch):
    monkeypatch.setattr(packing, "BATCH", 1)

    def breaks():
        yield "abc"
        yield "def"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(corpus_of(breaks()), characters, tmp_path)
    assert not list(tmp_path.iterdir())
    assert len(tokenize(corpus_of(TEXT), characters, tmp_path)) == len(TEXT)


def test_who_comes_second_in_a_race_takes_the_first_ones(tmp_path, characters):
    def overtaken():
        tokenize(corpus_of(TEXT), characters, tmp_path)
        yield from TEXT

    tokens = tokenize(corpus_of(overtaken()), characters, tmp_path)
    assert len(tokens) == len(TEXT)
    assert len(list(tmp_path.iterdir())) == 1


def test_batches_do_not_matter(tmp_path, characters, monkeypatch):
    whole = tokenize(corpus_of(TEXT), characters, tmp_path / "a")
    monkeypatch.setattr(packing, "BATCH", 5)
    parts = tokenize(corpus_of(TEXT), characters, tmp_path / "b")
    assert parts.tokens.tolist() == whole.tokens.tolist()
    assert parts.starts.tolist() == whole.starts.tolist()
    assert parts.counts(100).tolist() == whole.counts(100).tolist()


def test_an_empty_corpus_is_refused(tmp_path, characters):
    with pytest.raises(UserError, match="corpus is empty"):
        tokenize(corpus_of([]), characters, tmp_path)
    (tmp_path / "a.txt").write_text("\n \n")
    with pytest.raises(UserError, match=r"a\.txt is empty \(empty\)"):
        tokenize(open_corpus(tmp_path / "a.txt"), characters, tmp_path / "cache")


def test_default_cache_dir(monkeypatch):
    monkeypatch.setenv("UNMASK_CACHE", "/somewhere")
    assert default_cache_dir() == Path("/somewhere")
    monkeypatch.delenv("UNMASK_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "unmask"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


def make(folder, documents, start=START, end=END):
    separator = [] if end is None else [end]
    ids = np.concatenate([[*document, *separator] for document in documents]).astype(np.uint16)
    path = folder / f"{abs(hash((tuple(map(tuple, documents)), end)))}.bin"
    ids.tofile(path)
    lengths = np.array([len(document) for document in documents])
    starts = np.cumsum(lengths + len(separator)) - lengths - len(separator)
    return Tokens(path, "uint16", starts, lengths, start, end, (0, 1, START, END, MASK))


documents = st.lists(st.lists(st.integers(5, 12), min_size=1, max_size=9), min_size=1, max_size=12)
boundary = st.sampled_from([(START, END), (None, END), (START, None), (None, None)])


@settings(deadline=None)
@given(documents, boundary, st.integers(4, 12), st.randoms())
def test_blocks_hold_the_selected_documents(folder, documents, boundary, length, random):
    start, end = boundary
    tokens = make(folder, documents, start, end)
    chosen = random.sample(range(len(documents)), random.randint(1, len(documents)))
    separator = [] if end is None else [end]
    stream = [token for i in chosen for token in [*documents[i], *separator]]
    stream = stream[:-1] if separator else stream

    blocks = Blocks(tokens.select(np.array(chosen)), length)
    rows = list(blocks)  # stops at the end by IndexError
    first, last = int(start is not None), int(end is not None)
    assert len(rows) == len(blocks)
    assert [len(row) for row in rows] == blocks.lengths.tolist()
    assert all(len(row) == length for row in rows[:-1])
    assert 0 < len(rows[-1]) - first - last <= length - first - last
    assert all(row.dtype == np.int64 for row in rows)
    assert all(row[0] == start for row in rows if first)
    assert all(row[-1] == end for row in rows if last)
    assert [token for row in rows for token in row[first : len(row) - last].tolist()] == stream
    # Every block has something to mask.
    assert all((row >= 5).any() for row in rows)


@settings(deadline=None)
@given(documents, boundary, st.integers(4, 8))
def test_rows_are_the_documents_cut(folder, documents, boundary, length):
    start, end = boundary
    rows = Rows(make(folder, documents, start, end), length)
    before, after = [[] if token is None else [token] for token in boundary]
    inner = length - len(before) - len(after)
    assert [row.tolist() for row in rows] == [[*before, *document[:inner], *after] for document in documents]
    assert rows.lengths.tolist() == [len(row) for row in rows]


def test_rows_count_what_they_cut_and_leave_out(folder, caplog):
    rows = Rows(make(folder, [[1, 1], [1, 5], [5, 6, 7], [1, 1, 1, 5]]), 4)
    assert [row.tolist() for row in rows] == [[2, 1, 5, 3], [2, 5, 6, 3]]
    assert "2 of 4 documents have no token to mask" in caplog.text
    assert "1 of 2 documents are cut" in caplog.text
    with pytest.raises(UserError, match="no document has a token"):
        Rows(make(folder, [[1], [1, 1]]), 8)


@settings(deadline=None)
@given(documents, st.floats(0.01, 0.99), st.integers(0, 5))
def test_split_is_by_document_and_large_enough(folder, documents, fraction, seed):
    tokens = make(folder, documents)
    train, held_out = tokens.split(fraction, seed)
    if len(documents) == 1:
        assert held_out is None
        assert train is tokens
        return
    assert len(train) > 0
    assert len(held_out) > 0
    assert sorted([*train.starts, *held_out.starts]) == tokens.starts.tolist()
    share = held_out.lengths.sum() / tokens.lengths.sum()
    assert share >= fraction - 1e-9 or len(train) == 1
    assert (held_out.lengths.sum() - held_out.lengths.max()) / tokens.lengths.sum() < fraction
    again, _ = tokens.split(fraction, seed)
    assert again.starts.tolist() == train.starts.tolist()


def test_splits_differ_by_seed_and_refuse_nonsense(folder, caplog):
    tokens = make(folder, [[5 + i % 8] for i in range(100)])
    assert len(tokens.split(0.1, 0)[1]) == 10
    assert tokens.split(0.1, 0)[1].starts.tolist() != tokens.split(0.1, 1)[1].starts.tolist()
    for fraction in (0, 1, -0.1):
        with pytest.raises(UserError, match="between 0 and 1"):
            tokens.split(fraction, 0)
    make(folder, [[5]]).split(0.1, 0)
    assert "single document" in caplog.text


@settings(deadline=None)
@given(documents, st.randoms())
def test_counts(folder, documents, random):
    chosen = random.sample(range(len(documents)), random.randint(1, len(documents)))
    counts = make(folder, documents).select(np.array(chosen)).counts(20)
    expected = np.bincount([token for i in chosen for token in documents[i]], minlength=20)
    assert counts.dtype == np.int64
    assert counts.tolist() == expected.tolist()


def test_special_tokens_are_not_counted(folder):
    assert make(folder, [[1, 5, 5], [1]]).counts(6).tolist() == [0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("length", [-1, 0, 3])
def test_lengths_without_room_are_refused(folder, length):
    for kind in (Blocks, Rows):
        with pytest.raises(UserError, match=f"length of {length}"):
            kind(make(folder, [[5, 6]]), length)


def test_workers_get_the_file_not_its_content(folder):
    tokens = make(folder, [[5] * 50_000])
    blocks = Blocks(tokens, 128)
    assert blocks[0].tolist() == [2, *[5] * 126, 3]  # the file is open now
    pickled = pickle.dumps(blocks)
    assert len(pickled) < 10_000
    assert pickle.loads(pickled)[5].tolist() == blocks[5].tolist()


def test_a_million_documents_are_fine(folder):
    lengths = np.random.default_rng(0).integers(1, 5, 1_000_000)
    starts = np.cumsum(lengths + 1) - lengths - 1
    ids = np.full(int(lengths.sum()) + len(lengths), 5, np.uint16)
    ids[starts + lengths] = END
    ids.tofile(folder / "million.bin")
    tokens = Tokens(folder / "million.bin", "uint16", starts, lengths, START, END, (0, 1, START, END, MASK))
    train, held_out = tokens.split(0.05, 0)
    assert train.counts(10)[5] + held_out.counts(10)[5] == lengths.sum()
    assert len(Rows(train, 128)) == len(train)
    blocks = Blocks(train, 128)
    assert sum(len(blocks[row]) for row in range(0, len(blocks), 50)) == 128 * len(range(0, len(blocks), 50))


def _race(folder, barrier, results):
    tokenizer = train_tokenizer(["abcdefghij "], "char", 50)
    barrier.wait()
    results.put(len(tokenize(corpus_of(["abc"] * 2000), tokenizer, folder)))


def test_two_processes_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_race, args=(tmp_path, barrier, results), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [2000, 2000]
    for process in processes:
        process.join()
    assert len(list(tmp_path.iterdir())) == 1
