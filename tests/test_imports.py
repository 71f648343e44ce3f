"""A package imports only from those above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from flashfl.methods import METHODS

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


KNOWING = ("methods", "aggregate", "paper")  # every other package runs and reports methods without knowing any
WORDS = {"dense", "sparse"}  # methods whose names are words for other things too


def names_compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Comparisons with the name of a method."""
    for node in ast.walk(tree):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += [node.subject, *node.cases] if isinstance(node, ast.Match) else []  # type: ignore[list-item]
        found = {x.value for side in sides for x in ast.walk(side) if isinstance(x, ast.Constant)} & set(METHODS)
        text = " ".join(map(ast.unparse, sides[:-1]))
        yield from ((node.lineno, name) for name in found if name not in WORDS or "method" in text or ".name" in text)


def test_nothing_that_runs_or_reports_knows_a_method() -> None:
    """Engines, wire, Flower, runs and reports import the registry at most, and never compare a method's name."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        if package_of(path) in KNOWING or (path.parent == ROOT and path.stem == "__init__"):
            continue
        tree, where = ast.parse(path.read_text()), path.relative_to(ROOT)
        wrong += [f"{where}:{line} compares {name!r}" for line, name in names_compared(tree)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and "methods" in (node.module or "").split("."):
                taken = {alias.name for alias in node.names}
                wrong += [f"{where}:{node.lineno} imports {name} of methods" for name in sorted(taken - {"METHODS"})]
            elif isinstance(node, ast.ImportFrom | ast.Import):
                wrong += [
                    f"{where}:{node.lineno} imports methods" for x in node.names if "methods" in x.name.split(".")
                ]
    assert wrong == []


def test_comparison_with_a_methods_name_is_found() -> None:
    code = "if method.name == 'spdst': pass\nif x in ('nst', 'y'): pass\nif form == 'dense': pass\nok = 'spdst'"
    assert sorted(names_compared(ast.parse(code))) == [(1, "spdst"), (2, "nst")]
    assert list(names_compared(ast.parse("if method.name == 'dense': pass"))) == [(1, "dense")]
