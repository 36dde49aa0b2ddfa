"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes text beside its place and moves it there."""
    temporary = path.with_name(f".{path.name}.incomplete")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
