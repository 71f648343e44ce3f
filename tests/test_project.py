"""What a public project has, and keeps small."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def test_readme_is_short_and_results_live_elsewhere() -> None:
    readme = (ROOT / "README.md").read_text().splitlines()
    assert len(readme) < 100
    start = readme.index("## The paper's numbers, and other systems")
    rows = [line for line in readme[start:] if line.startswith("|")]
    assert len(rows) == 2 + 5 + 5  # heading, rule, five rows of ours and five of other systems
    assert sum(line.startswith("|") for line in (ROOT / "docs" / "results.md").read_text().splitlines()) > 40


def test_contributing_fits_a_page() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60


def test_workflow_runs_check_and_test() -> None:
    text = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    for script in ("check", "test"):
        assert f"scripts/{script}" in text
        assert (ROOT / "scripts" / script).exists()


def test_project_names_its_urls() -> None:
    assert all(address.startswith("https://") for address in PROJECT["urls"].values())
    assert PROJECT["urls"]["Paper"] in (ROOT / "README.md").read_text()


def test_every_extra_has_pinned_versions() -> None:
    extras = PROJECT["optional-dependencies"].values()
    wanted = [*PROJECT["dependencies"], *(need for extra in extras for need in extra)]
    pinned = {name.lower().replace("_", "-") for name in PINS}
    missing = [need for need in wanted if re.split(r"[\[<>=!~ ]", need)[0].lower() not in pinned]
    assert missing == []


def test_torch_is_pinned_in_one_place() -> None:
    kinds = ("*.toml", "*.txt", "scripts/*", "docs/*.md", ".github/**/*.yml")
    files = [path for kind in kinds for path in ROOT.glob(kind)]
    found = [path.name for path in files if path.is_file() and re.search(r"torch==\d", path.read_text())]
    assert found == ["constraints.txt"]


def test_core_needs_no_scikit_learn_or_rich() -> None:
    names = {re.split(r"[<>=!~ ]", need)[0] for need in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "safetensors"}


@pytest.mark.parametrize("name", [
    "self.local", "s.order", "sums.holders", "layout.trained_size", "random_mask(plan, budgets, key)", "@part",
    "s.extra", "s.key", "super()", "SENSITIVITY", "begin(s, densities)",
])  # fmt: skip
def test_guide_to_methods_explains(name: str) -> None:
    assert name in (ROOT / "docs" / "adding-a-method.md").read_text()


@pytest.mark.parametrize("name", ["results.jsonl.old", "`lock`", "killed before its first checkpoint"])
def test_page_about_runs_explains(name: str) -> None:
    assert name in (ROOT / "docs" / "runs.md").read_text()
