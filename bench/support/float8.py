"""Linear layers in float8 through torchao, a scale a row, compiled or not."""

from __future__ import annotations

import torch
from torch import nn

from oomb.train.float8 import with_float8


def in_float8(model: nn.Module, *, compiled: bool) -> None:
    """A model on a GPU, in place; compiled layer by layer."""
    with_float8(model, "rowwise", torch.device("cuda"))
    if not compiled:
        return
    # Four shapes of weights, full and last chunks, with and without a graph.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.compile()
