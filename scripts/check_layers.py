"""Fails when an import goes against the layers, in csrc/ or in python/oomb, or runs in a circle.

The two tables below are the architecture; docs/architecture.md draws them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What each folder of csrc/ may include besides itself.
CPP_LAYERS = {
    "common": set(),
    "adapters": {"common"},
    "sums": {"common"},
    "memory": {"common"},
    "paging": {"common", "memory"},
    "offload": {"common", "memory", "paging"},
    "attention": {"common"},
    "peers": {"common"},
    "bindings": {
        *("common", "adapters", "sums", "memory", "paging", "offload", "attention", "peers")
    },
}
FORBIDDEN = re.compile(r"^(torch|ATen|c10|caffe2)/")
BINDINGS_ONLY = re.compile(r"^(pybind11/|Python\.h$)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

_TOP = "the top"  # modules beside the packages: errors, config, results, units, …

# What each package of python/oomb may import besides itself and the modules at the top.
PYTHON_LAYERS = {
    _TOP: {"_C", "ops"},  # TopKPages chooses with an operation, imported when it first does
    "ops": {"_C"},
    "checkpoint": set(),
    "monitor": set(),
    "model": {"_C"},
    "parallel": {"_C"},
    "core": {"_C", "ops", "model", "parallel"},
    "trace": {"model", "core", "parallel"},
    "engine": {"_C", "model", "core", "trace", "parallel"},
    "optim": {"model", "core"},
    "report": {"monitor"},
    "rivals": {"model", "trace"},
    "plan": {"_C", "ops", "model", "core", "trace", "engine", "optim", "parallel"},
    "hf": {"checkpoint", "monitor", "parallel", "core", "engine", "optim"},
    "audit": {"model", "core", "engine"},
    "train": {"checkpoint", "monitor", "report", "parallel", "model", "trace", "plan", "hf"},
    "cli": {
        *("_C", "checkpoint", "monitor", "report", "model", "core", "trace", "engine", "rivals"),
        *("plan", "hf", "audit", "train", "parallel"),
    },
}


def cpp_violations(folder: str, text: str) -> list[str]:
    """What is wrong with the includes of a file in csrc/<folder>."""
    found = []
    for bracket, path in INCLUDE.findall(text):
        top = path.split("/")[0]
        if FORBIDDEN.match(path):
            found.append(f"{path}: no torch in csrc/")
        elif BINDINGS_ONLY.match(path) and folder != "bindings":
            found.append(f"{path}: only bindings/ may include it")
        elif bracket == '"' and top not in CPP_LAYERS:
            found.append(f"{path}: our own headers are included from csrc/, as folder/file.h")
        elif bracket == '"' and top != folder and top not in CPP_LAYERS[folder]:
            found.append(f"{path}: {folder} may not include {top}")
    return found


class PythonTree:
    """The modules of a package tree, and what each of them imports.

    Args:
        root: the folder ``oomb``.
    """

    def __init__(self, root: Path) -> None:
        self.files = {_dotted(path, root): path for path in sorted(root.rglob("*.py"))}
        self.imports = {name: list(self._imports_of(path)) for name, path in self.files.items()}

    def violations(self) -> Iterator[str]:
        """Imports against the table, imports inside functions without a reason, and circles."""
        for name, imports in self.imports.items():
            package = _package(name)
            if package not in PYTHON_LAYERS:
                yield f"{self.files[name]}: {package} has no row in scripts/check_layers.py"
                continue
            for target, line, in_function, has_reason in imports:
                place = f"{self.files[name]}:{line}"
                other = _package(target)
                ours = target.split(".")[0] == "oomb"
                if ours and other not in {package, _TOP} | PYTHON_LAYERS[package]:
                    yield f"{place}: {package} may not import {other} ({target})"
                if in_function and not has_reason and package != "cli":
                    yield f"{place}: an import inside a function needs its reason on its line"
        for circle in self._circles():
            yield f"{self.files[circle[0]]}: files import in a circle: {' -> '.join(circle)}"

    def _imports_of(self, path: Path) -> Iterator[tuple[str, int, bool, bool]]:
        """(module, line, inside a function, a comment stands on the line) of each import."""
        text = path.read_text()
        lines = text.splitlines()
        for node, in_function in _walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                yield self._module(name), node.lineno, in_function, "#" in lines[node.lineno - 1]

    def _module(self, name: str) -> str:
        """The module that a dotted name lies in; ``oomb._C`` has no file here."""
        if name.startswith("oomb._C"):
            return "oomb._C"
        whole = name
        while name not in self.files and "." in name:
            name = name.rsplit(".", 1)[0]
        return name if name in self.files else whole

    def _circles(self) -> Iterator[list[str]]:
        """Each circle of imports at module level, once: the path from a module back to itself."""
        done: set[str] = set()
        for start in self.files:
            path: list[str] = []
            stack = [(start, iter(self._at_import(start)))] if start not in done else []
            path.extend([start] if stack else [])
            while stack:
                name, rest = stack[-1]
                following = next(rest, None)
                if following is None:
                    done.add(name)
                    stack.pop()
                    path.pop()
                elif following in path:
                    yield [*path[path.index(following) :], following]
                elif following not in done:
                    stack.append((following, iter(self._at_import(following))))
                    path.append(following)

    def _at_import(self, name: str) -> list[str]:
        found = {target for target, _, in_function, _ in self.imports[name] if not in_function}
        return sorted(x for x in found if x in self.files and x != name)


def _dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package(module: str) -> str:
    """``"core"`` of ``oomb.core.loop``; every command lies in cli, ``python -m oomb`` too."""
    parts = module.split(".")
    if module == "oomb.__main__":
        return "cli"
    if len(parts) == 1 or (parts[1] not in PYTHON_LAYERS and parts[1] != "_C" and len(parts) == 2):
        return _TOP
    return parts[1]


def _walk(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node that runs, and whether it lies in a function; what only types need is left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child, in_function
        inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _walk(child, inside)


def main() -> int:
    problems, files = 0, [path for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]
    for path in files:
        folder = path.relative_to(ROOT / "csrc").parts[0]
        for problem in cpp_violations(folder, path.read_text()):
            print(f"{path.relative_to(ROOT)}: {problem}")
            problems += 1
    tree = PythonTree(ROOT / "python" / "oomb")
    for problem in tree.violations():
        print(problem.replace(f"{ROOT}/", ""))
        problems += 1
    print(f"layers: {len(files) + len(tree.files)} files, {problems} violations")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
