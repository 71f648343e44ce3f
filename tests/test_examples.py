"""Every example runs, and its last lines say what they should."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
EXPECTED = {
    "own_model.py": "loaded model:",
    "regression.py": "last mse",
    "own_method.py": "server-momentum",
    "huggingface.py": "task pictures",
    "flower_app.py": "Run(method spdst",
    "read_run.py": "MB went up in 6 rounds",
}
NEEDS = {"huggingface.py": "datasets", "flower_app.py": "flwr", "read_run.py": "pandas"}


def test_every_example_is_run_and_short() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [path.name for path in files] == sorted(EXPECTED)
    assert all(len(path.read_text().splitlines()) <= 50 for path in files)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example_runs(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout


@pytest.mark.slow
def test_notebook_runs() -> None:
    notebook = json.loads((EXAMPLES / "first_run.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells if not "".join(cell["source"]).startswith("import"))
    space: dict[str, Any] = {}
    pytest.importorskip("matplotlib").use("Agg")
    for cell in cells:
        exec("".join(cell["source"]), space)
