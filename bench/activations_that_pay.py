"""Which activations would pay to keep from the fill for the sweep, on each GPU of ``oomb plan``.

    python bench/activations_that_pay.py
    python bench/activations_that_pay.py --model llama-3.1-8b --context 256K

Runs nothing: the plan's rates of each GPU, and the sizes of the model. A product of ``in`` values
spares 2 x in x out FLOP of the sweep's forward for the 2 x out bytes of its bf16 result, so ``in``
FLOP a byte, whatever else its size. Attention spares 4 x head_dim FLOP for each query, head and
key, so more with every token of the past.

Each cell is work spared per byte, over the work that the GPU does while its link carries one byte:
from 1 on it pays though nothing hides the copy. Below, it pays only as far as compute hides it; the
column "hidden" has the bytes per token and layer that the fill's compute hides at most.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from oomb.core.copying import linear_flops
from oomb.lengths import parse_length
from oomb.model.layer_shape import LayerShape
from oomb.plan.gpus import GPUS
from oomb.plan.rates import datasheet_rates
from oomb.trace.bare import bare_model

CHUNK = 4096  # tokens; rates depend on it


@dataclass(frozen=True)
class Kept:
    """What could be kept of a layer, per token.

    Attributes:
        num_bytes: of it.
        flops: of the products that the sweep's forward is spared.
    """

    name: str
    num_bytes: float
    flops: float


def activations(config: object, shape: LayerShape) -> list[Kept]:
    hidden, inner = (int(getattr(config, n)) for n in ("hidden_size", "intermediate_size"))
    width = shape.query_heads * shape.head_dim
    return [
        Kept("queries", 2 * width, 2 * hidden * width),
        Kept("after attention", 2 * hidden, 2 * width * hidden),
        Kept("MLP, gate and up", 4 * inner, 4 * hidden * inner),
        Kept("layer inputs", 2 * hidden, 2 * inner * hidden),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--context", default="128K", help="attention's output is its last token's")
    asked = parser.parse_args()
    model = bare_model(asked.model)
    config = model.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = LayerShape(heads, groups, head_dim, 0)
    past = parse_length("context", asked.context)
    width = heads * head_dim
    linear = linear_flops(list(model.model.layers))
    found = activations(config, shape)
    names = ["attention's output", *(one.name for one in found)]
    print(f"| GPU | {' | '.join(names)} | hidden, KB |")
    print("|---" * (len(names) + 2) + "|")
    for gpu in GPUS.values():
        rates = datasheet_rates(gpu, shape, None, CHUNK)
        cells = [4.0 * width * past / (2 * width + 4 * heads) / rates.past_forward * rates.link]
        cells += [one.flops / one.num_bytes / rates.matrix * rates.link for one in found]
        hides = rates.link * (linear / rates.matrix + 2.0 * width * past / rates.past_forward)
        print(f"| {gpu.name} | {' | '.join(f'{x:.2f}' for x in cells)} | {hides / 1000:.0f} |")


if __name__ == "__main__":
    main()
