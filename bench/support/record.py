"""Result files: small enough to read in a diff, nine digits a number.

    python bench/support/record.py FILE...   # reduces results to what a document can quote

``oomb bench step --out`` also writes a number per chunk and per layer. Documents quote sums, so
those arrays become their sum before a file goes to bench/results.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
DIGITS, COLUMNS = 9, 100  # nine digits tell any two fp32 numbers apart
# What one run writes per chunk or layer, and the name under which its sum is kept; None: nowhere.
_ARRAYS = {
    "exposed_by_chunk": "exposed_seconds_by_pass",
    "exposed_by_layer": None,
    "distinct_pages_by_chunk": None,
}


def write_record(path: Path, record: Any) -> None:
    """Writes ``record`` as JSON in lines of at most 100 columns, numbers with nine digits."""
    path.write_text("\n".join(_lines(_rounded(record), 0)) + "\n")


def reduced(value: Any) -> Any:
    """``value`` with sums in place of the arrays that have a number per chunk or layer."""
    if isinstance(value, list):
        return [reduced(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for name, item in value.items():
        if name not in _ARRAYS:
            kept[name] = reduced(item)
        elif _ARRAYS[name]:
            kept[str(_ARRAYS[name])] = {key: sum(numbers) for key, numbers in item.items()}
    return kept


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _lines(value: Any, indent: int) -> list[str]:
    """JSON of ``value``; items that fit share a line."""
    whole = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(whole) <= COLUMNS - indent:
        return [whole]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    lines = [opening]
    parts = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for index, (name, item) in enumerate(parts):
        key = "" if name is None else json.dumps(name, ensure_ascii=False) + ": "
        first, *rest = _lines(item, indent + 1 + len(key))
        last = "," if index + 1 < len(value) else ""
        text = [key + first, *rest]
        text[-1] += last
        joined = f"{lines[-1]} {text[0]}"
        fills = not isinstance(item, dict) and not rest and len(lines) > 1
        if fills and not lines[-1].endswith(("},", "[", "{")) and len(joined) <= COLUMNS - indent:
            lines[-1] = joined
        else:
            lines += [" " + line for line in text]
    return [*lines, closing]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        write_record(path, reduced(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
