"""The paper's figures beside runs: shown for the paper's settings, with what differs for others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flashfl.data import registry
from flashfl.paper import cells, published
from flashfl.report import figures
from flashfl.report.groups import groups_of, groups_table
from flashfl.report.load import load
from flashfl.run.config import load_toml, make_config
from flashfl.run.track import flat
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
def test_paper_figure_is_found_only_for_its_settings(change: dict[str, Any], mean: float | None) -> None:
    found = published.lookup({**SETTING, **change})
    assert found.mean == mean
    assert found.differs == ()


def test_other_model_and_rounds_are_named() -> None:
    found = published.lookup({**SETTING, "train.rounds": 60, "task.model": "vgg16"})
    assert found.differs == ("model vgg16 here, resnet18 there", "rounds 60 here, 600 there")


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
def test_every_change_of_the_paper_configuration_is_named(option: str, said: str) -> None:
    words = option.split()
    change = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    found = published.lookup(flat(make_config(load_toml(PAPER / "cifar10.toml"), change).to_json()))
    assert said in found.differs
    assert all("shares" in other for other in found.differs if other != said)


def test_device_and_speed_settings_are_no_change() -> None:
    change = {"device": "cpu", "workers": "3", "seed": "4", "eval_every": "7", "precision": "fp32", "track": "mlflow"}
    found = published.lookup(flat(make_config(load_toml(PAPER / "cifar10.toml"), change).to_json()))
    assert found == published.Published(85.64, 0.58, (), 19.5)


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "tinyimagenet", "femnist", "sst2"])
def test_paper_configuration_files_match_the_paper(name: str) -> None:
    found = published.lookup(flat(make_config(load_toml(PAPER / f"{name}.toml"), {}).to_json()))
    assert found.differs == ()


@pytest.mark.parametrize("table", cells.TABLES)
def test_every_cell_matches_its_own_figure(table: str) -> None:
    for cell in cells.load_table(table).cells:
        found = published.lookup(flat(cell.config(seed=1).to_json()))
        if cell.paper and table not in ("feddst", "fedspa", "disagreement"):  # other papers' or one client's: no figure
            assert (found.mean, found.differs) == (cell.paper["mean"], ())


@pytest.mark.parametrize("name", cells.SETTINGS)
def test_config_files_repeat_the_settings_of_cells(name: str) -> None:
    """The files are for users to read and run. Their numbers come from `SETTINGS`."""
    told = load_toml(PAPER / f"{name}.toml")
    task = {"dataset": name} | ({} if name == "femnist" else {"alpha": 1.0})
    cell = cells.Cell(task, {"name": "spdst", "density": told["method"]["density"]}, "", None, {})
    there, mine = (flat(c.to_json()) for c in (cell.config(seed=0), make_config(told, {})))
    assert mine.pop("task.model") == registry.info(name).model
    same = {k: v for k, v in there.items() if k in mine and k != "train.eval_every"}
    assert {k: mine[k] for k in same} == same


def test_paper_figure_is_not_shown_beside_another_model(compared: Path, tmp_path: Path) -> None:
    for model, known in (("resnet18", True), ("vgg16", False)):
        told = make_config(load_toml(PAPER / "cifar10.toml"), {"model": model}).to_json()
        found = load([edited(compared / "spdst-seed0", tmp_path / model, partial(dict, config=told))])
        assert ("85.64 ± 0.58" in groups_table(found).markdown()) is known
        assert ("paper %" in groups_table(found).head) is known
        assert (found.runs[0].published.saving is not None) is known
        axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
        figures.accuracy_rounds(axes, groups_of(found.runs))
        assert bool(axes.containers) is known  # the diamond with its error bar


def test_wrong_femnist_row_of_the_paper_is_not_shipped() -> None:
    every = [cell for table in cells.every_table().values() for cell in table.cells]
    rows = [c for c in every if c.paper and c.dataset == "femnist" and c.density == 0.05]
    found = {(c.method["name"], c.paper and c.paper["mean"]) for c in rows}
    assert found == {("spdst", 81.18), ("zerofl", 77.16)}
