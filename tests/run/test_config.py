"""One configuration from a file, the command line and a record: every way in, and every way to be wrong."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import flashfl as fl
from flashfl.core.errors import ConfigError
from flashfl.data.tasks import TaskConfig
from flashfl.run.config import RunConfig, TrainConfig, load_toml, make_config, plan_of
from flashfl.run.options import options_of
from tests.conftest import make_task

TEXT = """
[task]
dataset = "digits"
clients = 12
alpha = 0.3

[train]
rounds = 40
per_round = 4
lr = 1          # a whole number where a float is meant
static_bn = true
values = "int8"

[method]
name = "jmwst"
density = 0.1
r_int = 5

[method.adapt]
growth = "gradient"
"""


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "config.toml"
    path.write_text(TEXT)
    return load_toml(path)


def test_a_file_becomes_dataclasses(data: dict[str, Any]) -> None:
    config = make_config(data, {})
    assert config.task == TaskConfig(dataset="digits", clients=12, alpha=0.3)
    assert config.train == TrainConfig(rounds=40, per_round=4, lr=1.0, static_bn=True, values="int8")
    assert isinstance(config.train.lr, float)
    assert config.method == fl.JMWST(density=0.1, r_int=5, adapt=fl.PruneRegrow(growth="gradient"))


def test_the_command_line_wins(data: dict[str, Any]) -> None:
    before = json.dumps(data)
    config = make_config(
        data,
        {
            "density": "0.2", "train.rounds": "7", "alpha": "100", "static_bn": "False", "values": "bf16",
            "adapt.growth": "momentum", "method.adapt.rate": "0.5", "seed": "3",
        },
    )  # fmt: skip
    assert isinstance(config.method, fl.JMWST)
    assert (config.method.density, config.method.r_int) == (0.2, 5)
    assert config.method.adapt == fl.PruneRegrow(rate=0.5, growth="momentum")
    assert (config.train.rounds, config.train.static_bn, config.train.values) == (7, False, "bf16")
    assert (config.train.seed, config.task.alpha) == (3, 100.0)
    assert json.dumps(data) == before, "the file's tables are not written to"


def test_another_method_keeps_the_settings_it_knows(data: dict[str, Any]) -> None:
    config = make_config(data, {"method": "nst"})
    assert config.method == fl.NST(density=0.1, adapt=fl.PruneRegrow(growth="gradient"))
    assert make_config(data, {"method": "dense"}).method == fl.Dense()
    assert make_config(data, {"method": "hetero-spdst"}).method == fl.HeteroSPDST(
        adapt=fl.PruneRegrow(growth="gradient")
    )


def test_lists_on_the_command_line() -> None:
    expected = fl.HeteroJMWST(densities=(0.1, 0.4), shares=(0.5, 0.5))
    for text in ("0.1,0.4", "[0.1, 0.4]"):
        config = make_config({}, {"method": "hetero-jmwst", "densities": text, "shares": "0.5,0.5"})
        assert config.method == expected


def test_densities_that_an_error_advises_work() -> None:
    assert make_config({}, {"method": "hetero-spdst", "densities": "0.1,0.15,0.2"}).method == fl.HeteroSPDST()


def test_nothing_at_all_is_the_embedded_task() -> None:
    assert make_config({}, {}) == RunConfig()


PAPER = [
    ("dense", {}),
    ("nst", {"density": "0.05", "adapt.rate": "0.3", "adapt.growth": "gradient", "aggregator": "wfa"}),
    ("pdst", {"allocation": "erk"}),
    ("pdst", {"allocation": "erk+", "aggregator": "wfa"}),
    ("spdst", {"warmup_clients": "5", "warmup_epochs": "3", "mask_init": "magnitude", "nm": "4"}),
    ("jmwst", {"r_int": "5", "freeze_after": "30", "nm": "8", "static_bn": "true"}),
    ("hetero-spdst", {"densities": "0.1,0.2", "shares": "0.5,0.5"}),
    ("hetero-jmwst", {"densities": "0.1,0.2,0.3", "shares": "0.3,0.3,0.4", "r_int": "2"}),
    ("jmwst", {"momentum": "0.9", "weight_decay": "1e-4", "prox": "0.01", "epochs": "2", "lr_end": "0.01"}),
    ("spdst", {"dropout": "0.2", "min_replies": "2", "max_bytes": "1000000", "partition": "dirichlet", "alpha": "0.1"}),
    ("spdst", {"partition": "shards", "classes_per_client": "3", "partition_seed": "7", "per_client": "40"}),
]


@pytest.mark.parametrize(("name", "options"), PAPER, ids=[f"{n}-{len(o)}" for n, o in PAPER])
def test_a_record_gives_the_same_configuration_back(name: str, options: dict[str, str]) -> None:
    config = make_config({}, {"method": name, **options})
    record = json.loads(json.dumps(config.to_json()))
    assert make_config(record) == config
    assert record["method"]["name"] == name
    assert set(record["train"]) == {f.name for f in fields(TrainConfig)}, "defaults are recorded too"


@pytest.mark.parametrize("name", fl.METHODS)
def test_every_method_has_options_with_defaults(name: str) -> None:
    options = options_of(fl.METHODS[name])
    assert all("." in option or hasattr(fl.METHODS[name](), option) for option in options)
    config = make_config({}, {"method": name})
    assert make_config(config.to_json()) == config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"denisty": "0.1"}, "unknown option 'denisty': did you mean 'density'?"),
        ({"adapt": "x", "method": "jmwst"}, "--adapt is a group of settings, such as --adapt.rate. "
         "`flashfl methods jmwst` explains them."),
        ({"ranges": "3"}, "--ranges is a group of settings, such as --ranges.weights. `flashfl settings` explains"),
        ({"adapt": "x", "method": "pdst"}, "unknown option 'adapt': pdst has no such setting; nst, spdst, jmwst"),
        ({"adapt.rate": "1", "method": "pdst"}, "'adapt.rate': pdst has no such setting; nst, spdst, jmwst"),
        ({"method.adapt.rate": "1", "method": "pdst"}, "pdst has no such setting; nst, spdst, jmwst"),
        ({"method": "hetero-spdst", "density": "0.1"}, "hetero-spdst takes --densities instead of --density, such as "
         "--densities 0.1,0.15,0.2"),
        ({"rounds": ""}, "--rounds (empty): expected int"),
        ({"train.round": "3"}, "did you mean 'train.rounds'?"),
        ({"adapt.grwoth": "random"}, "did you mean 'adapt.growth'?"),
        ({"method": "jwmst"}, "unknown method 'jwmst': did you mean 'jmwst'?"),
        ({"method": "dense", "density": "0.1"}, "unknown option 'density'"),
        ({"rounds": "many"}, "--rounds many: expected int"),
        ({"rounds": "3.5"}, "train.rounds = 3.5: expected int, got float"),
        ({"rounds": "true"}, "train.rounds = True: expected int, got bool"),
        ({"lr": '"fast"'}, "train.lr = 'fast': expected float, got str"),
        ({"static_bn": "yes"}, "--static_bn yes: expected true or false"),
        ({"static_bn": "1"}, "train.static_bn = 1: expected bool, got int"),
        ({"values": "fp8"}, "train.values = 'fp8': expected one of 'fp32', 'fp16', 'bf16', 'int8'"),
        ({"adapt.growth": "magic"}, "adapt.growth = 'magic': expected one of 'random', 'gradient', 'momentum'"),
        ({"adapt.rate": "1"}, "rate = 1.0: must be at least 0 and below 1. This is the prune rate (adapt.rate)"),
        ({"density": "0"}, "density = 0.0: must be above 0 and at most 1"),
        ({"density": "-0.1"}, "density = -0.1: must be above 0 and at most 1"),
        ({"density": "1.5"}, "density = 1.5: must be above 0 and at most 1"),
        ({"density": "NaN"}, "density = nan: must be a finite number, above 0 and at most 1"),
        ({"rounds": "0"}, "rounds = 0: must be at least 1"),
        ({"per_round": "-1"}, "per_round = -1: must be at least 1"),
        ({"batch": "0"}, "batch = 0: must be at least 1"),
        ({"lr": "-0.1"}, "lr = -0.1: must be at least 0"),
        ({"lr": "Infinity"}, "lr = inf: must be a finite number, at least 0"),
        ({"dropout": "1"}, "dropout = 1.0: must be at least 0 and below 1"),
        ({"max_bytes": "-1"}, "max_bytes = '-1': expected a number of bytes, such as 2.3MB"),
        ({"lanes": "-3"}, "lanes = -3: must be at least 0"),
        ({"threads": "1e20"}, "train.threads = 1e+20: expected int, got float"),
        ({"threads": "100000000000000000000"}, "threads = 100000000000000000000: must be at least 1 and at most 1024"),
        ({"workers": "5000"}, "workers = 5000: must be at least 0 and at most 1024"),
        ({"track": "tensorbord"}, "unknown tracker 'tensorbord': did you mean 'tensorboard'?"),
        ({"method": "hetero-spdst", "densities": "0.1,0.2"}, "2 densities (or widths), but `shares` has 3 numbers"),
        ({"method": "hetero-spdst", "densities": "0.1,x"}, "expected values separated by commas"),
        ({"method": "hetero-spdst", "densities": '0.1,"a",0.2'}, "densities[1] = 'a': expected float, got str"),
        ({"method": "jmwst", "r_int": "0"}, "r_int = 0"),
        ({"method": "pdst", "allocation": "erk-"}, "allocation"),
        ({"aggregator": "median"}, "aggregator"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_an_error_that_says_what_is_right(overrides: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({}, overrides)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tsk]\n", "unknown table 'tsk': did you mean 'task'?"),
        ("rounds = 3\n", "unknown table 'rounds'"),
        ("method = 'spdst'\n", "method = 'spdst': expected a table [method]"),
        ("[train]\nround = 3\n", "unknown setting in train 'round': did you mean 'rounds'?"),
        ("[task]\nclients = '20'\n", "task.clients = '20': expected int, got str"),
        ("[method]\nname = 'fedprox'\n", "unknown method 'fedprox'"),
        ("[method]\nname = []\n", "unknown method '[]'"),
        ("[method]\ndensty = 0.1\n", "unknown setting in spdst 'densty': did you mean 'density'?"),
        ("[method]\nadapt = 'random'\n", "adapt = 'random': expected"),
        ("[method.adapt]\ngrow = 'random'\n", "unknown setting in spdst.adapt 'grow'"),
        ("[method.adapt]\nis = 'Local'\n", "spdst.adapt = {'is': 'Local'}: expected PruneRegrow"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what_is_right(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        make_config(load_toml(path), {"adapt.rate": "0.2"} if "adapt = " in text else {})
    assert said in str(caught.value)


def test_a_file_that_is_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none.toml: No such file"):
        load_toml(tmp_path / "none.toml")
    path = tmp_path / "c.toml"
    path.write_text("[train\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_toml(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_toml(path)


def test_more_clients_a_round_than_clients() -> None:
    task = make_task("dropout", clients=4)
    with pytest.raises(ConfigError, match="per_round = 5: must be at least 1 and at most 4"):
        plan_of(TrainConfig(per_round=5), task, len(task.clients))


def test_a_method_by_name() -> None:
    assert make_config({"method": {"name": "pdst", "density": 1}}).method == fl.PDST(density=1.0)
    assert make_config({"method": {}}).method == fl.SPDST()


@pytest.mark.parametrize("method", [fl.SPDST, fl.JMWST, fl.NST])
def test_a_rule_that_is_none_is_refused(method: Any) -> None:
    with pytest.raises(ConfigError, match=r"adapt = 'x': must be a PruneRegrow"):
        method(adapt="x")


def test_a_setting_with_settings_of_its_own_names_them() -> None:
    with pytest.raises(
        ConfigError, match=r"server = 'adam': expected ServerStep .* with any of lr, momentum, adam, tau"
    ):
        make_config({"train": {"server": "adam"}}, {})
