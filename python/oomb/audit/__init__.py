"""What sparse attention and sampled chunks cost in accuracy, measured on a model and a text."""

from oomb.audit.audit import audit
from oomb.audit.results import Audit, Likeness, SampledAudit, SparseAudit, SparseLayer

__all__ = ["Audit", "Likeness", "SampledAudit", "SparseAudit", "SparseLayer", "audit"]
