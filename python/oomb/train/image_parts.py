"""Images in messages: which files they are, and the messages as a chat template takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oomb.train.chat import check_messages

_FIELDS = ("image", "path", "url")  # of a part of type image, any of which names its file


def has_images(messages: Any) -> bool:
    """Whether a column holds messages with an image among their parts."""
    turns = messages if isinstance(messages, list) else []
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def taken_out(messages: Any, folder: Path | None, files: list[Path]) -> list[dict[str, Any]]:
    """Messages whose images are bare parts of type ``image``; their files go to ``files``.

    Tables fill in what a part does not have: what is null is left out, as templates look at which
    fields a part has.

    Args:
        folder: that relative paths start from; None: there is none.

    Raises:
        ValueError: ``expected ..., got ...``.
    """
    turns = []
    for turn in check_messages(messages, ("text", "image")):
        content = turn.get("content")
        if isinstance(content, list):
            turn = {**turn, "content": [_part(part, folder, files) for part in content]}
        turns.append(turn)
    return turns


def _part(part: Any, folder: Path | None, files: list[Path]) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") != "image":
        return {name: value for name, value in part.items() if value is not None}
    files.append(_file(part, folder))
    return {"type": "image"}


def _file(part: dict[str, Any], folder: Path | None) -> Path:
    named = {name: part[name] for name in _FIELDS if part.get(name) is not None}
    if len(named) != 1:
        got = ", ".join(named) or "none"
        raise ValueError(f"expected one of {', '.join(_FIELDS)} in a part of type image, got {got}")
    [(field, place)] = named.items()
    if not isinstance(place, str):
        raise ValueError(
            f"expected the path of a local file as {field!r} of an image, got "
            f"{type(place).__name__}"
        )
    place = place.removeprefix("file://")
    if "://" in place or place.startswith("data:"):
        raise ValueError(
            f"expected the path of a local file as {field!r} of an image, got {place[:80]}"
        )
    file = Path(place).expanduser()
    if not file.is_absolute() and folder is None:
        raise ValueError(f"expected an absolute path of an image in a hub's data set, got {place}")
    return file if folder is None else folder / file
