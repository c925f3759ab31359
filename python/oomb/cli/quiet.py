"""A command says what is its own to say."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back what libraries tell those who program with them: that a name of theirs will go,
    or that a config could be written otherwise. Errors are raised as ever.

    Imports transformers.
    """
    import transformers

    before = transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        for kind in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", kind)
        transformers.logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers.logging.set_verbosity(before)
