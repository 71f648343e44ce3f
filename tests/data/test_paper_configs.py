"""The paper's settings as files: their numbers, their commands, and that each can be tried without data."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from flashfl.cli import main
from flashfl.core.parts import build
from flashfl.data.registry import DATASETS
from flashfl.data.tasks import TaskConfig, build_task
from flashfl.methods import METHODS
from flashfl.run.compare import run_config
from flashfl.run.config import RunConfig, load_toml, make_config
from flashfl.run.quick import quick

FOLDER = Path(__file__).parents[2] / "configs" / "paper"
FILES = sorted(FOLDER.glob("*.toml"))
TABLE_1 = {  # data set: model, rounds, clients, clients a round, batch
    "mnist": ("mnistnet", 400, 100, 10, 32),
    "cifar10": ("resnet18", 600, 100, 10, 32),
    "cifar100": ("resnet18", 800, 100, 10, 32),
    "tinyimagenet": ("resnet18", 600, 100, 10, 32),
    "femnist": ("leafcnn", 1000, 3400, 34, 16),
}


LEAST = {"clients": 2, "batch": 2, "limit": 20, "rounds": 1, "workers": 1, "device": "cpu"}


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
def test_first_comment_of_paper_config_is_its_command(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert re.match(rf"# flashfl run configs/paper/{re.escape(path.name)} --method \w+ --density [\d.]+", first)
    held = tomllib.loads(path.read_text())
    assert f"--method {held['method']['name']} --density {held['method']['density']}" in first


class Reached(Exception):
    """Carries the configuration that a command line came to."""


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flashfl run` stops where it would begin to train."""

    def stop(config: RunConfig, *args: Any, **more: Any) -> None:
        raise Reached(config)

    monkeypatch.setattr("flashfl.run.compare.run_config", stop)
    monkeypatch.chdir(FOLDER.parents[1])


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_command_of_paper_config_gives_its_settings(path: Path, tmp_path: Path) -> None:
    words = shlex.split(path.read_text().splitlines()[0].removeprefix("#"))
    assert words.pop(0) == "flashfl"
    with pytest.raises(Reached) as reached:
        main([*words, "--out", str(tmp_path)])
    assert reached.value.args[0] == make_config(load_toml(path), {})


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_unknown_setting_in_paper_config_fails(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(path), "--densty", "0.1", "--out", str(tmp_path)]
    assert main(command) == 1
    assert "densty" in capsys.readouterr().err
    held = tmp_path / "wrong.toml"
    held.write_text(path.read_text().replace("per_round", "per_raund"))
    assert main(["run", str(held), "--out", str(tmp_path)]) == 1
    assert "per_raund" in capsys.readouterr().err


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_paper_configs_run_on_synthetic_data(path: Path, tmp_path: Path) -> None:
    values = tomllib.loads(path.read_text())["task"] | {"synthetic": True, "clients": 2, "data_root": str(tmp_path)}
    if values["model"] == "bert":
        pytest.importorskip("transformers")
    task = build_task(build(TaskConfig, values, "task"))
    inputs, y = task.train[1].fetch(torch.arange(2), key=1)
    with torch.no_grad():
        assert task.build()(*inputs).shape == (2, DATASETS[values["dataset"]].classes)
    assert len(task.clients) == 2
    assert y.shape == (2,)


def small(path: Path, **settings: Any) -> RunConfig:
    """`flashfl run PATH --quick --synthetic true` with more settings."""
    return quick(load_toml(path), {"synthetic": "true"} | {name: str(value) for name, value in settings.items()})


def run_quick(path: Path, root: Path, **settings: Any) -> None:
    """The whole way, on made-up data, with the model at its full size."""
    config = small(path, **LEAST, **settings, data_root=root)
    done = run_config(config, None, quiet=True)
    task, [last] = done.task, [record for record in done.history if record.counts]
    assert (last.cohort, last.failures) == ((0, 1), {})
    assert math.isfinite(last.loss)
    assert done.weights.mask.density == pytest.approx(config.method.density, rel=0.2)  # nst: a union of masks
    assert all(len(client) >= config.train.batch * config.train.max_steps == 4 for client in task.train)
    assert len(task.test) == config.task.limit
    assert config.task.model == load_toml(path)["task"]["model"]


def quick_cases() -> list[Any]:
    """All files but the one for BERT. Three that differ from cifar10's in their data or their model only are slow."""
    slow = {"cifar100": pytest.mark.slow, "tinyimagenet": pytest.mark.slow, "vgg16-cifar10": pytest.mark.slow}
    paths = [path for path in FILES if path.stem != "sst2"]
    return [pytest.param(path, marks=slow.get(path.stem, ()), id=path.stem) for path in paths]


@pytest.mark.parametrize("path", quick_cases())
def test_quick_runs_with_two_clients_and_two_steps(path: Path, tmp_path: Path) -> None:
    run_quick(path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 2])
def test_quick_runs_bert_with_two_clients_and_two_steps(warmup: int, tmp_path: Path) -> None:
    """Of 85 million prunable weights; its first stage costs as much as all else, hence apart."""
    pytest.importorskip("transformers")
    run_quick(FOLDER / "sst2.toml", tmp_path, warmup_clients=warmup)


@pytest.mark.parametrize("method", METHODS)
def test_quick_runs_every_method(method: str, tmp_path: Path) -> None:
    config = small(FOLDER / "mnist.toml", method=method, data_root=tmp_path, workers=1, device="cpu")
    done = run_config(config, None, quiet=True)
    assert len([record for record in done.history if record.counts]) == 2
    assert not any(record.failures for record in done.history)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_quick_shrinks_every_file_for_every_method(path: Path, method: str) -> None:
    full, config = make_config(load_toml(path), {"method": method}), small(path, method=method)
    task, train = config.task, config.train
    assert 1 <= train.per_round <= task.clients <= 4
    assert train.rounds * train.per_round * train.epochs * train.max_steps * train.batch <= 64
    assert task.limit <= 64
    assert getattr(config.method, "warmup_clients", 0) <= 2
    assert getattr(config.method, "warmup_epochs", 1) == 1
    assert (task.model, task.partition, task.alpha) == (full.task.model, full.task.partition, full.task.alpha)


def test_quick_keeps_settings_of_the_command_line() -> None:
    path = FOLDER / "femnist.toml"
    everyone = small(path, clients=0)
    assert (everyone.task.clients, everyone.train.per_round) == (0, 2)
    assert small(path, rounds=7, limit=0).train.rounds == 7
    assert small(path, rounds=7, limit=0).task.limit == 0
    crowd = small(path, **{"train.per_round": 20})
    assert (crowd.task.clients, crowd.train.per_round) == (20, 20)
    alone = small(path, clients=1)
    assert (alone.task.clients, alone.train.per_round) == (1, 1)
    assert small(path, warmup_clients=0).method.warmup_clients == 0


def test_quick_shrinks_natural_partition_with_all_clients() -> None:
    config = quick({"task": {"dataset": "femnist", "partition": "natural", "clients": 0, "synthetic": True}}, {})
    assert config.task.clients == 4
    task = build_task(config.task)
    assert [len(client) for client in task.train] == [16] * 4


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_run_without_data_says_how_to_get_it(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = DATASETS[load_toml(path)["task"]["dataset"]]
    monkeypatch.setenv("FLASHFL_DATA", "")
    command = ["run", str(path), "--quick", "--data-root", str(tmp_path), "--out", str(tmp_path / "run")]
    if info.model == "bert":
        command += ["--model", "tiny-transformer"]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert f"{info.name!r} is not complete under {tmp_path}" in said  # where
    for name in info.files.forms[0]:
        assert str(tmp_path / name) in said  # which files
    assert info.files.get in said  # how to get them
    assert "--data-root or FLASHFL_DATA" in said


def test_all_paper_configs_exist() -> None:
    names = {path.stem for path in FILES}
    assert names == {*TABLE_1, "sst2", "vgg16-cifar10", "mnist-pathological"}
