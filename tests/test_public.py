"""What `flashfl` shows to the world, what importing it costs, and that nobody asks which method is running."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import flashfl as fl

SOURCE = Path(fl.__file__).parent

PUBLIC = {"Phase", "RoundRecord", "allocate", "calibrate", "fedavg", "nested", "random_mask", "top_mask", "wfa",
    # methods, and what they are made of
    "METHODS", "Method", "Dense", "NST", "PDST", "SPDST", "JMWST", "FlashPlus", "HeteroSPDST", "HeteroJMWST",
    "PruneRegrow",
    # what the parties know and exchange
    "Client", "Local", "Mask", "Order", "Plan", "State", "Sums", "Update", "Weights",
    # tasks and runs
    "Task", "tasks", "TrainConfig", "simulate", "Run", "accuracy", "mismatch", "FlashError",
}  # fmt: skip


def test_the_public_names_are_those_meant() -> None:
    assert set(fl.__all__) == PUBLIC
    assert len(fl.__all__) == len(PUBLIC)
    assert set(dir(fl)) == PUBLIC | {"__version__"}
    for name in fl.__all__:
        assert getattr(fl, name) is not None


def test_every_public_name_is_documented() -> None:
    for name in fl.__all__:
        if name != "METHODS":
            assert (getattr(fl, name).__doc__ or "").strip(), name


def test_other_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="module 'flashfl' has no attribute 'FedAvg'"):
        _ = fl.FedAvg  # type: ignore[attr-defined]


def test_types_are_shipped() -> None:
    assert files("flashfl").joinpath("py.typed").is_file()


HEAVY = {
    "sklearn", "scipy", "matplotlib", "flwr", "ray", "transformers", "datasets", "pandas", "rich", "PIL", "tensorboard",
    "mlflow", "wandb", "torchvision", "triton", "pytest", "hypothesis", "grpc", "pydantic", "requests",
}  # fmt: skip


@pytest.mark.parametrize("what", ["", "; fl.simulate, fl.Task, fl.METHODS, fl.tasks"])
def test_importing_loads_nothing_heavy_besides_torch_and_numpy(what: str) -> None:
    """The second: also when everything there is has been asked for."""
    # torch itself may load some of these where they are installed: only what we add counts.
    code = "import sys, torch, numpy; before = set(sys.modules); import flashfl as fl"
    code += f"{what}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "flashfl" in loaded
    assert not loaded & HEAVY


def test_importing_alone_does_not_even_load_torch() -> None:
    code = "import sys, flashfl; print(flashfl.__version__, *(m for m in ('torch', 'numpy') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [fl.__version__]


def named_methods(path: Path) -> list[str]:
    """Where a file decides something by a method's name or type: comparisons, `isinstance`, `match`."""
    found = []
    names, types = set(fl.METHODS), {cls.__name__ for cls in fl.METHODS.values()}
    for node in ast.walk(ast.parse(path.read_text())):
        told: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            told = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            told = list(node.args[1:])
        elif isinstance(node, ast.match_case):
            told = [node.pattern]
        for part in (leaf for each in told for leaf in ast.walk(each)):
            if (isinstance(part, ast.Constant) and part.value in names) or (
                isinstance(part, ast.Name | ast.Attribute) and getattr(part, "id", getattr(part, "attr", "")) in types
            ):
                found.append(f"{path.relative_to(SOURCE)}:{part.lineno}")  # type: ignore[attr-defined]
    return found


# There "dense" is how a tensor travels, and "sparse" the format of a file.
ALLOWED = {"wire/tensors.py", "run/export.py"}


def test_nobody_asks_which_method_is_running() -> None:
    asked = [
        place
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent.name != "methods"
        for place in named_methods(path)
        if place.partition(":")[0] not in ALLOWED
    ]
    assert asked == []


def test_files_and_functions_stay_readable() -> None:
    """Not a limit to enforce to the letter; three times the house habit is no longer readable."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 400, path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 80, f"{path.name}: {node.name}"
