"""What sparse attention, sampled and truncated chunks cost in accuracy, on a model and a text."""

from oomb.audit.audit import audit
from oomb.audit.results import (
    Audit,
    Likeness,
    SampledAudit,
    SparseAudit,
    SparseLayer,
    TruncatedAudit,
)

__all__ = [
    "Audit",
    "Likeness",
    "SampledAudit",
    "SparseAudit",
    "SparseLayer",
    "TruncatedAudit",
    "audit",
]
