"""What the documentation shows works as shown."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from flashfl.cli import _parser, _settings_apart
from tests.conftest import make_task
from tests.test_every_method import check_density, run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block.count("\n") <= 12
    script = tmp_path / "example.py"
    script.write_text(block)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 3


def test_the_method_of_the_guide_keeps_what_all_methods_promise() -> None:
    """As the page says, once it is registered."""
    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
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
