"""States survive as JSON and safetensors, bit for bit; whose a checkpoint is."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from engine.models import make
from oomb.checkpoint import CheckpointError, load_state, model_identity, save_state
from oomb.hf.random_state import random_state, restore_random_state


def assert_identical(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_identical(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_identical(mine, theirs)
    else:
        assert one == other or one != one


@pytest.mark.parametrize(
    "state",
    [
        {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, "groups": [{"betas": (0.9, 0.999)}]},
        {
            "none": None,
            "bool": True,
            "int": 2**70,
            "float": 0.1 + 0.2,
            "text": "λ",
            "nan": [1e-320],
        },
        {"$tensor": "not one", "$tuple": 1},
        {1: "int", "1": "text", (1, 2): "tuple"},
        [torch.zeros(0), torch.ones(2, 3, dtype=torch.bfloat16).T, torch.arange(4)[1:3]],
        {"best": float("-inf"), "worst": float("nan")},
        torch.tensor(1, dtype=torch.uint8),
        [],
    ],
    ids=lambda state: type(state).__name__,
)
@pytest.mark.parametrize("copy", [True, False])
def test_states_come_back(state: Any, copy: bool, tmp_path: Path) -> None:
    save_state(tmp_path, "s", state)
    assert_identical(load_state(tmp_path, "s", copy=copy), state)


def test_large_states_are_written_in_pieces(tmp_path: Path) -> None:
    state = {i: torch.full((10 * i,), float(i)) for i in range(12)}
    save_state(tmp_path, "s", state, shard_bytes=800)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in shards[:2]] == ["s-00001.safetensors", "s-00002.safetensors"]
    assert len(shards) > 3
    for path in shards:  # a header, and as many tensors as fit
        assert path.stat().st_size < 800 + 600
    assert_identical(load_state(tmp_path, "s"), state)


def test_a_copied_state_does_not_hold_its_file(tmp_path: Path) -> None:
    save_state(tmp_path, "s", torch.ones(3))
    state = load_state(tmp_path, "s")
    (tmp_path / "s-00001.safetensors").write_bytes(b"")
    assert torch.equal(state, torch.ones(3))


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    save_state(tmp_path, "s", {"whole": whole, "part": whole[2:], "again": whole})
    assert_identical(load_state(tmp_path, "s"), {"whole": whole, "part": whole[2:], "again": whole})


def test_other_things_are_refused_by_place(tmp_path: Path) -> None:
    state = {"state": {0: {"projector": object()}}}
    with pytest.raises(CheckpointError, match=r"^s\.state\.0\.projector: expected .*, got object"):
        save_state(tmp_path, "s", state)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers(kind: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    expected = copy.deepcopy(optimizer.state_dict())
    save_state(tmp_path, "s", optimizer.state_dict())
    fresh = kind(model.parameters(), lr=0.5)
    fresh.load_state_dict(load_state(tmp_path, "s"))
    assert_identical(fresh.state_dict(), expected)


def test_random_generators(tmp_path: Path) -> None:
    def draw() -> list[float]:
        torch_number = float(torch.rand(()))
        return [random.gauss(0, 1), float(np.random.normal()), torch_number]  # noqa: NPY002

    device = torch.device("cpu")
    draw()  # so that each holds half of a pair of normal numbers
    save_state(tmp_path, "s", random_state(device))
    expected = [draw() for _ in range(3)]
    draw()
    restore_random_state(load_state(tmp_path, "s"), device)
    assert [draw() for _ in range(3)] == expected
    json.loads((tmp_path / "s.json").read_text())


def adapted(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **settings})
    return peft.get_peft_model(make("llama", torch.float32), config)


def test_identity_is_the_model_s() -> None:
    own = model_identity(make("llama", torch.float32))
    trained = make("llama", torch.float32)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 1
    assert model_identity(trained) == own  # weights are what a checkpoint changes
    frozen = make("llama", torch.float32)
    frozen.get_input_embeddings().requires_grad_(False)
    others = {
        "class": make("qwen2", torch.float32),
        "shape": make("llama", torch.float32, hidden_size=96),
        "dtype": make("llama", torch.float64),
        "trained": frozen,
        "adapter": adapted(),
    }
    for name, other in others.items():
        assert model_identity(other) != own, name


def test_identity_of_adapters() -> None:
    own = model_identity(adapted())
    assert model_identity(adapted()) == own
    other_base = adapted()
    with torch.no_grad():
        other_base.get_base_model().lm_head.weight[0, 0] += 1
    others = {
        "rank": adapted(r=8),
        "targets": adapted(target_modules=["v_proj"]),
        "base": other_base,
    }
    for name, other in others.items():
        assert model_identity(other) != own, name


@pytest.mark.parametrize("kind", ["OptimState8bit", "OptimState4bit", "OptimStateFp8"])
def test_states_of_torchao_come_back(kind: str, tmp_path: Path) -> None:
    subclasses = {
        "OptimState8bit": ("torchao.optim.subclass_8bit", (True, 256)),
        "OptimState4bit": ("torchao.optim.subclass_4bit", (False, 128)),
        "OptimStateFp8": ("torchao.optim.subclass_fp8", (256,)),
    }
    module, arguments = subclasses[kind]
    state = getattr(pytest.importorskip(module), kind).zeros((64, 80), *arguments)
    for name in state.__tensor_flatten__()[0]:
        part = getattr(state, name)
        part.view(torch.uint8).random_(0, 100)
    save_state(tmp_path, "s", {"state": {0: {"exp_avg": state}}})
    found = load_state(tmp_path, "s")["state"][0]["exp_avg"]
    assert type(found) is type(state) and found.shape == state.shape
    assert found.__tensor_flatten__()[0] == state.__tensor_flatten__()[0]
    assert list(found.__tensor_flatten__()[1]) == list(state.__tensor_flatten__()[1])
    for name in state.__tensor_flatten__()[0]:
        one, other = getattr(found, name), getattr(state, name)
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_file_names_no_class_of_its_own(tmp_path: Path) -> None:
    save_state(tmp_path, "s", {})
    (tmp_path / "s.json").write_text(json.dumps({"$parts": ["Popen", [1], [], {}]}))
    with pytest.raises(CheckpointError, match="expected one of OptimState8bit"):
        load_state(tmp_path, "s")
