"""The attention forward beside the alternatives, in one process: TFLOP/s and ratios.

    python bench/attention.py              # Qwen2.5-7B heads, the shapes of docs/performance.md
    python bench/attention.py --path sm80  # the path for other GPUs beside FlashAttention-2
    python bench/attention.py --grid       # chunks, pasts, budgets, groups, head dims
    python bench/attention.py --json -     # bench/results/attention-forward-<device>-<date>.json
    python bench/attention.py --plot       # docs/images/attention.png from both grids' results

How FLOPs are counted: see bench/attention_problem.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import attention_problem
from attention_problem import Call, Inputs, Shape, alternatives, forward, measure


def bench_forward(shape: Shape, repetitions: int, path: str | None, flash: bool) -> dict[str, Any]:
    inputs = Inputs(shape)
    row: dict[str, Any] = {}
    ours = forward(inputs)
    rate = measure(row, "oomb", lambda: ours, shape.flops, repetitions)
    expected = ours().float()

    def checked(name: str) -> Call:
        call = others[name]
        if name == "flex":  # it computes the same thing, or the ratio says nothing
            difference = (call().float() - expected).abs().max().item()
            assert difference < 0.02, f"{name} and oomb differ by {difference}"
        return call

    others = alternatives(inputs, path, flash)
    best = 0.0
    for name in others:
        flops = shape.flops if name == "flex" else shape.unmasked_flops
        best = max(best, measure(row, name, partial(checked, name), flops, repetitions))
    if best > 0:
        row["ratio"] = rate / best
    return row


def main() -> None:
    assert __doc__ is not None
    parser = attention_problem.parser(__doc__)
    parser.add_argument("--plot", action="store_true", help="draw the results of the grids")
    options = parser.parse_args()
    if options.plot:
        from attention_plot import plot

        plot()
        return
    attention_problem.run(
        "forward",
        options,
        lambda shape: bench_forward(shape, options.repetitions, options.path, not options.grid),
    )


if __name__ == "__main__":
    main()
