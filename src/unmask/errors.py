"""The one exception for what a user can cause."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """One sentence that names the thing, says what was expected and what to do. The CLI prints it and exits with 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names as a sentence's end, led by the one nearest to `name`: "did you mean 'mlm'?"."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else "choose one of: " + ", ".join(known)
