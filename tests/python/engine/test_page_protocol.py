"""The engine and the plan's dry run ask the page manager the same things, from one place."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oomb
from oomb import _C
from oomb.core import call_pages, pools
from oomb.core.page_demand import PageDemand
from oomb.core.page_protocol import PageProtocol
from oomb.plan import dry_run
from oomb.plan.pages import PageCall

from .models import make
from .reference import random_ids
from .tiers import slot_bytes

# What says where a call has got to; the others ask what is there.
STEPS = {
    *("begin_call", "set_visit_pages", "end_call", "create", "commit", "create_gradients"),
    *("acquire", "release", "write_output", "read_output", "acquire_gradients", "drop"),
}
QUESTIONS = {"max_create", "max_gradients", "max_outputs", "waves", "own_alone"}
CALLS = re.compile(rf"\bmanager\.({'|'.join(STEPS | QUESTIONS)})\b")


@dataclass(frozen=True)
class Case:
    """Settings of a call, and the slots of its device tier; None: all that it wants."""

    name: str
    architecture: str = "llama"
    slots: int | None = None
    batch: int = 1
    chunks: int = 6
    settings: dict[str, Any] = field(default_factory=dict)
    inner: int = 64  # size of the MLPs


SPARSE = {"attention": oomb.TopKPages(budget=3)}
CASES = (
    Case("dense"),
    Case("dense, spilled", slots=20),
    Case("dense, spilled, tail page and batch", slots=40, batch=2, chunks=5),
    Case("windows, spilled", "gpt-oss", slots=24),
    Case("kept outputs", settings={"keep_outputs": "all"}),
    Case("kept outputs, spilled", slots=20, settings={"keep_outputs": "all"}),
    Case("kept outputs of MLPs", inner=512),
    Case("kept outputs of MLPs, spilled", slots=20, inner=512),
    Case("kept outputs of MLPs, sparse, in turns", slots=20, inner=512, settings=SPARSE),
    Case("sampled, spilled", slots=20, settings={"backward": oomb.SampledChunks(keep=0.5, seed=3)}),
    Case("truncated, spilled", slots=20, settings={"backward": oomb.TruncatedChunks(window=2)}),
    Case("sparse", settings=SPARSE),
    Case("sparse, spilled, in turns", slots=20, settings=SPARSE),
)


class Recorded:
    """A page manager whose steps are written down."""

    def __init__(self, manager: Any, steps: list[tuple[Any, ...]]) -> None:
        self._manager = manager
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._manager, name)
        return partial(self._step, name, found) if name in STEPS else found

    def _step(self, name: str, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._steps.append((name, *_positions(name, given, named)))
        return method(*given, **named)


def _positions(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Layer or visit and pages of a step; a dry run guesses what is chosen."""
    if name in {"begin_call", "end_call"}:
        return ()
    if name == "set_visit_pages":
        return given[:1]
    where = {key: named[key] for key in ("layer", "visit", "begin", "end", "kv") if key in named}
    return (*given[:3], *where.items())


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def of_engine_and_dry_run(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """What both ask for the same call."""
    model = make(case.architecture, torch.float32, intermediate_size=case.inner)
    config = oomb.Config(chunk_size=16, page_size=8, **case.settings)
    if case.slots is not None:
        memory = case.slots * slot_bytes(model, config)
        config = replace(config, device_memory=memory, host_memory="1GiB")
    engines: list[tuple[Any, ...]] = []
    rehearsed: list[tuple[Any, ...]] = []
    begun: list[Any] = []

    def begin_pages(demand: Any, manager: Any, caps: Any, *others: Any) -> Any:
        begun.extend((demand, caps))
        return call_pages.begin_pages(demand, Recorded(manager, engines), caps, *others)

    monkeypatch.setattr(pools, "begin_pages", begin_pages)
    ids = random_ids(case.batch, 16 * case.chunks - 3)
    with oomb.Engine(model, config) as engine:
        engine.forward_backward(ids, ids)
    demand, caps = begun
    call = PageCall(**{x.name: getattr(demand, x.name) for x in fields(PageDemand)})

    def page_manager(**settings: Any) -> Any:
        return Recorded(_C.PageManager(**settings), rehearsed)

    monkeypatch.setattr(dry_run, "_C", SimpleNamespace(PageManager=page_manager))
    dry_run.DryRun(call, caps).run()
    assert rehearsed.pop() == ("end_call",)
    if demand.selection is None:
        return engines, rehearsed
    return _in_one_wave(engines), _in_one_wave(rehearsed)


def _in_one_wave(steps: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each visit as if it had one wave; their number depends on what is chosen."""
    named = (step[:2] if step[0] in {"acquire", "release"} else step for step in steps)
    return list(dict.fromkeys(named))


def test_both_ask_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, rehearsed = of_engine_and_dry_run(case, monkeypatch)
    assert engines == rehearsed
    assert len(engines) > 60


@pytest.mark.parametrize("left_out", ["_announce", "_end"])
def test_what_changes_in_the_protocol_changes_in_both(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[-1]
    before, _ = of_engine_and_dry_run(case, monkeypatch)
    monkeypatch.setattr(PageProtocol, left_out, lambda *_: None)
    engines, rehearsed = of_engine_and_dry_run(case, monkeypatch)
    assert engines == rehearsed != before


def test_nobody_else_asks_the_manager() -> None:
    root = Path(oomb.__file__).parent
    asking = {
        str(path.relative_to(root)): sorted(found)
        for path in root.rglob("*.py")
        if (found := set(CALLS.findall(path.read_text())))
    }
    protocol = asking.pop("core/page_protocol.py")
    assert set(protocol) == STEPS - {"end_call"} | QUESTIONS
    assert asking == {"core/pools.py": ["end_call"], "plan/dry_run.py": ["end_call"]}
