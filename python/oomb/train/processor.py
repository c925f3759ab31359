"""What a model's processor makes of a text and its images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer

from oomb.model.images import IMAGE_ARGUMENTS
from oomb.train.errors import BadInput
from oomb.train.tokenise import with_every_character

if TYPE_CHECKING:
    from PIL.Image import Image

_BESIDE = ("input_ids", "attention_mask")


class Processing:
    """A processor of transformers, as a run on images uses it.

    Attributes:
        placeholder: what stands for an image in the text that the chat template writes.
        identity: of all that tokens depend on besides text and images.

    Raises:
        BadInput: it has no placeholder for images.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.placeholder: str = getattr(processor, "image_token", None) or ""
        if not self.placeholder:
            raise BadInput(
                "model.name: expected a processor with a token for images, got "
                f"{type(processor).__name__}"
            )
        written = processor.tokenizer.backend_tokenizer.to_str()
        self.tokenizer = Tokenizer.from_str(with_every_character(written))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._written: dict[tuple[int, int], str] = {}
        parts = (
            transformers.__version__,  # whose code it is
            type(processor).__name__,
            processor.to_json_string(),
            self.tokenizer.to_str(),
        )
        self.identity = hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def written(self, width: int, height: int) -> str:
        """What the processor puts in the placeholder's stead for an image of that size."""
        size = width, height
        if size not in self._written:
            from PIL import Image  # optional

            heard = _Heard(self._processor.tokenizer)
            self._processor.tokenizer = heard
            try:
                self._made(self.placeholder, [Image.new("RGB", size)])
            finally:
                self._processor.tokenizer = heard.tokenizer
            self._written[size] = heard.text
        return self._written[size]

    def __call__(self, text: str, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """``input_ids`` [1, tokens], and what the model's forward takes beside them for images.

        Raises:
            BadInput: it makes something that the engine does not pass to the model.
        """
        made = self._made(text, images)
        for name in made:
            if name not in (*_BESIDE, *IMAGE_ARGUMENTS):
                raise BadInput(
                    "model.name: expected a processor that makes what the engine passes to the "
                    f"model ({', '.join(IMAGE_ARGUMENTS)}), got {name}"
                )
        return {name: value for name, value in made.items() if name != "attention_mask"}

    def _made(self, text: str, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        # The template has written the text's begin and end tokens.
        made = self._processor(
            text=[text], images=[list(images)], add_special_tokens=False, return_tensors="pt"
        )
        return dict(made)


class _Heard:
    """A tokenizer that remembers the last text it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: Any, *args: Any, **keywords: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self.tokenizer(text, *args, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)
