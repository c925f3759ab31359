"""Whether a run is on images, and which settings do not go with them."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedConfig

from oomb.train.errors import BadInput
from oomb.train.image_examples import some_have_images
from oomb.train.image_files import check_pillow
from oomb.train.model import sees_images
from oomb.train.rows import RowRule
from oomb.train.settings import RunSettings
from oomb.train.sources import Source


def on_images(settings: RunSettings, config: PreTrainedConfig, sources: Iterable[Source]) -> bool:
    """Whether a run trains on images: as asked for, or as its first rows say.

    Rows are looked at only where the model sees images.

    Raises:
        BadInput: a setting that does not go with images; Pillow is not installed.
    """
    data = settings.data
    asked = data.images
    if asked is None:
        columns = RowRule(
            messages_field=data.messages_field,
            prompt_field=data.prompt_field,
            completion_field=data.completion_field,
        )
        plain = settings.task != "sft" or data.kind in ("text", "tokens")
        asked = (
            not plain and sees_images(settings.model, config) and some_have_images(sources, columns)
        )
    if not asked:
        return False
    spread_reason = "the model counts positions of images itself"
    angles = settings.engine.made().rope_angles if _counts_axes(config) else "model"
    for name, wanted, value, reason in (
        ("task", "sft", settings.task, "trainers of TRL are given text"),
        ("data.simulated_context", None, data.simulated_context, spread_reason),
        ("engine.rope_angles", "model", angles, "positions count height and width"),
    ):
        if value != wanted:
            expected = "null" if wanted is None else repr(wanted)
            raise BadInput(f"{name}: expected {expected} beside images, got {value!r}: {reason}")
    check_pillow()
    return True


def _counts_axes(config: PreTrainedConfig) -> bool:
    """Whether positions of images count time, height and width."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_kind = [inner for inner in rope.values() if isinstance(inner, dict)]
    return any("mrope_section" in each for each in (rope, *by_kind))
