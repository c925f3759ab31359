"""The errors in docs/numerics.md: `python scripts/numerics.py` (needs pytest).

Models, references and cases are those of the tests; here they are printed instead of bounded. An
error is ‖ours - reference‖ / ‖reference‖, the largest over the loss and all parameters' gradients.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "python"))

import oomb
from engine import test_precision, test_sampled, test_sparse
from engine.models import ARCHITECTURES, ROPES, make
from engine.reference import chunked, ordinary, random_ids, relative_error, worst_error

Row = tuple[object, ...]
CHUNK, PAGE = 16, 8


def config(**settings: object) -> oomb.Config:
    return oomb.Config(chunk_size=CHUNK, page_size=PAGE, **settings)  # type: ignore[arg-type]


def against_ordinary(name: str, **settings: object) -> tuple[float, str]:
    """Worst error in fp64, and where, on two sequences of 75 tokens."""
    model, ids = make(name, **settings), random_ids(2, 75)
    return worst_error(chunked(model, config(), ids, ids), ordinary(model, ids, ids))


def architectures() -> Iterable[Row]:
    for name in ARCHITECTURES:
        yield name, *against_ordinary(name)


def rotary_variants() -> Iterable[Row]:
    for rope, (name, settings) in ROPES.items():
        yield rope, *against_ordinary(name, **settings)


def page_sparse() -> Iterable[Row]:
    for rule, inputs in itertools.product(test_sparse.RULES, ("plain", "padded", "documents")):
        result, expected, _ = test_sparse.run("llama", test_sparse.RULES[rule], inputs)
        yield rule, inputs, worst_error(result, expected)[0]


def sampled() -> Iterable[Row]:
    for cap in (None, 2.0):
        mean, expected = test_sampled.mean_over_all_draws("llama", cap=cap)
        loss = relative_error(mean.loss, expected.loss)
        errors = [relative_error(mean.gradients[k], g) for k, g in expected.gradients.items()]
        yield f"mean over all draws, cap {cap}", loss, max(errors)


def single_draws() -> Iterable[Row]:
    """Error of one draw of 8 chunks at keep = 1/4, all gradients taken together."""
    model, ids = make("llama"), random_ids(1, 8 * CHUNK)
    expected = ordinary(model, ids, ids)
    for cap in (None, 2.0):
        errors = []
        for seed in range(40):
            rule = oomb.SampledChunks(keep=0.25, seed=seed, cap=cap)
            one = chunked(model, config(backward=rule), ids, ids)
            errors.append(test_precision.total_error(one, expected))
        yield f"cap {cap}", statistics.median(errors), max(errors)


def positions() -> Iterable[Row]:
    for angles in ("model", "float64"):
        near = test_precision.at_position(0, angles, "llama")
        far = test_precision.at_position(4_000_003, angles, "llama")
        yield f'rope_angles="{angles}"', worst_error(far, near)[0]


def precisions() -> Iterable[Row]:
    """Total error of all gradients, ours and ordinary training's, against higher precision."""
    total, ids = test_precision.total_error, random_ids(2, 200)
    single, exact = make("llama", torch.float32), ordinary(make("llama"), ids, ids)
    ours, usual = chunked(single, config(), ids, ids), ordinary(single, ids, ids)
    yield "fp32", "fp64", *_ratio(total(ours, exact), total(usual, exact))
    model = test_precision.rounded("llama")
    reference, low = ordinary(model, ids, ids), test_precision.in_bfloat16(model)
    usual = ordinary(low, ids, ids)
    for dtype in ("float32", "bfloat16"):
        ours = chunked(low, config(kv_grad_dtype=dtype), ids, ids)
        errors = _ratio(total(ours, reference), total(usual, reference))
        yield f"bf16, gradient pages {dtype}", "fp32", *errors
    reference = ordinary(single, ids, ids)
    with torch.autocast("cpu", torch.bfloat16):
        ours, usual = chunked(single, config(), ids, ids), ordinary(single, ids, ids)
    errors = _ratio(total(ours, reference), total(usual, reference))
    yield "autocast to bf16 over fp32", "fp32", *errors


def _ratio(ours: float, usual: float) -> Row:
    return ours, usual, f"{ours / usual:.2f}"


SECTIONS: list[tuple[str, tuple[str, ...], Callable[[], Iterable[Row]]]] = [
    ("Architectures, fp64", ("architecture", "largest error", "where"), architectures),
    ("Rotary variants, fp64", ("variant", "largest error", "where"), rotary_variants),
    ("Page-sparse, fp64", ("rule", "inputs", "largest error"), page_sparse),
    ("Sampled chunks, fp64", ("", "loss", "gradients"), sampled),
    ("Single draws at keep 1/4", ("", "median error", "largest of 40"), single_draws),
    ("Position 4,000,003 against 0, fp32", ("", "difference"), positions),
    ("Precision", ("run in", "reference", "chunked", "ordinary", "ratio"), precisions),
]


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="position")
    for title, header, rows in SECTIONS:
        print(f"\n### {title}\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
        for row in rows():
            cells = [f"{cell:.1e}" if isinstance(cell, float) else str(cell) for cell in row]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
