"""Run by test_memory.py in a fresh process: one step, then its memory as JSON.

memory_of_a_step.py TOKENS ATTENTION BACKWARD [two_pass]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import oomb
from oomb.cli.demo_model import small_model


class ThreeChunks(oomb.SampledChunks):
    """Sweeps the last, a middle and the first chunk, after a fill of all."""

    def draw(self, num_chunks: int, step: int) -> list[int]:
        return [0, num_chunks // 2, num_chunks - 1]


ATTENTION = {"dense": oomb.Dense(), "sparse": oomb.TopKPages(budget=8)}
BACKWARD = {"all": oomb.AllChunks(), "three": ThreeChunks()}


def status(field: str) -> int:
    """Bytes of a field of this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def main() -> None:
    tokens, attention, backward = int(sys.argv[1]), ATTENTION[sys.argv[2]], BACKWARD[sys.argv[3]]
    torch.set_num_threads(1)  # its workers' buffers would come and go
    model = small_model()
    ids = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(0))
    config = oomb.Config(
        chunk_size=1024,
        page_size=64,
        attention=attention,
        backward=backward,
        recompute="none",
        keep_outputs="none",
    )
    with oomb.Engine(model, config) as engine:
        before = status("VmRSS")
        if sys.argv[4:] == ["two_pass"]:
            with engine.two_pass(ids, entropies=True) as call:
                (-call.logprobs.mean() - 0.1 * call.entropies.mean()).backward()
                stats = call.sweep()
        else:
            stats = engine.forward_backward(ids, ids).stats
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    print(
        json.dumps(
            {
                "peak": status("VmHWM"),
                "before": before,
                "weights": weights,
                "gradients": weights,  # fp32 sums, which become the gradients
                "pools": stats.device_peak_bytes + stats.host_peak_bytes,
            }
        )
    )


if __name__ == "__main__":
    main()
