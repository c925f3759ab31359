"""Images on a GPU: as near to fp64 as ordinary training, and the same bits however pages lie."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import oomb

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine.image_models import Batch, batch_of, make_with_images

pytestmark = pytest.mark.gpu
CONFIG = oomb.Config(chunk_size=256, page_size=64)
Gradients = dict[str, torch.Tensor]


def batch(family: str) -> Batch:
    side = 2 if family == "gemma3" else 8
    rows = [[(60 + 200 * n, side, side) for n in range(4)], [(250, side, side)]]
    made = batch_of(family, rows, 900)
    on_gpu = {name: x.to("cuda") for name, x in made.arguments.items()}
    return Batch(made.input_ids.to("cuda"), on_gpu)


def gradients(model: Any) -> Gradients:
    found = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def ordinary(model: Any, given: Batch) -> Gradients:
    arguments = {
        name: x.to(model.dtype) if x.is_floating_point() else x
        for name, x in given.arguments.items()
    }
    logits = model(input_ids=given.input_ids, use_cache=False, **arguments).logits
    targets = given.input_ids[:, 1:].flatten()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets).backward()
    return gradients(model)


def chunked(model: Any, given: Batch, config: oomb.Config) -> Gradients:
    arguments = {
        name: x.to(model.dtype) if x.is_floating_point() else x
        for name, x in given.arguments.items()
    }
    with oomb.Engine(model, config) as engine:
        engine.forward_backward(given.input_ids, given.input_ids, **arguments)
    return gradients(model)


# torch adds up the gradient of Qwen3-VL's learned positions in any order: calls of ordinary
# training do not repeat its bits either.
UNORDERED = {"model.visual.pos_embed.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3", "gemma4"])
def test_as_near_as_ordinary_training(family: str, dtype: torch.dtype) -> None:
    given = batch(family)
    sizes = {"head_dim": 64, "max_position_embeddings": 4096}
    if family != "gemma4":
        sizes |= {"hidden_size": 48}
    if family == "qwen3-vl":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}
        sizes["rope_parameters"] = {**rope, "mrope_interleaved": True}  # type: ignore[assignment]
    exact = make_with_images(family, **sizes).to("cuda")
    model = make_with_images(family, **sizes).to("cuda", dtype)
    exact.load_state_dict({n: x.double() for n, x in model.state_dict().items()})
    reference, usual = ordinary(exact, given), ordinary(model, given)
    ours = chunked(model, given, CONFIG)
    assert ours.keys() == usual.keys()
    for name, value in reference.items():
        error, theirs = (float((x[name] - value).norm() / value.norm()) for x in (ours, usual))
        assert error <= 2 * theirs + 1e-5, (name, error, theirs)
    small = replace(CONFIG, device_memory=2**19 * dtype.itemsize, host_memory=2**28)
    again = chunked(model, given, small)
    differing = {name for name, x in ours.items() if not torch.equal(again[name], x)}
    assert differing <= UNORDERED
