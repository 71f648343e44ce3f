"""The paper's figures: shown beside runs that are the paper's, and what differs in those that are not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flashfl.report import figures, paper, tables
from flashfl.report.gather import groups_of, summary
from flashfl.report.load import flat, load
from flashfl.run import cells
from flashfl.run.config import load_toml, make_config
from tests.report.runs import edited

PAPER = Path(__file__).parents[2] / "configs" / "paper"
SETTING: dict[str, Any] = {
    "task.dataset": "cifar10", "task.partition": "lda", "task.alpha": 1.0, "task.clients": 100, "train.per_round": 10,
    "train.rounds": 600, "train.epochs": 1, "train.batch": 32, "method.name": "jmwst", "method.density": 0.05,
    "method.r_int": 5, "method.nm": 0,
}  # fmt: skip


@pytest.mark.parametrize(("change", "mean"), [
    ({}, 85.9), ({"method.r_int": 1}, 85.34), ({"method.r_int": 7}, None), ({"task.alpha": 0.3}, None),
    ({"task.partition": "iid"}, 87.18), ({"method.name": "spdst"}, 85.64), ({"task.synthetic": True}, None),
    ({"method.name": "dense", "method.density": 1.0}, 87.13), ({"method.freeze_after": 300}, None),
    ({"method.name": "spdst", "method.density": 0.2, "method.nm": 8}, 86.96), ({"task.clients": 1}, None),
    ({"method.name": "pdst"}, 83.33), ({"method.name": "pdst", "method.allocation": "erk"}, None),
    ({"method.name": "hetero-spdst", "method.densities": [0.1, 0.15, 0.2]}, 86.16),
])  # fmt: skip
def test_the_papers_figure_is_found_for_its_setting_alone(change: dict[str, Any], mean: float | None) -> None:
    found = paper.match({**SETTING, **change})
    assert (found and found["mean"]) == mean
    assert not found or found["differs"] == []


def test_another_scale_than_the_papers_is_said() -> None:
    found = paper.match({**SETTING, "train.rounds": 60, "task.model": "vgg16"})
    assert found
    assert found["differs"] == ["model vgg16 here, resnet18 there", "rounds 60 here, 600 there"]


@pytest.mark.parametrize(("option", "said"), [
    ("--static-bn true", "static_bn True here, False there"), ("--model vgg16", "model vgg16 here, resnet18 there"),
    ("--limit 1000", "limit 1000 here, 0 there"), ("--lr 0.5", "lr 0.5 here, 0.1 there"),
    ("--lr-end 0.1", "lr_end 0.1 here, 0.001 there"), ("--momentum 0.9", "momentum 0.9 here, 0.0 there"),
    ("--warmup-epochs 1", "warmup_epochs 1 here, 10 there"), ("--augment false", "augment False here, True there"),
    ("--dropout 0.5", "dropout 0.5 here, 0.0 there"), ("--max-steps 1", "max_steps 1 here, 0 there"),
    ("--prunable conv", "prunable conv here, auto there"), ("--values int8", "values int8 here, fp32 there"),
    ("--max-bytes 9", "max_bytes 9 here, 0 there"), ("--partition-file x", "partition_file x here, none there"),
    ("--method jmwst --aggregator wfa", "aggregator wfa here, fedavg there"),
    ("--method jmwst --adapt.growth gradient", "adapt.growth gradient here, random there"),
    ("--density 0.2 --nm 4", "nm 4 here, 8 there"),
    ("--method hetero-spdst --densities 0.05,0.2 --shares 0.5,0.5", "densities 0.05, 0.2 here, 0.1, 0.15, 0.2 there"),
])  # fmt: skip
def test_every_change_of_the_papers_configuration_is_said(option: str, said: str) -> None:
    words = option.split()
    change = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    found = paper.match(flat(make_config(load_toml(PAPER / "cifar10.toml"), change).to_json()))
    assert found
    assert said in found["differs"]
    assert all("shares" in other for other in found["differs"] if other != said)


def test_where_and_how_fast_a_run_was_made_is_no_change() -> None:
    change = {"device": "cpu", "workers": "3", "seed": "4", "eval_every": "7", "precision": "fp32", "track": "mlflow"}
    found = paper.match(flat(make_config(load_toml(PAPER / "cifar10.toml"), change).to_json()))
    assert found == {"mean": 85.64, "std": 0.58, "differs": []}


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "tinyimagenet", "femnist", "sst2"])
def test_the_papers_own_configurations_are_the_papers(name: str) -> None:
    found = paper.match(flat(make_config(load_toml(PAPER / f"{name}.toml"), {}).to_json()))
    assert found
    assert found["differs"] == []


@pytest.mark.parametrize("table", cells.tables())
def test_the_papers_cells_are_the_papers(table: str) -> None:
    for cell in cells.load_table(table)[2]:
        found = paper.match(flat(cell.config(seed=1).to_json()))
        if cell.paper and cell.method.get("warmup_clients") != 0:
            assert found
            assert (found["mean"], found["differs"]) == (cell.paper["mean"], [])


def test_the_papers_figure_is_not_drawn_or_printed_beside_another_model(compared: Path, tmp_path: Path) -> None:
    for model, known in (("resnet18", True), ("vgg16", False)):
        told = make_config(load_toml(PAPER / "cifar10.toml"), {"model": model}).to_json()
        found = load([edited(compared / "spdst-seed0", tmp_path / model, partial(dict, config=told))])
        assert ("85.64 ± 0.58" in tables.markdown(found)) is known
        assert (summary(found.runs)["published_saving"] is not None) is known
        axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
        figures.accuracy_rounds(axes, groups_of(found.runs))
        assert bool(axes.containers) is known  # the diamond with its error bar


def test_the_femnist_row_copied_by_mistake_is_not_shipped() -> None:
    rows = [r for r in paper.published()["accuracy"] if r["dataset"] == "femnist" and r["density"] == 0.05]
    assert [(r["method"], r["mean"]) for r in rows] == [("spdst", 81.18)]
