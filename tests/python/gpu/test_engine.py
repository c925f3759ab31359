"""The engine on a GPU: against ordinary training, across tier sizes, run to run."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import pytest
import torch
from engine_case import CHUNK, PAGE, VOCABULARY, chunked, gradients, make_model, tokens
from transformers import Qwen2ForCausalLM

import oomb
from oomb.core.page_protocol import PageProtocol

pytestmark = pytest.mark.gpu


def ordinary(model: Qwen2ForCausalLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    return gradients(model)


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in b)


ATTENTION: dict[str, oomb.Dense | oomb.TopKPages] = {
    "dense": oomb.Dense(),
    "topk": oomb.TopKPages(budget=4),
    "bounds": oomb.TopKPages(budget=4, summary="bounds", score="token_softmax"),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_grad_dtype", ["float32", "bfloat16"])
def test_bf16_error_is_at_most_twice_that_of_ordinary_training(
    head_dim: int, kv_grad_dtype: str
) -> None:
    ids = tokens(batch=2)
    model = make_model(torch.bfloat16, head_dim)
    reference = make_model(torch.float32, head_dim)
    with torch.no_grad():
        for a, b in zip(reference.parameters(), model.parameters(), strict=True):
            a.copy_(b.float())
    expected = ordinary(reference, ids)
    usual = ordinary(model, ids)
    _, ours = chunked(model, ids, kv_grad_dtype=kv_grad_dtype)
    for name, value in expected.items():
        error = (ours[name] - value).norm() / value.norm()
        limit = 2 * (usual[name] - value).norm() / value.norm()
        assert error <= limit, (name, float(error), float(limit))


def test_fp32_equals_ordinary_training() -> None:
    ids, model = tokens(), make_model(torch.float32)
    with torch.backends.cuda.sdp_kernel(enable_flash=False, enable_mem_efficient=False):
        expected = ordinary(model, ids)
    _, ours = chunked(model, ids)
    assert worst(ours, expected) < 1e-4


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_tier_sizes_and_runs_change_no_bit(attention: oomb.Dense | oomb.TopKPages) -> None:
    ids, model = tokens(batch=2), make_model(torch.bfloat16)
    slot = 2 * PAGE * 64 * 2
    first, expected = chunked(model, ids, attention=attention)
    for slots in (None, 12, 14, 40):  # 12: one wave of two pages, two sequences, fp32 dKV
        memory = None if slots is None else slots * slot
        step, again = chunked(
            model, ids, attention=attention, device_memory=memory, host_memory="64MiB"
        )
        assert torch.equal(step.loss, first.loss)
        for name, value in expected.items():
            assert torch.equal(again[name], value), (slots, name)


@pytest.mark.parametrize("slots", [40, 100])
@pytest.mark.parametrize("keep", ["none", "all"])
def test_tiers_that_are_full_have_the_same_bits(keep: str, slots: int) -> None:
    """With the smallest host tier that a plan allows."""
    ids, model = tokens(batch=2), make_model(torch.bfloat16)
    slot = 2 * PAGE * 64 * 2
    _, expected = chunked(model, ids, keep_outputs=keep)

    def fits(host_slots: int) -> bool:
        config = oomb.Config(
            chunk_size=CHUNK,
            page_size=PAGE,
            keep_outputs=keep,  # type: ignore[arg-type]
            device_memory=slots * slot,
            host_memory=host_slots * slot,
        )
        with oomb.Engine(model, config) as engine:
            return engine.plan(ids.shape[1], batch_size=ids.shape[0]).fits

    host = 1 + bisect_left(range(1, 4096), True, key=fits)
    assert 1 < host < 4096
    step, again = chunked(
        model, ids, keep_outputs=keep, device_memory=slots * slot, host_memory=host * slot
    )
    assert step.stats.h2d_bytes > 0
    assert all(torch.equal(again[name], value) for name, value in expected.items())


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kv_grad_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_own_chunk_alone_or_not_has_the_same_bits(
    attention: oomb.Dense | oomb.TopKPages,
    kv_grad_dtype: str,
    alone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a chunk's own keys get a launch of their own is a matter of timing."""
    ids, model = tokens(batch=2), make_model(torch.bfloat16)
    settings = {"attention": attention, "kv_grad_dtype": kv_grad_dtype}
    first, expected = chunked(model, ids, **settings)  # all in place: one launch each
    asked = []
    monkeypatch.setattr(PageProtocol, "own_alone", lambda *_: asked.append(alone) or alone)
    for memory in (None, 40 * 2 * PAGE * 64 * 2):
        step, again = chunked(model, ids, **settings, device_memory=memory, host_memory="64MiB")
        assert torch.equal(step.loss, first.loss)
        for name, value in expected.items():
            assert torch.equal(again[name], value), (memory, name)
    assert asked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_kept_outputs_change_no_bit(
    attention: oomb.Dense | oomb.TopKPages, dtype: torch.dtype
) -> None:
    """In HBM and spilled; the sweep has them from the fill."""
    ids, model = tokens(batch=2), make_model(dtype)
    slot = 2 * PAGE * 64 * (torch.finfo(dtype).bits // 8)
    first, expected = chunked(model, ids, attention=attention)
    for keep in ("all", 0.4, "auto"):
        for slots in (None, 14, 40, 200):
            for recompute in ("none", "layer"):
                memory = None if slots is None else slots * slot
                step, again = chunked(
                    model,
                    ids,
                    attention=attention,
                    keep_outputs=keep,
                    recompute=recompute,
                    device_memory=memory,
                    host_memory="64MiB",
                )
                if keep != "auto":
                    assert step.stats.kept_output_share == pytest.approx(
                        1.0 if keep == "all" else keep
                    )
                    assert step.stats.kept_output_seconds > 0
                assert torch.equal(step.loss, first.loss)
                for name, value in expected.items():
                    assert torch.equal(again[name], value), (keep, slots, recompute, name)


def test_outputs_kept_in_a_tier_that_cannot_map_memory_have_the_same_bits() -> None:
    ids, model = tokens(batch=2), make_model(torch.bfloat16)
    _, expected = chunked(model, ids)
    config = oomb.Config(
        chunk_size=CHUNK,
        page_size=PAGE,
        keep_outputs="all",
        device_memory=40 * 2 * PAGE * 64 * 2,
        host_memory="64MiB",
    )
    model.zero_grad()
    with oomb.Engine(model, config) as engine:
        engine._pools.test_switches = {"map_device_memory": False}
        engine.forward_backward(ids, ids)
    assert all(torch.equal(value, gradients(model)[name]) for name, value in expected.items())


def test_reserved_memory_is_told_beside_what_is_allocated() -> None:
    ids, model = tokens(), make_model(torch.bfloat16)
    with oomb.Engine(model, oomb.Config(chunk_size=CHUNK, page_size=PAGE)) as engine:
        torch.cuda.reset_peak_memory_stats()
        told = engine.evaluate(ids, ids).stats.reserved_ratio  # makes nothing after it has told
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    assert told >= 1.0
    assert told == pytest.approx(reserved / allocated, rel=0.01)


def test_recompute_changes_no_bit() -> None:
    ids, model = tokens(), make_model(torch.bfloat16)
    _, kept = chunked(model, ids, recompute="none")
    _, again = chunked(model, ids, recompute="layer")
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_pools_give_their_memory_back() -> None:
    ids, model = tokens(), make_model(torch.bfloat16)
    with oomb.Engine(model, oomb.Config(chunk_size=CHUNK, page_size=PAGE)) as engine:
        engine.forward_backward(ids, ids)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        for _ in range(3):
            engine.forward_backward(ids, ids)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] >= free - 2**21


def test_pinned_memory_stays_where_less_of_the_gpu_is_free() -> None:
    ids, model = tokens(batch=2), make_model(torch.bfloat16)
    slot = 2 * PAGE * 64 * 2
    _, expected = chunked(model, ids)
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, host_memory="64MiB")
    pinned = []
    with oomb.Engine(model, config) as engine:
        for slots in (20, 19, 12, 20):
            model.zero_grad()
            engine.config = replace(config, device_memory=slots * slot)
            engine.forward_backward(ids, ids)
            for name, value in gradients(model).items():
                assert torch.equal(value, expected[name]), (slots, name)
            pinned.append((id(engine._pools.manager), engine._pools.snapshot()["host"]))
    assert pinned[0][1]["committed_bytes"] > 0
    assert all(later == pinned[0] for later in pinned), pinned


def test_a_gpu_that_cannot_map_memory_has_the_same_bits_and_gives_it_back() -> None:
    ids, model = tokens(batch=2), make_model(torch.bfloat16)
    _, expected = chunked(model, ids)
    free = torch.cuda.mem_get_info()[0]
    for memory in (None, 20 * 2 * PAGE * 64 * 2):
        config = oomb.Config(
            chunk_size=CHUNK, page_size=PAGE, device_memory=memory, host_memory="64MiB"
        )
        with oomb.Engine(model, config) as engine:
            engine._pools.test_switches = {"map_device_memory": False}
            for _ in range(3):
                model.zero_grad()
                engine.forward_backward(ids, ids)
                for name, value in gradients(model).items():
                    assert torch.equal(value, expected[name]), (memory, name)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                assert torch.cuda.mem_get_info()[0] >= free - 2**22


@pytest.mark.parametrize("spills", [False, True], ids=["in HBM", "two tiers"])
@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)
def test_what_the_sweep_holds_for_each_token(
    attention: oomb.Dense | oomb.TopKPages, spills: bool
) -> None:
    """Positions and targets, int32 each; page lists are on the host, mean keys are gone."""
    model = make_model(torch.bfloat16)
    memory = {"device_memory": 40 * 2 * PAGE * 64 * 2, "host_memory": "64MiB"} if spills else {}
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, attention=attention, **memory)

    def held(engine: oomb.Engine, chunks: int) -> int:
        ids = torch.arange(chunks * CHUNK + 1, device="cuda")[None] % VOCABULARY
        before, found = torch.cuda.memory_allocated(), []
        engine.forward_backward(
            ids, ids, on_progress=lambda _: found.append(torch.cuda.memory_allocated())
        )
        model.zero_grad(set_to_none=True)
        return found[-2] - before

    with oomb.Engine(model, config) as engine:
        held(engine, 8)  # libraries take their work spaces
        short, long = held(engine, 8), held(engine, 20)
    assert long - short == pytest.approx(8 * 12 * CHUNK, abs=2048)
