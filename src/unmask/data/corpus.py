"""Open any source of documents: text, FASTA, JSONL, CSV, Parquet, Arrow, the Hub; compressed, globbed or in folders."""

import csv
import glob
import io
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import pyarrow
import xxhash

from unmask.errors import UserError, nearest

logger = logging.getLogger("unmask")

# What `datasets` reads. Every other file is text. "NA" and "null" are words here, and quotes in TSV are characters.
CSV: dict[str, object] = {"keep_default_na": False, "na_values": [""]}
FORMATS: dict[str, tuple[str, dict[str, object]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", CSV),
    ".tsv": ("csv", CSV | {"sep": "\t", "quoting": csv.QUOTE_NONE}),
    ".parquet": ("parquet", {}),
}
FASTA = (".fa", ".fasta", ".fna", ".ffn", ".faa", ".frn")
COMPRESSED = (".gz", ".zst")
SAMPLE_BY = ("auto", "line", "paragraph", "document")
HEAD = 1 << 20  # bytes of a file that decide whether it is text and whether blank lines separate its documents
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
RECORD = 1 << 20  # letters of a FASTA record that are one document at most: a chromosome becomes several
RESIDUES = re.compile(rb"[^A-Za-z*]")
BLANK_LINE = re.compile(rb"\S[^\S\n]*\n[^\S\n]*\n\s*\S")

Reader = Callable[[Counter[str]], Iterator[str]]  # yields documents, counts what it skips


@dataclass
class Corpus:
    """Documents (str), read anew from their source in every iteration; never held in memory as a whole.

    `fingerprint` changes with the content. `skipped` counts by reason what the last complete iteration left out.
    """

    name: str
    fingerprint: str
    readers: list[Reader]
    skipped: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[str]:
        skipped: Counter[str] = Counter()
        for reader in self.readers:
            for document in reader(skipped):
                if document and not document.isspace():
                    yield document
                else:
                    skipped["empty"] += 1
        if skipped != self.skipped:  # say it once, not in every pass
            self.skipped = skipped
            report_skipped(self.name, skipped)


def report_skipped(name: str, skipped: dict[str, int]) -> None:
    """Log one warning with the counts by reason; nothing when nothing was skipped."""
    if skipped:
        counts = "; ".join(f"{reason}: {count:,}" for reason, count in skipped.items())
        logger.warning("%s: skipped %s", name, counts)


def open_corpus(
    data: str | Path | Iterable[str | Path] | datasets.Dataset,
    *,
    text_column: str | None = None,
    sample_by: str = "auto",
) -> Corpus:
    """Open files, globs, folders, data sets saved to disk, a Hub name (`name` or `name:config`) or a `Dataset`.

    A table's text is its column `text_column`, else `text`, else its only string column. A text file's documents are
    its lines (`sample_by="line"`), its blocks between blank lines (`"paragraph"`) or the file (`"document"`);
    `"auto"` takes paragraphs where the first megabyte has a blank line between text. A FASTA file's are its records, in
    capitals, at most a million letters each. Files may end in .gz or .zst.

    Raises `UserError` for a source that does not exist or cannot be read and a table without that text column.
    """
    if sample_by not in SAMPLE_BY:
        raise UserError(f"sample_by '{sample_by}' is not a way to cut text files: {nearest(sample_by, SAMPLE_BY)}")
    if isinstance(data, datasets.Dataset | datasets.DatasetDict):
        table = _train_split(data, "the data set")
        name, sources, identity = "data set", [_table_reader(table, text_column, "the data set")], [table._fingerprint]
    else:
        names = [data] if isinstance(data, str | Path) else list(data)
        if not names:
            raise UserError("no data given: name at least one file, folder, glob or data set")
        name, sources, identity = ", ".join(map(str, names)), [], []
        for path in (path for each in names for path in _expand(each)):
            if isinstance(path, Path):
                sources.append(_open_path(path, text_column, sample_by))
                identity.append(_content_hash(path))
            else:
                table = _load_from_hub(path)
                sources.append(_table_reader(table, text_column, f"'{path}'"))
                identity.append(table._fingerprint)
    identity += [f"text_column={text_column}", f"sample_by={sample_by}"]
    return Corpus(name, xxhash.xxh3_128_hexdigest("\n".join(identity).encode()), sources)


def _expand(name: str | Path) -> list[Path] | list[str]:
    """The files and Arrow folders behind a path, glob or folder; else the Hub name itself."""
    path = Path(name).expanduser()
    if path.exists():
        files = _files(path)
        if not files:
            raise UserError(f"folder '{name}' holds no files: put text, JSONL, CSV or Parquet files there")
        return files
    if isinstance(name, str) and glob.has_magic(name):
        files = [file for match in sorted(glob.glob(str(path), recursive=True)) for file in _files(Path(match))]
        if not files:
            raise UserError(f"no file matches '{name}': check the pattern and the folder it starts from")
        return list(dict.fromkeys(files))  # `**` matches a folder and again what is in it
    if isinstance(name, str) and HUB_NAME.fullmatch(name):
        return [name]
    raise UserError(f"'{name}' does not exist: check the path")


def _files(path: Path) -> list[Path]:
    if not path.is_dir() or _is_arrow_folder(path):
        return [path]
    return [file for child in sorted(path.iterdir()) if not child.name.startswith(".") for file in _files(child)]


def _is_arrow_folder(path: Path) -> bool:
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _content_hash(path: Path) -> str:
    content = xxhash.xxh3_128()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            # The suffixes decide how the bytes are read; lengths keep two files apart from one joined file.
            content.update(f"{''.join(file.suffixes)} {file.stat().st_size}\n".encode())
            with open(file, "rb") as stream:
                while chunk := stream.read(1 << 22):
                    content.update(chunk)
    return content.hexdigest()


def _open_path(path: Path, text_column: str | None, sample_by: str) -> Reader:
    suffix = Path(path.stem).suffix if path.suffix.lower() in COMPRESSED else path.suffix
    try:
        if path.is_dir():
            table = _train_split(datasets.load_from_disk(str(path)), f"'{path}'")
        elif suffix.lower() in FORMATS:
            builder, options = FORMATS[suffix.lower()]
            table = datasets.load_dataset(builder, data_files=glob.escape(str(path)), split="train", **options)
        elif suffix.lower() in FASTA:
            return lambda skipped: _read_fasta(path, skipped)
        else:
            return lambda skipped: _read_text(path, sample_by, skipped)
    except UserError:
        raise
    except Exception as error:  # `datasets` raises anything, and its cause says more than the error itself
        raise UserError(f"'{path}' cannot be read ({_reason(error)}): check that the file is whole") from error
    return _table_reader(table, text_column, f"'{path}'")


def _load_from_hub(name: str) -> datasets.Dataset:
    path, _, config = name.partition(":")
    try:
        return datasets.load_dataset(path, config or None, split="train")
    except Exception as error:  # no network, no such name, no such configuration, no train split, a gated data set
        raise UserError(
            f"'{name}' is neither a file or folder nor a data set with a train split that can be loaded "
            f"({_reason(error)}): check the path or the name"
        ) from error


def _reason(error: BaseException) -> str:
    return str(error.__cause__ or error).strip().split("\n")[0].rstrip(".:") or type(error).__name__


def _train_split(table: datasets.Dataset | datasets.DatasetDict, name: str) -> datasets.Dataset:
    if isinstance(table, datasets.DatasetDict):
        if "train" not in table:
            raise UserError(f"{name} has no train split but {', '.join(table)}: pass the one to train on")
        return table["train"]
    return table


def _table_reader(table: datasets.Dataset, text_column: str | None, name: str) -> Reader:
    columns = list(table.column_names)
    text = [key for key, kind in table.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
    if text_column is not None and text_column not in columns:
        raise UserError(
            f"{name} has no column '{text_column}' but {', '.join(columns)}: {nearest(text_column, columns)}"
        )
    if text_column is not None and text_column not in text:
        raise UserError(f"column '{text_column}' of {name} is not text: choose one of: {', '.join(text) or 'none'}")
    column = text_column or ("text" if "text" in text else text[0] if len(text) == 1 else None)
    if column is None:
        raise UserError(
            f"{name} has several columns or none that could be the text ({', '.join(columns)}): name the one to read "
            "as text_column"
        )

    def read(skipped: Counter[str]) -> Iterator[str]:
        for batch in table.select_columns([column]).with_format(None).iter(batch_size=1000):
            yield from (document or "" for document in batch[column])  # null counts as empty

    return read


def _read_text(path: Path, sample_by: str, skipped: Counter[str]) -> Iterator[str]:
    try:
        with _open_bytes(path) as stream:
            head = stream.read(HEAD)
        if b"\0" in head:
            skipped[f"binary file {path}"] += 1
            return
        if sample_by == "auto":
            sample_by = "paragraph" if BLANK_LINE.search(head) else "line"
        with _open_bytes(path) as stream:
            for block in _blocks(stream, sample_by):
                try:
                    yield _decode(block)
                except UnicodeDecodeError:
                    skipped[f"not valid UTF-8 in {path}"] += 1
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({_reason(error)}): check that the file is whole") from error


def _read_fasta(path: Path, skipped: Counter[str]) -> Iterator[str]:
    """The records of a FASTA file without their headers, in capitals: lower case marks repeats, not other residues.

    Ambiguity codes (N, R, X, ...) and stops (*) are kept; gaps (-, .) and other signs are left out and counted.
    """
    letters: list[bytes] = []
    length, seen = 0, False
    try:
        with _open_bytes(path) as stream:
            for number, line in enumerate(stream, start=1):
                line = line.strip()
                if line[:1] in (b">", b";"):
                    if letters:
                        yield b"".join(letters).decode("ascii")
                    letters, length, seen = [], 0, True
                    continue
                if line and not seen:
                    raise UserError(f"'{path}', line {number}: a FASTA file begins with a '>' line: check what it is")
                residues = RESIDUES.sub(b"", line).upper()
                if len(residues) < len(line):
                    skipped[f"gaps and other signs in {path}"] += len(line) - len(residues)
                while length + len(residues) >= RECORD:
                    room = RECORD - length
                    yield b"".join([*letters, residues[:room]]).decode("ascii")
                    letters, length, residues = [], 0, residues[room:]
                if residues:
                    letters.append(residues)
                    length += len(residues)
        if letters:
            yield b"".join(letters).decode("ascii")
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({_reason(error)}): check that the file is whole") from error


def _open_bytes(path: Path) -> io.BufferedReader:
    # Arrow tells a truncated .gz or .zst from a whole one and reads files of several frames, as pigz and pzstd write.
    return io.BufferedReader(pyarrow.input_stream(str(path)), HEAD)


def _decode(block: bytes) -> str:
    text = block.decode("utf-8").replace("\r\n", "\n").rstrip("\r\n")
    if "\0" in text:
        raise UnicodeDecodeError("utf-8", block, 0, 1, "NUL bytes are not text")
    return text


def _blocks(stream: Iterable[bytes], sample_by: str) -> Iterator[bytes]:
    """Cut a stream of lines into documents; blank lines count as (empty) documents only in `line`."""
    lines: list[bytes] = []
    for number, line in enumerate(stream):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        if sample_by == "line":
            yield line
        elif sample_by == "document" or line.strip():
            lines.append(line)
        elif lines:
            yield b"".join(lines)
            lines = []
    if lines:
        yield b"".join(lines)
