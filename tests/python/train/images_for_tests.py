"""Tiny models that see images, processors over bytes for them, and conversations with images."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from PIL import Image
from tiny_runs import settings_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Parts of type image become the placeholder; text may be a string or parts.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' or 'image' in p %}PLACEHOLDER"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<boi>", "<img>", "<eoi>", "<video>"]
IM_START, IM_END, BOI, IMAGE, EOI, VIDEO = range(256, 262)


def tokenizer(placeholder: str) -> PreTrainedTokenizerFast:
    """A token per byte, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    names = {"boi_token": "<boi>", "image_token": "<img>", "eoi_token": "<eoi>"}
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        extra_special_tokens={**names, "video_token": "<video>"},
    )
    made.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    return made


def gemma_processor() -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    words = tokenizer("<boi>")
    return transformers.Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}),
        words,
        chat_template=words.chat_template,
        image_seq_length=4,
    )


class _WithoutVideos(transformers.Qwen3VLProcessor):  # type: ignore[misc]
    """Videos need torchvision, which tests do without."""

    def check_argument_for_proper_class(self, *_: Any) -> None:
        pass


def qwen_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    words = tokenizer("<boi><img><eoi>")
    images = Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 4096},
    )
    return _WithoutVideos(images, words, chat_template=words.chat_template)


_TEXT: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 4}


def gemma_model() -> Any:
    config = transformers.Gemma3Config(
        text_config={
            **_TEXT,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
        vision_config={
            **_TOWER,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_index=BOI,
        eoi_token_index=EOI,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def qwen_model() -> Any:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    config = transformers.Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config={
            **_TOWER,
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BOI,
        vision_end_token_id=EOI,
    )
    torch.manual_seed(0)
    return transformers.Qwen3VLForConditionalGeneration(config)


def picture(file: Path, width: int, height: int, seed: int = 0) -> str:
    """A file of noise; its name."""
    draw = random.Random(seed)
    image = Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))
    image.save(file)
    return file.name


def conversations(folder: Path, number: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    """With none, one or two images each, of unlike sizes, named in each way there is."""
    draw, found = random.Random(seed), []
    for row in range(number):
        content: list[dict[str, Any]] = []
        for image in range(row % 3):
            name = picture(
                folder / f"{seed}-{row}-{image}.png",
                draw.choice([12, 24, 40]),
                draw.choice([8, 16, 33]),
                seed=100 * row + image,
            )
            field = ("image", "path", "url")[(row + image) % 3]
            content += [{"type": "image", field: name}, {"type": "text", "text": f"{image}?"}]
        asked = content or f"what is {row}"
        found.append(
            [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": f"it is {row}, " * draw.randint(1, 4)},
                {"role": "user", "content": "and then"},
                {"role": "assistant", "content": [{"type": "text", "text": f"then {row + 1}"}]},
            ]
        )
    return found


def write_chats(file: Path, chats: list[Any]) -> Path:
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in chats))
    return file


FAMILIES = {  # of the second transformers has no class for text
    "gemma3": (gemma_model, gemma_processor),
    "qwen3-vl": (qwen_model, qwen_processor),
}


def prepare_images(folder: Path, chats: int = 9, **changes: Any) -> Path:
    """A Gemma 3 with its processor, conversations and a YAML file in a folder; the file's path."""
    gemma_model().save_pretrained(folder / "model")
    gemma_processor().save_pretrained(folder / "model")
    data = {"train": str(write_chats(folder / "chats.jsonl", conversations(folder, chats)))}
    settings = settings_of(folder, data=data | changes.pop("data", {}), **changes)
    del settings["data"]["add_eos"]
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file
