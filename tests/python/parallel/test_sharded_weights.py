"""Weights that FSDP2 shards over the ranks of a sequence: gradients, bytes, norms, training.

A job runs many cases on one process group; each result is compared with one process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import oomb
from engine.models import make
from engine.reference import Result, assert_equal, chunked, ordinary, random_ids
from oomb.engine import engine as engine_module
from oomb.model.float8 import RECIPE as FLOAT8_RECIPE
from oomb.parallel import sharding
from oomb.parallel import whole as whole_tensors
from oomb.parallel.group import Ranks
from oomb.train.float8 import with_float8

from .world import World, meshes

POLICIES = ("zero1", "zero2", "zero3")
HEADS = {2: (8, 4), 3: (6, 3), 4: (8, 4), 8: (16, 8)}  # of queries and of keys, by ranks
LAYERS = 3


@dataclass(frozen=True)
class Case:
    model: str = "qwen2"
    config: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    tokens: int = 75
    is_ordinary: bool = True  # equals ordinary training; else one process alone
    inner: str = ""  # parts of layers that are groups of their own
    float8: bool = False  # torchao's linear layers, which the engine runs itself
    whole_adapters: bool = False  # FSDP2 leaves them out, as it must where their dtype differs


CASES = {
    "plain": Case(),
    "recompute": Case(config={"recompute": "layer"}),
    "tied": Case(model="qwen3-tied"),
    "tied, recompute": Case(model="qwen3-tied", config={"recompute": "layer"}),
    "lora": Case(lora=True),
    "lora, recompute": Case(lora=True, config={"recompute": "layer"}),
    "sinks": Case(model="gpt-oss", config={"recompute": "layer"}),
    "groups in layers": Case(inner="mlp", config={"recompute": "layer"}),
    "attention in groups": Case(model="qwen3-tied", inner="self_attn"),
    "short": Case(tokens=18),
    "pages": Case(config={"attention": oomb.TopKPages(budget=2)}, tokens=91, is_ordinary=False),
    "sampled": Case(
        config={"backward": oomb.SampledChunks(keep=0.6, seed=3)}, tokens=91, is_ordinary=False
    ),
    "whole adapters": Case(lora=True, whole_adapters=True),
    "float8": Case(config={"recompute": "layer"}, float8=True, is_ordinary=False),
}


def model_of(case: Case, ranks: int) -> Any:
    queries, keys = HEADS[ranks]
    sizes = {"num_attention_heads": queries, "num_key_value_heads": keys}
    model: Any = make(case.model, **sizes, num_hidden_layers=LAYERS)
    if case.float8:
        with_float8(model, FLOAT8_RECIPE, torch.device("cpu"))
    if not case.lora:
        return model
    torch.manual_seed(3)
    names = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=3, target_modules=names, init_lora_weights=False))
    return model.to(torch.float64).eval()


def sharded(model: Any, ranks: int, case: Case = CASES["plain"]) -> Any:
    """A model after ``fully_shard``: each layer, then the rest."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    left_out = {p for n, p in model.named_parameters() if case.whole_adapters and "lora" in n}
    settings: dict[str, Any] = {"mesh": meshes[ranks], "ignored_params": left_out}
    for layer in base.model.layers:
        if case.inner:
            fully_shard(layer.get_submodule(case.inner), **settings)
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return model


def config_of(case: Case, **settings: Any) -> oomb.Config:
    sizes = {"chunk_size": 16, "page_size": 8, "recompute": "none"}
    return oomb.Config(**{**sizes, **case.config, **settings})


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by name, gathered; the model is left without."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, grad in found.items():
        parameter = model.get_parameter(name)
        assert type(grad) is type(parameter.data), name
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            assert grad.to_local().shape == parameter.to_local().shape, name
    model.zero_grad()
    return {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in found.items()}


def expect_as_before(model: nn.Module, case: Case = CASES["plain"]) -> None:
    """A model is sharded, and all of FSDP2 is where it was."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) != (case.whole_adapters and "lora" in name), name
    assert isinstance(model, FSDPModule)
    for layer in (m for m in model.modules() if isinstance(m, FSDPModule)):
        assert len(layer._forward_pre_hooks) == len(layer._forward_hooks) == 1


def calls(rank: int, name: str, ranks: int) -> list[tuple[Result, Result]] | None:
    """Two calls under each policy."""
    if meshes[ranks].get_coordinate() is None:
        return None
    case = CASES[name]
    model = sharded(model_of(case, ranks), ranks, case)
    ids = random_ids(1, case.tokens)
    results = []
    for policy in POLICIES:
        config = config_of(case, sharded_weights=policy)
        with oomb.Engine(model, config, mesh=meshes[ranks]) as engine:
            expect_as_before(model, case)
            both = []
            for _ in range(2):
                engine.load_state_dict({**engine.state_dict(), "step": 0})
                step = engine.forward_backward(ids, ids)
                expect_as_before(model, case)
                both.append(Result(step.loss, whole(model), step))
            loss = engine.evaluate(ids, ids).loss
            assert case.config.get("backward") or abs(loss / both[0].loss - 1) < 1e-14
        results.append((both[0], both[1]))
    return results


QUICK = (("plain", 2), ("plain", 3), ("tied, recompute", 2), ("whole adapters", 2), ("float8", 2),
         ("attention in groups", 2))  # fmt: skip
WHERE = [
    pytest.param(name, ranks, marks=[] if (name, ranks) in QUICK else pytest.mark.slow)
    for name in CASES
    for ranks in (2, 3, 4)
    if ranks == 2 or name in ("plain", "tied, recompute", "lora, recompute")
]


@pytest.mark.parametrize(("name", "ranks"), WHERE)
@pytest.mark.sampled(6, slow=2)
def test_gradients_are_those_of_one_process(world: World, name: str, ranks: int) -> None:
    compare(world, name, ranks)


@pytest.mark.slow
@pytest.mark.release
def test_eight_ranks() -> None:
    with World(8) as world:
        for name in ("plain", "recompute", "lora, recompute"):
            compare(world, name, 8)


def compare(world: World, name: str, ranks: int) -> None:
    case = CASES[name]
    world.start(calls, name, ranks)
    model = model_of(case, ranks)
    ids = random_ids(1, case.tokens)
    alone = chunked(model, config_of(case), ids, ids)
    expected = ordinary(model, ids, ids) if case.is_ordinary else alone
    for found in world.answers():
        for one, again in found or ():
            assert_equal(one, alone)
            assert_equal(one, expected)
            assert again.loss.equal(one.loss)
            assert all(again.gradients[x].equal(one.gradients[x]) for x in one.gradients)


# A call's bytes -----------------------------------------------------------------------------------


def bytes_sent(rank: int, tokens: int) -> Any:
    """What is gathered and scattered under each policy, by the engine and by wrappers; sizes."""
    if meshes[2].get_coordinate() is None:
        return None
    model = sharded(model_of(CASES["plain"], 2), 2)
    sizes = {n: p.to_local().numel() * p.element_size() for n, p in model.named_parameters()}
    ids = random_ids(1, tokens)
    seen: dict[str, Any] = {}
    counts = {"gathered": 0, "scattered": 0}
    gather, scatter = Ranks.gather_into, sharding.scattered

    def gather_counted(self: Ranks, out: torch.Tensor, x: torch.Tensor, **how: Any) -> Any:
        counts["gathered"] += (out.numel() - x.numel()) * x.element_size()
        return gather(self, out, x, **how)

    def scatter_counted(ranks: Ranks, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        parts = scatter(ranks, tensors)
        counts["scattered"] += sum(part.numel() * part.element_size() for part in parts)
        return parts

    Ranks.gather_into, sharding.scattered = gather_counted, scatter_counted  # type: ignore[method-assign, assignment]
    try:
        for policy in POLICIES:
            config = config_of(CASES["plain"], sharded_weights=policy)
            with oomb.Engine(model, config, mesh=meshes[2]) as engine:
                counts.update(gathered=0, scattered=0)
                stats = engine.forward_backward(ids, ids).stats
                plan = engine.plan(tokens)
            assert plan.fits
            seen[policy] = dict(counts), stats, plan.device_bytes
    finally:
        Ranks.gather_into, sharding.scattered = gather, scatter  # type: ignore[method-assign]
    return sizes, seen


def test_each_policy_sends_what_it_needs(world: World) -> None:
    chunks = 4
    sizes, seen = world.run(bytes_sent, 16 * chunks + 1)[0]
    layer = sum(size for name, size in sizes.items() if "layers.1." in name)
    others = sum(size for name, size in sizes.items() if "layers." not in name)
    once = others + LAYERS * layer  # a rank of two receives as much as it holds
    # The fill leaves the last chunk to the sweep, where the last layer stays between forward and
    # backward, and the first one from one chunk's backward to the next one's forward.
    # A call first asks the first layer for the dtype of its keys.
    first, middle, last = 1 + 2 * chunks, 3 * chunks - 1, 2 * chunks - 1
    expected = {
        "zero1": (once, once),
        "zero2": (once, others + chunks * LAYERS * layer),
        "zero3": (others + (first + middle + last) * layer, others + chunks * LAYERS * layer),
    }
    for policy, (gathered, scattered) in expected.items():
        counts, stats, _ = seen[policy]
        assert counts == {"gathered": gathered, "scattered": scattered}, policy
        assert stats.gathered_weight_bytes == gathered
        assert stats.scattered_sum_bytes == scattered


# Training -----------------------------------------------------------------------------------------


def trained(rank: int, policy: str, steps: int) -> Any:
    """Clipped norms of a run with AdamW, and the weights behind it."""
    if meshes[2].get_coordinate() is None:
        return None
    model = sharded(model_of(CASES["tied"], 2), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms = []
    config = config_of(CASES["tied"], sharded_weights=policy, keep_main_grad=True)
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        for step in range(steps):
            ids = random_ids(1, 40, seed=step)
            engine.forward_backward(ids, ids)
            for parameter in model.parameters():
                assert torch.equal(
                    engine.main_grad(parameter).to_local(), parameter.grad.to_local()
                )
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            assert isinstance(norm, DTensor)
            norms.append(norm.full_tensor().item())
            optimizer.step()
            optimizer.zero_grad()
    saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    assert not saved or all(saved[name].equal(weights[name]) for name in weights)
    return norms, weights


@pytest.mark.parametrize("policy", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_twenty_steps_with_clipping_are_those_of_one_process(world: World, policy: str) -> None:
    steps = 20
    world.start(trained, policy, steps)
    model = model_of(CASES["tied"], 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms = []
    for step in range(steps):
        ids = random_ids(1, 40, seed=step)
        for name, gradient in ordinary(model, ids, ids).gradients.items():
            model.get_parameter(name).grad = gradient
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
    found = [x for x in world.answers() if x is not None]
    for theirs, weights in found:
        assert theirs == pytest.approx(norms, rel=1e-12)
        for name, parameter in model.named_parameters():
            assert torch.allclose(weights[name], parameter, rtol=1e-10, atol=1e-12), name
            assert torch.equal(weights[name], found[0][1][name])


# Failures and refusals ----------------------------------------------------------------------------


def failed(rank: int, policy: str) -> Any:
    """Errors of one rank in a layer, at each of its passes; the call behind each."""
    if meshes[2].get_coordinate() is None:
        return None
    model = sharded(model_of(CASES["recompute"], 2), 2)
    ids = random_ids(1, 40)
    config = config_of(CASES["recompute"], sharded_weights=policy)
    calls_left = [0]

    def hook(*_: object) -> None:
        calls_left[0] -= 1
        if calls_left[0] == 0 and meshes[2].get_local_rank() == 1:
            raise ValueError("an error of one rank")

    model.model.layers[1].mlp.register_forward_hook(hook)
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        before = engine.forward_backward(ids, ids).loss
        gradients = whole(model)
        for passes in (2, 3, 4):  # of the fill; of the sweep, forward and again
            calls_left[0] = passes
            began = time.monotonic()
            with pytest.raises(ValueError, match=r"\[rank \d\] an error of one rank"):
                engine.forward_backward(ids, ids)
            assert time.monotonic() - began < 10
            assert all(parameter.grad is None for parameter in model.parameters())
            expect_as_before(model)
            calls_left[0] = 0
            assert engine.forward_backward(ids, ids).loss.equal(before)
            again = whole(model)
            assert all(again[name].equal(gradients[name]) for name in gradients)
    return True


@pytest.mark.parametrize("policy", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_an_error_of_one_rank_leaves_the_weights_sharded(world: World, policy: str) -> None:
    assert world.run(failed, policy)[0]


def refused(rank: int) -> Any:
    """Errors of engines that cannot be made."""
    if meshes[2].get_coordinate() is None:
        return None

    def error(model: Any, mesh: Any) -> str:
        with pytest.raises((oomb.UnsupportedModelError, ValueError)) as raised:
            oomb.Engine(model, config_of(CASES["plain"]), mesh=mesh)
        return str(raised.value)

    model = sharded(model_of(CASES["plain"], 2), 2)
    alone = error(model, None)
    expect_as_before(model)
    is_first = meshes[2].get_local_rank() == 0
    half = error(model if is_first else model_of(CASES["plain"], 2), meshes[2])
    first = next(model.model.layers[0].parameters())
    first.register_post_accumulate_grad_hook(lambda _: None)
    engine = oomb.Engine(model, config_of(CASES["plain"]), mesh=meshes[2])
    with engine, pytest.raises(oomb.UnsupportedModelError) as raised:
        engine.forward_backward(random_ids(1, 20), random_ids(1, 20))
    return alone, half, str(raised.value)


def construction_fails(rank: int, where: str) -> list[str]:
    """The second rank of a sequence fails while the first one waits for weights; then again."""
    made, init = [], sharding._Group.__init__

    def second_fails(*arguments: Any) -> None:
        if made:
            raise ZeroDivisionError("in the middle")
        made.append(arguments)
        init(*arguments)

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("in the middle")

    model, found = sharded(model_of(CASES["plain"], 2), 2), []
    for is_broken in (rank >= 2, False):
        with pytest.MonkeyPatch.context() as patch:
            if is_broken and where == "groups":
                patch.setattr(sharding._Group, "__init__", second_fails)
            elif is_broken:
                patch.setattr(engine_module, "checked_shapes", fails)
            try:
                oomb.Engine(model, config_of(CASES["plain"]), mesh=meshes[2]).close()
                found.append("no error")
            except (ZeroDivisionError, oomb.Error) as error:
                found.append(str(error))
    expect_as_before(model)
    return found


@pytest.mark.parametrize("where", ["groups", "check"])
def test_an_error_of_one_rank_at_construction_is_raised_by_all(world: World, where: str) -> None:
    texts = world.run(construction_fails, where)
    for rank, text in enumerate(texts):
        of_others = f"[rank {rank + 2}] ZeroDivisionError: in the middle"
        assert text == ["in the middle" if rank >= 2 else of_others, "no error"]


def test_what_cannot_be_gathered_is_refused(world: World) -> None:
    alone, half, hooked = world.run(refused)[0]
    assert "sharded weights" in alone and "mesh=" in alone
    assert half.startswith("model: expected the same on all ranks of a sequence")
    assert "post-accumulate-grad hook" in hooked
    with pytest.raises(ValueError, match="sharded_weights: expected 'zero1' or 'zero2' or 'zero3'"):
        oomb.Config(sharded_weights="zero4")  # type: ignore[arg-type]


def without_room(rank: int) -> list[str]:
    """What each gathering raises; rank 0's host has room for two tensors, then for all."""
    model = sharded(model_of(CASES["plain"], 4), 4)
    ranks = Ranks(list(range(4)), torch.device("cpu"))
    room, copy = iter([True, True]), whole_tensors.to_host

    def with_little_room(tensor: torch.Tensor) -> torch.Tensor:
        if not next(room, False):
            raise MemoryError("no room for the third")
        return copy(tensor)

    def gather() -> str:
        try:
            state = model.state_dict()
            ranks.together(lambda: whole_tensors.gathered(state, keep=rank == 0))
        except (MemoryError, oomb.Error) as error:
            return f"{type(error).__name__}: {error}"
        return "whole"

    whole_tensors.to_host = with_little_room
    try:
        first = gather()
    finally:
        whole_tensors.to_host = copy
    found = [first, gather()]
    ranks.close()
    return found


def test_a_host_without_room_is_told_by_all(world: World) -> None:
    """Rank 0 gathers; the others helped it and do not wait for it."""
    for first, second in world.run(without_room):
        assert "no room for the third" in first
        assert second == "whole"
