"""The interpreter ends while a daemon thread is in a call: without a word, and soon."""

from __future__ import annotations

import pytest

from .programs import run_program

PROGRAM = """
import threading, torch, oomb
from tests.python.engine.recovery import IDS, SPARSE, config
from tests.python.engine.models import make

torch.set_num_threads(1)
model = make("llama")
engine = oomb.Engine(model, config(model{settings}))
reports = threading.Semaphore(0)

def train():
    while True:
        engine.forward_backward(IDS, IDS, on_progress=lambda _: reports.release())

threading.Thread(target=train, daemon=True).start()
for _ in range({reports}):
    assert reports.acquire(timeout=60)
"""


@pytest.mark.parametrize(
    ("settings", "reports"), [("", 2), (", attention=SPARSE", 13)], ids=["fill", "sweep"]
)
def test_in_a_call(settings: str, reports: int) -> None:
    assert run_program(PROGRAM.format(settings=settings, reports=reports)) == (0, "")
