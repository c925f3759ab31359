"""KiB per token that keys, values and states of published models take, for docs/models.md.

    python scripts/published_sizes.py [--only NAME ...] [--page FILE]

Sizes are those of the models' configs; what the pages take comes from a plan of a call, which runs
each model without weights. ``--page`` writes the table into docs/models.md, whose other parts
``scripts/model_families.py`` writes.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import transformers

from oomb import Config
from oomb.model.layer_shape import LayerShape
from oomb.plan import Machine, Planner
from oomb.trace.published import PUBLISHED, published_config

TITLE = "KiB per token"
TOKENS = 128 * 1024
_KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a model keeps of a token, in KiB over all layers.

    Attributes:
        attending, layers: layers with attention, and all.
        heads: number and head dim of keys, or numbers of a latent, of each kind of layer.
        kv, gradients: what pages hold in bf16, and its gradients in fp32, at the sweep's begin.
        states: of recurrences and convolutions at the borders of chunks.
    """

    attending: int
    layers: int
    heads: tuple[str, ...]
    kv: float
    gradients: float
    states: float


def row_of(name: str) -> Row:
    """What the plan of an exact step on ``TOKENS`` tokens says of a model."""
    model = published_config(name)
    assert model is not None
    planner = Planner(model, Machine.described(gpu="h200"))
    call = planner.pages(TOKENS + 1, Config(), 1)  # the last predicts nothing
    stored = call.filled * call.chunks.chunk_size  # tokens with pages: nothing reads the last chunk
    forward = replace(call, reach=None).page_slots
    gradients = call.page_slots - forward
    return Row(
        attending=len(planner.shapes),
        layers=len(planner.tracer.layers),
        heads=tuple(dict.fromkeys(map(_heads_of, planner.shapes))),
        kv=forward * call.layout.slot_bytes / stored / _KIB,
        gradients=gradients * call.layout.slot_bytes / stored / _KIB,
        states=planner.tracer.state_bytes / call.chunks.chunk_size / _KIB,
    )


def _heads_of(shape: LayerShape) -> str:
    return f"latent of {shape.latent}" if shape.latent else f"{shape.kv_heads} of {shape.head_dim}"


def line_of(name: str, row: Row) -> str:
    """A row of the table."""
    heads = ", ".join(row.heads)
    attending = str(row.layers)
    if row.attending != row.layers:
        attending = f"{row.attending} of {row.layers}"
    numbers = " | ".join(f"{x:,.0f}" for x in (row.kv, row.gradients, row.states))
    return f"| {name} | {attending} | {heads} | {numbers} |"


def section(names: Sequence[str] = tuple(PUBLISHED)) -> str:
    """The part of docs/models.md."""
    config = Config()
    text = f"""What an exact step on {TOKENS:,} tokens keeps of each token at the begin
of the sweep, over all layers, in chunks of {config.chunk_size:,} and pages of {config.page_size}:
bf16 keys and values, their gradients in fp32 (`kv_grad_dtype="bfloat16"`: half of that), and states
of recurrences and convolutions at the borders of chunks (larger chunks: less). Of latent
attention pages hold the latents and the rotated key.
`python scripts/published_sizes.py --page docs/models.md` computes the table from the models'
configs. [oomb plan](plan.md) says what fits a machine."""
    rows = "\n".join(line_of(name, row_of(name)) for name in names)
    return (
        f"## {TITLE}\n\n{textwrap.fill(' '.join(text.split()), 100, break_on_hyphens=False)}\n\n"
        "| model | layers that attend | key heads | K and V | gradients | states |\n"
        f"|---|---|---|---|---|---|\n{rows}"
    )


def with_section(page: str, new: str) -> str:
    """A page with its table replaced."""
    found = re.compile(rf"^## {TITLE}.*?(?=\s*^## |\s*\Z)", re.DOTALL | re.MULTILINE)
    assert found.search(page), f"no '## {TITLE}' in the page"
    return found.sub(lambda _: new, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(PUBLISHED), help="print these")
    parser.add_argument("--page", type=Path, help="write the table into docs/models.md")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if arguments.page:
        page = arguments.page.read_text()
        arguments.page.write_text(with_section(page, section()))
        return
    for name in arguments.only or PUBLISHED:
        print(line_of(name, row_of(name)), flush=True)


if __name__ == "__main__":
    main()
