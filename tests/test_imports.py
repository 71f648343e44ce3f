"""A package imports only from those above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "flashfl"
ORDER = (
    "core", "kernels", "native", "sparsity", "aggregate", "methods", "wire", "privacy", "models", "data", "measure",
    "engine",
    "run", "flower", "paper", "report", "cli",
)  # fmt: skip


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The packages of flashfl that a file imports from, with line numbers."""
    here = ["flashfl", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else []
            names = [*base, *(node.module or "").split(".")] if node.module else base
            found = [names] if len(names) > 1 else [[*names, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name[1]) for name in found if name[0] == "flashfl" and len(name) > 1)


def test_packages_import_only_from_those_above_them() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        if (own := package_of(path)) == "__init__":
            continue
        for line, other in imported(path):
            if other in ORDER and ORDER.index(other) > ORDER.index(own):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}")
    assert wrong == []


def test_every_package_is_in_the_order() -> None:
    found = {package_of(path) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert found == set(ORDER)


def test_only_the_flower_package_imports_flower() -> None:
    for path in ROOT.rglob("*.py"):
        if package_of(path) != "flower":
            names = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
            modules = [getattr(n, "module", None) or n.names[0].name for n in names]
            assert not any(module.split(".")[0] == "flwr" for module in modules), path
