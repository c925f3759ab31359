"""The check at construction over every case of tests/python/engine/structure_cases.py.

    python scripts/check_structure.py [--seeds 20] [--device cpu]

Prints each false refusal and each false acceptance, then how many of how many; exit status 1 where
there was one. About ten minutes on a core.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import transformers
from torch import nn

import oomb

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/python"))

from engine.structure_cases import DTYPES, FAMILIES, SILENT, STRENGTHS, WRONG, exact


def refusal(model: nn.Module, page: int) -> str | None:
    """What an engine refuses the model for; None: it takes it."""
    try:
        oomb.Engine(model, oomb.Config(chunk_size=page, page_size=page)).close()
    except oomb.UnsupportedModelError as error:
        return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    refused, exacts = 0, 0
    for family, dtype, layers, loud in itertools.product(FAMILIES, DTYPES, (4, 24), (False, True)):
        for seed in range(arguments.seeds):
            model = exact(family, dtype, layers, seed, loud=loud).to(arguments.device)
            reason = refusal(model, (16, 128)[seed % 2])
            exacts += 1
            if reason is not None:
                refused += 1
                print(f"REFUSED {family} {dtype} {layers} layers {loud=} {seed=}: {reason}")
        print(f"{family} {dtype} {layers} layers {loud=}: done", flush=True)
    accepted, wrongs = 0, 0
    builders: list[tuple[str, Callable[[], nn.Module]]] = [
        (f"{build.__name__} {strength=}", partial(build, strength))
        for build, strength in itertools.product(WRONG, STRENGTHS)
    ]
    builders += [(build.__name__, build) for build in SILENT]
    for (name, build), dtype in itertools.product(builders, DTYPES):
        wrongs += 1
        if refusal(build().to(dtype).to(arguments.device), 128) is None:
            accepted += 1
            print(f"ACCEPTED {name} {dtype}")
    print(f"false refusals: {refused} of {exacts}; false acceptances: {accepted} of {wrongs}")
    return int(refused + accepted > 0)


if __name__ == "__main__":
    sys.exit(main())
