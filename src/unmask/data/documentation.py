"""The corpus that is always there: English prose from the docstrings of the installed Python packages."""

import ast
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import xxhash
from tqdm import tqdm

from unmask.data.corpus import Corpus, open_corpus
from unmask.data.packing import default_cache_dir

logger = logging.getLogger("unmask")

MIN_WORDS = 20
MARKUP = re.compile(r">>>|```|^\s*(\.\. |[-=~^+|*#]{3,}|\|)", re.MULTILINE)
SYMBOLS = re.compile(r"[^a-zA-Z ]")


def documentation(megabytes: float = 10) -> Corpus:
    """English from docstrings, at most `megabytes` (10^6 bytes): one document each, the packages in turn.

    Code examples, tables and directives, docstrings of fewer than 20 words and duplicates are left out. Built once per
    set of installed packages, in the cache folder.
    """
    installed = sorted({f"{package.name}=={package.version}" for package in distributions()})
    key = xxhash.xxh3_128_hexdigest(f"{megabytes} {Path(__file__).read_text()} {installed}".encode())
    path = default_cache_dir() / f"documentation-{key}.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _build(path, int(megabytes * 1e6), Path(np.__file__).parents[1])
    corpus = open_corpus(path, sample_by="paragraph")
    corpus.name = "documentation"
    return corpus


def _build(path: Path, budget: int, site_packages: Path) -> None:
    """Write the documents to a file, blank lines between; whole or not at all."""
    seen: set[str] = set()
    short = duplicates = size = 0
    with (
        tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as scratch,
        tqdm(desc="Reading docstrings", total=budget, unit="B", unit_scale=True) as progress,
        warnings.catch_warnings(action="ignore"),  # the parser's about other people's code
    ):
        with open(whole := Path(scratch, "whole"), "w", encoding="utf-8", newline="\n") as file:
            for docstring in _in_turn([_docstrings(package) for package in _packages(site_packages)]):
                prose = _prose(docstring)
                if len(prose.split()) < MIN_WORDS:
                    short += 1
                elif prose in seen:
                    duplicates += 1
                else:
                    written = len(prose.encode()) + 2
                    if size + written > budget:
                        break
                    seen.add(prose)
                    file.write(prose + "\n\n")
                    size += written
                    progress.update(written)
        os.replace(whole, path)
    logger.info(
        "documentation: %d docstrings, %.1f MB; left out %d of fewer than %d words and %d duplicates",
        len(seen), size / 1e6, short, MIN_WORDS, duplicates,
    )  # fmt: skip


def _packages(site_packages: Path) -> list[list[Path]]:
    """The Python files of each installed package, in a fixed order."""
    packages = [folder for folder in sorted(site_packages.iterdir()) if folder.name.isidentifier() and folder.is_dir()]
    return [[file for file in sorted(folder.rglob("*.py")) if "tests" not in file.parts] for folder in packages]


def _in_turn(streams: list[Iterator[str]]) -> Iterator[str]:
    while streams:
        for stream in list(streams):
            if (item := next(stream, None)) is None:
                streams.remove(stream)
            else:
                yield item


def _docstrings(files: list[Path]) -> Iterator[str]:
    for file in files:
        try:
            source = file.read_bytes()
            if b'"""' not in source:  # nearly all docstrings are quoted so, and parsing is what takes the time
                continue
            tree = ast.parse(source)
        except (SyntaxError, ValueError, OSError):  # templates, files of other Python versions
            continue
        nodes: list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = [tree]
        for node in nodes:
            if docstring := ast.get_docstring(node, clean=False):
                yield docstring
            if isinstance(node, ast.Module | ast.ClassDef):  # what is defined in functions is private to them
                nodes += (n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))


def _prose(docstring: str) -> str:
    """The paragraphs that read like text, one a line, without a blank line between."""
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", docstring) if not MARKUP.search(p)]
    return "\n".join(p for p in paragraphs if p and len(SYMBOLS.sub("", p)) > 0.85 * len(p) and "\0" not in p)
