"""What the documentation shows works as shown."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flashfl as fl
from flashfl import accuracy
from flashfl.cli import _parser, _settings_apart
from tests.conftest import blobs, make_task
from tests.test_every_method import check_density, run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _python_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    block = _python_of(ROOT / "README.md")[0]
    assert block.count("\n") <= 12
    script = tmp_path / "example.py"
    script.write_text(block)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 3


def test_the_flower_example_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from flashfl.flower.testing import InProcessGrid

    def private_samples(context: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return blobs(300, (6,), int(context.node_config["partition-id"]))

    def net() -> torch.nn.Module:
        wide = [torch.nn.Linear(6, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU()]
        return torch.nn.Sequential(*wide, torch.nn.Linear(128, 3))

    test = blobs(60, (6,), 9)
    mine = types.SimpleNamespace(Net=net, private_samples=private_samples, test_samples=lambda: test)
    monkeypatch.setitem(sys.modules, "mine", mine)  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "example"}
    exec(compile(_python_of(ROOT / "README.md")[1], "README.md", "exec"), space)
    grid = InProcessGrid({node: (space["client"], {"partition-id": node}) for node in (1, 2, 3)})
    space["main"](grid, None)
    model = net()
    model.load_state_dict(load_file(tmp_path / "trained" / "model.safetensors"))
    assert float(accuracy(model(test[0]), test[1])) > 0.6  # chance: a third


def test_the_method_of_the_guide_keeps_what_all_methods_promise() -> None:
    """As the page says, once it is registered."""
    code = _python_of(ROOT / "docs" / "adding-a-method.md")[0]
    space: dict[str, Any] = {"__name__": "guide"}
    with pytest.MonkeyPatch.context() as patch:
        module = types.ModuleType("guide")
        patch.setitem(sys.modules, "guide", module)
        exec(compile(code, "adding-a-method.md", "exec"), space)
        method = space["PruneOnce"](density=0.3)
        task = make_task("norm")
        one, states = run(method, task)
        check_density(method, states)
        assert one.checksum == run(method, task, workers=2)[0].checksum


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tables_of_bytes_say_how_long_they_take(page: Path) -> None:
    lines = page.read_text().splitlines()
    heads = [line for line, rule in itertools.pairwise(lines) if re.fullmatch(r"\|(-+\|)+", rule)]
    of_bytes = [head for head in heads if re.search(r"\bup( /| kB)|\bMB down, up\b|\bsize of an update\b", head)]
    assert all("s at 1 / 10 / 100 Mbit/s" in head for head in of_bytes)
    assert of_bytes or page.name not in ("README.md", "results.md")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "LOG.md"], ids=lambda p: p.name)
def test_commands_of_flashfl_parse(page: Path) -> None:
    text = page.read_text()
    lines = re.findall(r"^flashfl ([^\n#]+)", text, re.MULTILINE) + re.findall(r"`flashfl ([^`\n]+)`", text)
    parser, commands = _parser()
    for line in lines:
        words = shlex.split(line.replace("RUNS_DIR", "runs"))
        if words[0] in commands and "|" not in words and "..." not in words:
            own, _ = _settings_apart(words, commands[words[0]])
            positional = {"report": 1, "figure": 2, "export": 1, "watch": 1, "reproduce": 1}.get(words[0], 0)
            if len(own) > positional:
                parser.parse_args(own)
        else:
            assert words[0] in commands or words[0].startswith("-"), line


def test_api_reference_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "api"), "--check"], check=False)
    assert done.returncode == 0, "run .venv/bin/python scripts/api"


def test_api_reference_has_every_public_name_with_its_signature() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for name in (name for name in fl.__all__ if callable(getattr(fl, name))):
        signature = "\n" if name.endswith("Error") else "("  # exceptions have none
        assert f"### `{name}`\n\n```python\n{name}{signature}" in text, name
