"""Whether the Hugging Face hub can be asked, found out once and in a moment."""

from __future__ import annotations

from functools import cache
from typing import Any

_SECONDS = 5.0  # for a connection; a hub that is there answers in less than one


def hub_arguments() -> dict[str, Any]:
    """Arguments for ``from_pretrained``: read the cache alone where the hub cannot be reached.

    The hub's client would try six times in half a minute, and tell of each on standard error.
    """
    return {} if _reachable() else {"local_files_only": True}


@cache
def _reachable() -> bool:
    from huggingface_hub import constants, get_session  # heavy

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception:  # of the network, in the words of whichever client the hub's library has
        return False
    return True
