"""A guess at what a misspelt name was to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the name most like a misspelt one, or nothing.

    A name that was cut short stands for the first that begins with it.
    """
    names = list(names)
    longer = [one for one in names if one.startswith(name)] if len(name) > 2 else []
    found = longer[:1] or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""
