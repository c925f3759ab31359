"""Seconds of work that the GPU is not done with when they are asked for."""

from __future__ import annotations

import pytest
import torch

from oomb.core.stopwatch import Stopwatch

pytestmark = pytest.mark.gpu


def test_total_waits_for_the_gpu() -> None:
    stopwatch, device = Stopwatch(), torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    with stopwatch.running(device):
        torch.cuda._sleep(200_000_000)
    assert stopwatch.total > 0.02
