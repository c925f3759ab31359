"""Operations on paged keys and values, for research code without the engine.

Registered with ``torch.library`` as ``torch.ops.oomb.*``: compilation, selective checkpointing and
``torch.library.opcheck`` see them.
"""

from oomb.ops.attention import paged_attention
from oomb.ops.page_bounds import bounding_queries, page_bounds
from oomb.ops.pages import page_scores, page_select, page_write, pages_like

__all__ = [
    "bounding_queries",
    "page_bounds",
    "page_scores",
    "page_select",
    "page_write",
    "paged_attention",
    "pages_like",
]
