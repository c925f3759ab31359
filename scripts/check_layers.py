"""Fails when an #include in csrc/ goes against the layers, or brings torch in.

bindings -> offload -> paging -> memory -> common
bindings -> attention ------------------> common
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"

# What each folder may include besides itself.
ALLOWED = {
    "common": set(),
    "memory": {"common"},
    "paging": {"common", "memory"},
    "offload": {"common", "memory", "paging"},
    "attention": {"common"},
    "bindings": {"common", "memory", "paging", "offload", "attention"},
}
FORBIDDEN = re.compile(r"^(torch|ATen|c10|caffe2)/")
BINDINGS_ONLY = re.compile(r"^(pybind11/|Python\.h$)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def violations(folder: str, text: str) -> list[str]:
    """What is wrong with the includes of a file in csrc/<folder>."""
    found = []
    for bracket, path in INCLUDE.findall(text):
        top = path.split("/")[0]
        if FORBIDDEN.match(path):
            found.append(f"{path}: no torch in csrc/")
        elif BINDINGS_ONLY.match(path) and folder != "bindings":
            found.append(f"{path}: only bindings/ may include it")
        elif bracket == '"' and top not in ALLOWED:
            found.append(f"{path}: our own headers are included from csrc/, as folder/file.h")
        elif bracket == '"' and top != folder and top not in ALLOWED[folder]:
            found.append(f"{path}: {folder} may not include {top}")
    return found


def main() -> int:
    files = [path for path in sorted(CSRC.rglob("*")) if path.is_file()]
    problems = 0
    for path in files:
        folder = path.relative_to(CSRC).parts[0]
        for problem in violations(folder, path.read_text()):
            print(f"{path.relative_to(CSRC.parent)}: {problem}")
            problems += 1
    print(f"layers: {len(files)} files, {problems} violations")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
