"""Correct at size: four layers of Qwen2.5-7B's shape at 32K tokens, dense and page-sparse."""

from __future__ import annotations

import time

import pytest
import torch
from size_case import Visible, attention_of, differing, errors, taken, trained
from transformers import PreTrainedModel

import oomb
from oomb.trace.shapes import SHAPES, random_model

pytestmark = pytest.mark.gpu

LAYERS, TOKENS, CHUNK, PAGE = 4, 32768, 4096, 128
ATTENTION = {"dense": oomb.Dense(), "64 pages": oomb.TopKPages(budget=64)}
# Of about 3,000 slots that a call takes.
FEW_PAGES = {"device_memory": "128MiB", "host_memory": "4GiB"}


def make_model(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = SHAPES["qwen2.5-7b"]
    model = random_model(
        shape, device="cuda", dtype=torch.bfloat16, positions=TOKENS, layers=LAYERS
    )
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.self_attn.q_proj.weight *= 2  # a few dozen keys take most of the attention
    return model.to(dtype)


def step(
    model: PreTrainedModel,
    ids: torch.Tensor,
    attention: oomb.Dense | oomb.TopKPages,
    **more: object,
) -> tuple[oomb.Step, dict[str, torch.Tensor]]:
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, attention=attention, **more)  # type: ignore[arg-type]
    with oomb.Engine(model, config) as engine:
        result = engine.forward_backward(ids, ids)
    return result, taken(model)


@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_at_32k_tokens(name: str) -> None:
    """Error against fp32 at most twice that of ordinary bf16 training with SDPA; the same bits with
    most pages in the host tier, and run to run.
    """
    assert not torch.backends.cuda.matmul.allow_tf32
    attention, dense = ATTENTION[name], name == "dense"
    model = make_model(torch.bfloat16)
    ids = torch.randint(model.config.vocab_size, (1, TOKENS), device="cuda")
    first, ours = step(model, ids, attention, record_selection=True)
    again, same = step(model, ids, attention)
    assert torch.equal(first.loss, again.loss)
    assert differing(ours, same) == []
    spilled, same = step(model, ids, attention, **FEW_PAGES)
    assert spilled.stats.host_peak_bytes > 2 * spilled.stats.device_peak_bytes
    assert torch.equal(first.loss, spilled.loss)
    assert differing(ours, same) == []
    del same

    lists = [None] * LAYERS if dense else first.selection
    visible = [Visible(CHUNK, PAGE, of_layer) for of_layer in lists]
    began = time.perf_counter()
    if dense:  # as it comes: no mask, its fastest kernels
        usual = trained(model, ids)
    else:
        with attention_of(model, visible, by_definition=False):
            usual = trained(model, ids)
    middle = time.perf_counter()
    model = model.to(torch.float32)
    with attention_of(model, visible, by_definition=True):
        exact = trained(model, ids)
    print(f"\n{name}: ordinary {middle - began:.1f} s, fp32 {time.perf_counter() - middle:.1f} s")
    own, theirs = errors(ours, exact), errors(usual, exact)
    for parameter in exact:
        print(f"{own[parameter]:.2e} {theirs[parameter]:.2e}  {parameter}")
    assert len(exact) == len(list(model.parameters()))
    for parameter in exact:
        assert own[parameter] <= 2 * theirs[parameter], parameter
