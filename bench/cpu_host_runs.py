"""How far pages that are copied together lie together in host memory, by a step without a GPU.

    python bench/cpu_host_runs.py

The page manager goes through whole calls on pages that hold nothing (Qwen2.5-7B's attention, chunks
of 4096, fp32 dKV). Copies of slots that are neighbours on the host are the faster ones, see
``page_copy.py --only runs``; this prints how many are neighbours, on average, in a batch.
"""

from __future__ import annotations

from empty_call import GIB, empty_call

from oomb.config import TopKPages
from oomb.plan import dry_run


class Parts(dry_run.DryRun):
    """A dry run that keeps the statistics after its fill and after its sweep."""

    def _fill(self) -> None:
        super()._fill()
        self.after_fill = self._manager.stats()

    def _sweep(self) -> None:
        super()._sweep()
        self.after_sweep = self._manager.stats()


def step(tokens: int, rule: TopKPages | None, device_gib: int) -> None:
    call, caps = empty_call(tokens, rule, device_gib, 256)
    run = Parts(call, caps)
    run.run()
    print(f"{tokens >> 10}K, {'sparse' if rule else 'exact'}, {device_gib} GiB on the device")
    before = dict.fromkeys(run.after_fill, 0)
    for part, after in (("fill", run.after_fill), ("sweep", run.after_sweep)):
        for way, moved, runs in (
            ("stored", "d2h_bytes", "stored_runs"),
            ("loaded", "h2d_bytes", "loaded_runs"),
        ):
            copied = after[moved] - before[moved]  # type: ignore[literal-required]
            stretches = after[runs] - before[runs]  # type: ignore[literal-required]
            neighbours = copied / call.layout.slot_bytes / max(1, stretches)
            print(f"  {part:5} {way} {copied / GIB:6.1f} GiB, {neighbours:6.1f} slots in a row")
        before = dict(after)


def main() -> None:
    step(64 * 1024, TopKPages(), 2)
    step(128 * 1024, TopKPages(), 4)
    step(256 * 1024, TopKPages(), 8)
    step(128 * 1024, None, 8)


if __name__ == "__main__":
    main()
