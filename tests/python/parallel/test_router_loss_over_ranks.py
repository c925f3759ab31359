"""The load-balancing loss of mixtures of experts on ranks that share a sequence, in fp64.

Each rank routes tokens of its own, and some run one that counts nowhere.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import oomb
from engine.recurrent_models import make_recurrent
from engine.reference import (
    EXACT,
    Result,
    assert_equal,
    assert_identical,
    random_ids,
    relative_error,
    take_gradients,
)
from engine.router_models import in_float64, routed, stock_loss

from .world import World, one_group

IDS = random_ids(3, 75)
MASK = torch.ones_like(IDS)
MASK[1, 50:] = 0
MASK[2, 7:] = 0
PADDED = {"attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}
EARLY = IDS.clone()
EARLY[:, 9:] = -100  # routers count what comes behind the last target

# Family; settings; arguments besides the tokens.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "padding": ("Mixtral", {}, PADDED),
    "recomputed": ("Qwen3Moe", {"recompute": "layer"}, PADDED),
    "sinks and windows": ("GptOss", {}, {"labels": IDS}),
    "labels end early": ("Mixtral", {}, {"labels": EARLY}),
    "a last chunk of one token": ("Mixtral", {"chunk_size": 74, "page_size": 2}, {"labels": IDS}),
    "a last chunk of two tokens": ("Mixtral", {"chunk_size": 73, "page_size": 1}, {"labels": IDS}),
    "nothing kept": ("Mixtral", {"keep_outputs": "none"}, {"labels": IDS}),
    "recurrent layers": ("qwen3-next", {}, PADDED),
}


def model_of(family: str) -> Any:
    if family == "qwen3-next":
        return make_recurrent(family, output_router_logits=True, router_aux_loss_coef=0.7)
    return routed(family)


def over_ranks(rank: int, name: str, ranks: int, policy: Any) -> Any:
    """Two calls of one engine, and the loss that its evaluation gives."""
    mesh = one_group[ranks]
    if mesh.get_coordinate() is None:
        return None
    family, settings, arguments = CASES[name]
    model = model_of(family)
    config: dict[str, Any] = {"chunk_size": 16, "page_size": 8, **settings}
    found: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(in_float64(model))  # by the model's class, which sharding changes
        if policy is not None:
            config["sharded_weights"] = policy
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=mesh)
        engine = stack.enter_context(oomb.Engine(model, oomb.Config(**config), mesh=mesh))
        for _ in range(2):
            step = engine.forward_backward(IDS, **arguments)
            gradients: dict[str, Any] = take_gradients(model)
            for key, value in gradients.items():
                gradients[key] = value.full_tensor() if isinstance(value, DTensor) else value
            found.append(Result(step.loss, gradients))
        found.append(engine.evaluate(IDS, **arguments).loss)
    return found


SLOW = {"nothing kept", "recurrent layers", "sinks and windows"}
WHERE = [
    *(
        pytest.param(name, 2, None, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in CASES
    ),
    ("a last chunk of two tokens", 4, None),
    ("padding", 4, None),
    ("padding", 2, "zero3"),
]


@pytest.mark.parametrize(("name", "ranks", "policy"), WHERE)
@pytest.mark.sampled(4)
def test_equals_one_backward(world: World, name: str, ranks: int, policy: Any) -> None:
    world.start(over_ranks, name, ranks, policy)
    family, _, arguments = CASES[name]
    model = model_of(family)
    with in_float64(model):
        expected = stock_loss(model, IDS, **arguments)
    answers = [found for found in world.answers() if found is not None]
    assert len(answers) == ranks
    first = answers[0][0]
    assert_equal(first, expected)
    for found, again, evaluated in answers:
        assert_identical(found, first)
        assert_identical(again, first)
        assert relative_error(evaluated, expected.loss) <= EXACT
