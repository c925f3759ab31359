"""Weights of a checkpoint whose names, or parts, are those of the model as it was published.

transformers saves some models as it found them (experts one by one, another nesting of modules) and
its Trainer loads a checkpoint by the names that the model has now: it would load nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def load_converted(model: PreTrainedModel, folder: str) -> Any:
    """Load ``folder`` as ``from_pretrained`` reads it; what ``load_state_dict`` returns.

    A second model lies in the host's memory meanwhile. No value is rounded. What the folder lacks
    is missing, whatever that model begins with.
    """
    kinds = [x.dtype for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    widest = max(kinds, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
    kind: Any = type(model)
    read, found = kind.from_pretrained(
        folder,
        config=model.config,
        dtype=widest,
        use_safetensors=True,
        output_loading_info=True,
    )
    lacking = set(found["missing_keys"])
    state = {name: value for name, value in read.state_dict().items() if name not in lacking}
    return model.load_state_dict(state, strict=False)
