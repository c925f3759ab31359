"""Files of images: how large each is, by its header, and its pixels when they are needed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from oomb.train.errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image

_ORIENTATION = 0x0112  # of EXIF
_BITS_PER_SAMPLE = 258  # of TIFF
_TURNED = (5, 6, 7, 8)  # by a quarter, so that width and height change places


class Measured(NamedTuple):
    """A file as its header and its folder describe it; pixels, and what changes with the file."""

    width: int
    height: int
    num_bytes: int
    changed: int


def check_pillow() -> None:
    """Raises BadInput where images cannot be read at all."""
    if find_spec("PIL") is None:
        raise BadInput("data.images: expected pillow to be installed; pip install 'oomb[images]'")


def measured(file: Path) -> Measured:
    """Size of an image as it is shown; no pixel is decoded.

    Raises:
        ValueError: no such file, or no image.
    """
    from PIL import Image  # optional

    try:
        status = os.stat(file)
        with Image.open(file) as image:
            width, height = image.size
            # A PNG's own decodes all pixels where its header has none.
            if Image.Image.getexif(image).get(_ORIENTATION) in _TURNED:
                width, height = height, width
    except Exception as error:  # Pillow's readers raise what they raise
        raise ValueError(_unreadable(file, error)) from error
    return Measured(width, height, status.st_size, status.st_mtime_ns)


def decoded(file: Path) -> Image:
    """An image as it is shown, in RGB.

    Raises:
        ValueError: no such file, or no image.
    """
    from PIL import Image, ImageOps  # optional

    try:
        with Image.open(file) as image:
            shown = ImageOps.exif_transpose(image)
            return _in_bytes(shown, _bits(image)).convert("RGB")
    except Exception as error:  # Pillow's readers raise what they raise
        raise ValueError(_unreadable(file, error)) from error


def _bits(image: Image) -> int:
    """Of a gray value, of those that Pillow holds in more than a byte."""
    of_tiff = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))
    return int(of_tiff[0])


def _in_bytes(image: Image, bits: int) -> Image:
    """The upper eight bits of gray values of more, which Pillow would clip to 255."""
    if not image.mode.startswith("I") or not 8 < bits <= 16:
        return image
    import numpy as np  # help must not load it
    from PIL import Image as images  # optional

    return images.fromarray((np.asarray(image) >> (bits - 8)).clip(0, 255).astype(np.uint8))


def _unreadable(file: Path, error: Exception) -> str:
    reason = (getattr(error, "strerror", None) or str(error)).partition("\n")[0][:200]
    return f"expected an image, got {file}: {reason or type(error).__name__}"
