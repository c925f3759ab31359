"""The check at construction on a GPU, whose kernels round as they like."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import oomb
from engine.structure_cases import SILENT, STRENGTHS, WRONG, exact

pytestmark = pytest.mark.gpu

CONFIG = oomb.Config(chunk_size=128, page_size=128)


@pytest.mark.parametrize("family", ["Llama", "GptOss", "Mixtral", "Olmoe", "Glm4Moe", "Qwen3Moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_takes_what_is_exact(family: str, dtype: torch.dtype) -> None:
    for loud in (False, True):
        for seed in range(5):
            with torch.device("cuda"):  # its weights are drawn there, much faster
                model = exact(family, dtype, 24, seed, loud=loud)
            oomb.Engine(model, CONFIG)


@pytest.mark.parametrize(("build", "text"), WRONG.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_refuses_what_is_not(build: Callable[[float], PreTrainedModel], text: str) -> None:
    for strength in STRENGTHS:
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(oomb.UnsupportedModelError, match=text):
                oomb.Engine(build(strength).to("cuda", dtype), CONFIG)


@pytest.mark.parametrize(
    ("build", "text"), SILENT.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_refuses_what_values_do_not_tell(build: Callable[[], PreTrainedModel], text: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(oomb.UnsupportedModelError, match=text):
            oomb.Engine(build().to("cuda", dtype), CONFIG)


def test_leaves_random_state_and_mode_as_they_were() -> None:
    model = exact("Llama", torch.bfloat16, 4, 0, loud=True).cuda().train()
    state = torch.cuda.get_rng_state()
    oomb.Engine(model, CONFIG)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(module.training for module in model.modules())
