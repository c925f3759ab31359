"""The version of this build."""

from __future__ import annotations

from oomb import _C

__version__ = _C.build_info()["version"]
