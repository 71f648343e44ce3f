"""The paper's settings as files: their numbers, their commands, and that each can be tried without data."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from flashfl.core.parts import build
from flashfl.data import DATASETS, TaskConfig, build_task

FOLDER = Path(__file__).parents[2] / "configs" / "paper"
FILES = sorted(FOLDER.glob("*.toml"))
TABLE_1 = {  # data set: model, rounds, clients, clients a round, batch
    "mnist": ("mnistnet", 400, 100, 10, 32),
    "cifar10": ("resnet18", 600, 100, 10, 32),
    "cifar100": ("resnet18", 800, 100, 10, 32),
    "tinyimagenet": ("resnet18", 600, 100, 10, 32),
    "femnist": ("leafcnn", 1000, 3400, 34, 16),
}


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1(name: str) -> None:
    held = read(name)
    task, train = held["task"], held["train"]
    assert task["dataset"] == name
    assert (task["model"], train["rounds"], task["clients"], train["per_round"], train["batch"]) == TABLE_1[name]
    assert (train["epochs"], train["lr"], train["lr_end"]) == (1, 0.1, 0.001)
    assert task["partition"] == ("natural" if name == "femnist" else "lda")
    assert (held["method"]["warmup_clients"], held["method"]["warmup_epochs"]) == (34 if name == "femnist" else 10, 10)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_first_comment_is_the_command(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert re.match(rf"# flashfl run configs/paper/{re.escape(path.name)} --method \w+ --density [\d.]+", first)
    held = tomllib.loads(path.read_text())
    assert f"--method {held['method']['name']} --density {held['method']['density']}" in first


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_each_can_be_tried_without_data(path: Path, tmp_path: Path) -> None:
    values = tomllib.loads(path.read_text())["task"] | {"synthetic": True, "clients": 2, "data_root": str(tmp_path)}
    if values["model"] == "bert":
        pytest.importorskip("transformers")
    task = build_task(build(TaskConfig, values, "task"))
    inputs, y = task.train[1].fetch(torch.arange(2), key=1)
    with torch.no_grad():
        assert task.build()(*inputs).shape == (2, DATASETS[values["dataset"]].classes)
    assert len(task.clients) == 2
    assert y.shape == (2,)


def test_all_are_there() -> None:
    names = {path.stem for path in FILES}
    assert names == {*TABLE_1, "sst2", "vgg16-cifar10", "mnist-pathological"}
