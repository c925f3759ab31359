"""What sparse attention, sampled and truncated chunks and bf16 gradient pages cost in accuracy."""

from oomb.audit.audit import audit
from oomb.audit.results import (
    Audit,
    Likeness,
    RoundedAudit,
    SampledAudit,
    SparseAudit,
    SparseLayer,
    TruncatedAudit,
)

__all__ = [
    "Audit",
    "Likeness",
    "RoundedAudit",
    "SampledAudit",
    "SparseAudit",
    "SparseLayer",
    "TruncatedAudit",
    "audit",
]
