"""Data sets that users download: `flashfl reproduce --all --dataset NAME` on small files in the published forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import published
import pytest

from flashfl.cli import main
from flashfl.paper import cells


def cifar100(root: Path) -> object:
    return published.cifar_binary(root, 100, each=16)


def tinyimagenet(root: Path) -> object:
    pytest.importorskip("PIL")
    return published.tiny_imagenet(root)


@pytest.mark.parametrize("make", [cifar100, tinyimagenet])
def test_one_command_reads_the_files_and_fills_the_table(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: Any
) -> None:
    name = make.__name__
    make(tmp_path / "data")
    paper = cells.SETTINGS[name]
    small = {"rounds": 2, "per_round": 2, "batch": 4, "max_steps": 1, "workers": 1}
    monkeypatch.setitem(cells.SETTINGS, name, {"task": {"clients": 2}, "train": {**paper["train"], **small}})
    monkeypatch.chdir(tmp_path)
    words = f"reproduce --all --dataset {name} --alpha 1 --density 0.05 --method PDST --budget-minutes 5".split()
    assert main([*words, "--device", "cpu", "--data-root", str(tmp_path / "data")]) == 0
    [line] = (tmp_path / "results" / f"{name}.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["place"], record["rounds"], record["dropped"]) == (f"{name}/alpha1/pdst-d0.05-seed0", 2, 0)
    assert record["config"]["task"]["synthetic"] is False
    assert record["density"] == pytest.approx(0.05, rel=1e-3)
    page = (tmp_path / "results.html").read_text()
    assert f"JMWST: {name}, alpha 1" in page
    assert "not run" not in page
