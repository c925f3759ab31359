"""How long the host needs for the pages of a visit, by steps without a GPU.

    python bench/cpu_host_time.py [--tokens 524288]

The page manager goes through whole calls on pages that hold nothing (Qwen2.5-7B's attention, chunks
of 4096, fp32 dKV, page-sparse, 16 GiB of them on the device). This prints the milliseconds that its
calls take in a visit of a chunk to a layer, on average, of the fill and of the sweep. A GPU waits
for the host where they are more than the kernels of that visit take.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from empty_call import LAYERS, empty_call

from oomb.config import TopKPages
from oomb.plan import dry_run


class Clocked:
    """A page manager, and the seconds that its methods take."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._manager, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return call


class Run(dry_run.DryRun):
    """A dry run that prints what each of its two parts took."""

    def _fill(self) -> None:
        self._part("fill", super()._fill, self._call.filled)

    def _sweep(self) -> None:
        self._part("sweep", super()._sweep, 2 * len(self._call.swept))

    def _part(self, name: str, part: Callable[[], None], turns: int) -> None:
        plain, clocked = self._manager, Clocked(self._manager)
        self._manager = clocked  # type: ignore[assignment]
        part()
        self._manager = plain
        each = {k: v / (turns * LAYERS) * 1e3 for k, v in clocked.seconds.items()}
        largest = sorted(each.items(), key=lambda entry: -entry[1])[:5]
        print(
            f"  {name:5} {sum(each.values()):6.2f} ms a visit:",
            ", ".join(f"{k} {v:.2f}" for k, v in largest),
            flush=True,
        )


def step(tokens: int) -> None:
    print(f"{tokens >> 10}K tokens")
    Run(*empty_call(tokens, TopKPages(), 16, 1024)).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, action="append", help="default: 128K, 256K, 512K")
    for tokens in parser.parse_args().tokens or [2**17, 2**18, 2**19]:
        step(tokens)


if __name__ == "__main__":
    main()
