"""Kept outputs of MLPs: the bits of a step on a GPU, in both tiers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_case import gradients
from peft import LoraConfig, get_peft_model

import oomb
from engine.models import VOCABULARY, of
from oomb.core.copying import Copying
from oomb.core.kept_outputs import KeptOutputs

pytestmark = pytest.mark.gpu
_SIZES = {"head_dim": 64, "hidden_size": 192, "intermediate_size": 2048, "num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Gemma3": {"config": "Gemma3TextConfig", "sliding_window": 4096},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"recompute": "none"},
    "pointwise": {"recompute": "pointwise"},
    "layer": {"recompute": "layer"},
    "spilled": {"recompute": "none", "device_memory": "8MiB", "host_memory": "1GiB"},
    "layer, spilled": {"recompute": "layer", "device_memory": "8MiB", "host_memory": "1GiB"},
    "sparse": {"attention": oomb.TopKPages(budget=8)},
    "sparse, spilled": {
        "attention": oomb.TopKPages(budget=8),
        "device_memory": "8MiB",
        "host_memory": "1GiB",
    },
}
CHUNK, CHUNKS = 512, 24


def step(model: Any, **settings: Any) -> tuple[oomb.Step, dict[str, torch.Tensor]]:
    """A second step, and its gradients."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (1, CHUNK * CHUNKS - 40), generator=generator).cuda()
    config = oomb.Config(chunk_size=CHUNK, page_size=64, **settings)
    with oomb.Engine(model, config) as engine:
        for _ in range(2):
            model.zero_grad()
            found = engine.forward_backward(ids, ids)
    return found, gradients(model)


@pytest.mark.parametrize("trained", ["all", "adapters of attention"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_nothing_kept(
    family: str, setting: str, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copying, "least_worth_of_mlp", lambda *_: 0.0)  # so small a model
    # Less computed again in torch's memory would be worth more than these.
    monkeypatch.setattr(KeptOutputs, "loosened", lambda outputs, _: outputs)
    torch.manual_seed(0)
    model: Any = of(family, **{**_SIZES, **FAMILIES[family]}).to("cuda", torch.bfloat16)
    if trained != "all":
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    kept, found = step(model, **SETTINGS[setting])
    none, expected = step(model, **SETTINGS[setting], keep_outputs="none")
    of_all = (CHUNKS - 1) * 3 * CHUNK * 192 * 2
    assert kept.stats.kept_mlp_output_bytes >= of_all
    assert none.stats.kept_mlp_output_bytes == 0
    assert (kept.stats.h2d_bytes > 0) == ("spilled" in setting)
    assert torch.equal(kept.loss, none.loss)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
