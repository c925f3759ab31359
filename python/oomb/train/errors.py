"""What a user can correct."""

from __future__ import annotations


class BadInput(ValueError):
    """A setting, file or model that a run cannot use. ``<field>: expected ..., got ...``.

    Raised before anything is written into the run folder.
    """
