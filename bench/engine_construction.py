"""Seconds that making an engine takes, nearly all of it the check of the model.

    python bench/engine_construction.py [--size tiny|7b] [--device cuda] [--repeats 3]
    python bench/engine_construction.py --size 7b --profile      # and what Python does meanwhile
    python bench/engine_construction.py --size 7b --stages       # and where the first one's go

What a process pays once anyway is timed before: CUDA's start, the library of matrix products, the
modules that the engine imports, and the model's own first forward, whose kernels are loaded then.
``--cold`` leaves all but CUDA's start to the first engine, which then pays for it. ``--stages``
waits for the device behind every operation, so that its seconds are a little longer.
``--compare-on-host`` does the check's arithmetic on the CPU, which tells what its kernels cost.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import oomb
from oomb.model.fused import fused_forwards

_SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
}  # fmt: skip
_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=_SIZES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--profile", action="store_true")
    how.add_argument("--stages", action="store_true")
    parser.add_argument("--compare-on-host", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    with timed("the device's start", device):
        torch.ones(1, device=device)
    torch.set_default_dtype(torch.bfloat16)
    with timed("the model's weights", device), device:
        model = Qwen2ForCausalLM(Qwen2Config(**_SIZES[arguments.size]))
    torch.set_default_dtype(torch.float32)
    if not arguments.cold:
        with timed("first products in bf16, fp64", device):
            for dtype in (torch.bfloat16, torch.float64):
                square = torch.ones(64, 64, dtype=dtype, device=device)
                square @ square
        with timed("import of the engine", device):
            _ = oomb.Engine
        with timed("import of fused kernels", device):  # Liger imports peft, with all it finds
            fused_forwards(nn.Module(), device)
        for which in ("first", "second"):
            with timed(f"the model's own forward, {which}", device), torch.no_grad():
                model(torch.ones(1, _TOKENS, dtype=torch.int64, device=device), use_cache=False)
    if arguments.compare_on_host:
        compare_on_host()
    if arguments.stages:
        from support.construction_stages import Stages  # imports the engine, which is timed above

        stages = Stages(device)
        for _ in range(max(2, arguments.repeats)):
            stages.measure(lambda: oomb.Engine(model).close())
        stages.print()
        return
    for number in range(1, arguments.repeats + 1):
        profile = cProfile.Profile() if arguments.profile and number == 1 else None
        with timed(f"engine {number}, {arguments.size} on {device.type}", device):
            if profile is not None:
                profile.enable()
            oomb.Engine(model).close()
            if profile is not None:
                profile.disable()
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def compare_on_host() -> None:
    """Have the check of the model compare tensors, and compute attention, on the CPU."""
    import oomb.model.structure as structure  # with much of the engine, whose import is timed

    for name in ("_errors", "plain_attention"):
        setattr(structure, name, _on_host(getattr(structure, name)))


def _on_host(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def on_host(*given: Any) -> torch.Tensor:
        return function(*(_to_host(x) for x in given))

    return on_host


def _to_host(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return given.cpu()
    sinks = None if given.sinks is None else given.sinks.cpu()  # of an AttentionCall
    return replace(given, q=given.q.cpu(), k=given.k.cpu(), v=given.v.cpu(), sinks=sinks)


@contextmanager
def timed(what: str, device: torch.device) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    print(f"{what + ':':36s} {time.perf_counter() - begin:6.2f} s", flush=True)


if __name__ == "__main__":
    main()
