"""A budget of bytes: the run stays within it, uses most of it, and says what it chose."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.cli import main
from flashfl.core.errors import ConfigError
from flashfl.methods.disagree import Disagree
from flashfl.run.budget import Cost, within_budget
from flashfl.run.config import TrainConfig, make_config, plan_of
from flashfl.run.options import parse_bytes
from flashfl.run.results import Results
from tests.conftest import blobs, make_task

SETTINGS: dict[str, Any] = {"per_round": 4, "batch": 4, "eval_every": 4, "workers": 1}


class Wide(torch.nn.Module):
    """Large enough that messages consist of values."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = torch.nn.Linear(25, 400), torch.nn.BatchNorm1d(400)
        self.middle, self.head = torch.nn.Linear(400, 60), torch.nn.Linear(60, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.middle(torch.relu(self.norm(self.body(x.flatten(1)))))))


def wide() -> fl.Task:
    data = [blobs(11, (1, 5, 5), 100 + i) for i in range(8)]
    return fl.Task(Wide, data, blobs(30, (1, 5, 5), 7), name="wide")


@pytest.mark.parametrize("budget", [12_000, 16_000, 40_000])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (fl.SPDST(warmup_clients=2, warmup_epochs=1), {}),
        (fl.SPDST(warmup_clients=2, warmup_epochs=1), {"values": "int8", "values_up": "int4", "upload": "changes"}),
        (fl.JMWST(warmup_clients=2, warmup_epochs=1), {}),
        (fl.JMWST(warmup_clients=2, warmup_epochs=1, r_int=3), {"values": "int8"}),
        (fl.PDST(), {"static_bn": True}),
        (fl.FlashPlus(warmup_clients=2, warmup_epochs=1), {}),
    ],
)
def test_run_stays_within_its_budget_and_uses_it(budget: int, method: fl.Method, settings: dict[str, Any]) -> None:
    run = fl.simulate(method, wide(), 8, budget=budget, **SETTINGS, **settings)
    each = {way: getattr(run, f"bytes_{way}") / (8 * 4) for way in ("down", "up")}
    assert max(each.values()) <= budget
    least = 0.7 if isinstance(method, fl.JMWST) and method.r_int else 0.95  # what a moved mask takes is estimated
    assert run.weights.mask.density == 1 or max(each.values()) >= least * budget


def test_more_bytes_buy_more_weights_and_then_more_bits() -> None:
    task, found = wide(), []
    for budget in (8_000, 20_000, 32_000, 60_000, 200_000):
        method, train, _ = within_budget(fl.SPDST(), task, TrainConfig(rounds=10, per_round=4, budget=budget))
        assert isinstance(method, fl.SPDST)
        found.append((train.values, method.density))
    assert [values for values, _ in found] == ["int4", "int8", "fp16", "fp32", "fp32"]
    assert found[-1][1] == 1.0


def test_chosen_density_is_the_densest_that_fits() -> None:
    task, train = wide(), TrainConfig(rounds=10, per_round=4, budget=12_000, values="int8")
    method, made, said = within_budget(fl.SPDST(), task, train)
    assert isinstance(method, fl.SPDST)
    cost = Cost(method, plan_of(train, task, 8))
    assert max(cost.bytes(method.density, made)) <= 12_000
    assert max(cost.bytes(method.density + 1e-4, made)) > 12_000
    assert f"density {method.density:g}" in said
    assert made.values == "int8"  # what is set stays
    assert within_budget(method, task, made)[:2] == (method, made)  # so a resumed run chooses the same


def test_run_with_a_budget_is_extended_twice(tmp_path: Path) -> None:
    """Its density fits the rounds that it was begun with: with more of them, the first phase weighs less."""
    task, found = wide(), []
    for rounds in (2, 4, 8):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="rounds changed")
            run = fl.simulate(fl.SPDST(), task, rounds, budget=12_000, folder=tmp_path, resume=rounds > 2, **SETTINGS)
        assert isinstance(run.method, fl.SPDST)
        found.append((run.method.density, len(run.history)))
    assert found == [(found[0][0], 3), (found[0][0], 5), (found[0][0], 9)]


def test_budget_too_small_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"budget = 100: .* needs about \d+ bytes a message. Raise the budget"):
        fl.simulate(fl.SPDST(), wide(), 2, budget=100, **SETTINGS)


@pytest.mark.parametrize(
    ("formats", "named"),
    [
        ({}, "values int4 down and int4 up, and rest fp16"),
        ({"values": "int8", "values_up": "int4"}, "values int8 down and int4 up, and rest fp32"),
        ({"values": "fp16", "rest": "fp16"}, "values fp16 down and fp16 up, and rest fp16"),
    ],
)
def test_smallest_budget_is_that_of_the_formats_in_use(formats: dict[str, Any], named: str) -> None:
    def chosen(budget: int) -> float:
        train = TrainConfig(rounds=10, per_round=4, budget=budget, **formats)
        return within_budget(fl.SPDST(), wide(), train)[0].density  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(ConfigError, match=rf"With {named}, .* needs about \d+ bytes") as caught:
        chosen(100)
    least = int(str(caught.value).partition("about ")[2].split()[0])
    assert chosen(least) == 1e-4
    with pytest.raises(ConfigError, match="too small"):
        chosen(least - 1)


def test_method_without_density_is_refused() -> None:
    with pytest.raises(ConfigError, match="dense has no density to choose"):
        fl.simulate(fl.Dense(), make_task("norm"), 2, budget=10_000, **SETTINGS)


@pytest.mark.parametrize("method", [fl.HeteroSPDST(), fl.HeteroJMWST()], ids=lambda method: method.name)
def test_method_with_several_densities_is_refused(method: fl.Method) -> None:
    with pytest.raises(ConfigError, match=f"{method.name} has no density to choose"):
        fl.simulate(method, wide(), 2, budget=12_000, **SETTINGS)


@pytest.mark.parametrize("name", ["topk", "zerofl", "sparsyfed", "lotteryfl", "prunefl"])
def test_method_that_sends_dense_models_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} sends clients a model of density 1, whatever its own"):
        fl.simulate(fl.METHODS[name](), wide(), 2, budget=12_000, **SETTINGS)


def test_method_whose_clients_get_parts_of_a_dense_model_keeps_its_budget() -> None:
    run = fl.simulate(fl.METHODS["fedspa"](), wide(), 8, budget=12_000, **SETTINGS)
    assert max(run.bytes_down, run.bytes_up) / (8 * 4) <= 12_000


@dataclass(frozen=True)
class Own(fl.PDST):
    density: float = field(default=0.1, metadata={"help": "how much is kept"})


@dataclass(frozen=True)
class Required(fl.Method):
    density: float

    def init(self, plan: fl.Plan) -> fl.State:
        return fl.PDST(density=self.density).init(plan)

    def aggregate(self, s: fl.State, sums: fl.Sums) -> fl.State:
        return s.next(fl.fedavg(sums))


@pytest.mark.parametrize("method", [Own(), Required(density=0.3)])
def test_custom_method_declares_its_density_as_it_likes(method: fl.Method) -> None:
    found = within_budget(method, wide(), TrainConfig(rounds=10, per_round=4, budget=12_000))[0]
    assert isinstance(found, Own | Required)
    assert found.density not in (0.1, 0.3)


@dataclass(frozen=True)
class Remembers(fl.PDST):
    def init(self, plan: fl.Plan) -> fl.State:
        return replace(super().init(plan), extra={"factor": torch.tensor(0.5)})

    def work(self, s: fl.State, client: fl.Client) -> fl.Local:
        return self.local(s, lr=s.plan.lr(s.counted) * float(s.kept(torch.Tensor, "factor")))


def test_custom_method_finds_what_its_state_keeps() -> None:
    run = fl.simulate(Remembers(), wide(), 4, budget=12_000, **SETTINGS)
    assert max(run.bytes_down, run.bytes_up) / (4 * 4) <= 12_000


@pytest.mark.parametrize("settings", [{"secure": True}, {"dp_noise": 1.0}])
def test_private_run_has_no_budget_of_bytes(settings: dict[str, Any]) -> None:
    """Its updates are encoded in another way."""
    with pytest.raises(ConfigError, match="budget = 12000: not possible with `secure` or `dp_"):
        fl.simulate(fl.PDST(), wide(), 2, budget=12_000, **SETTINGS, **settings)


def test_finished_run_over_its_budget_warns() -> None:
    with pytest.warns(RuntimeWarning, match=r"disagree took more than budget = 12000: \d+ bytes down and \d+ bytes up"):
        run = fl.simulate(Disagree(sm=1.0, warmup_clients=0), wide(), 4, budget=12_000, **SETTINGS)
    assert max(run.bytes_down, run.bytes_up) / (4 * 4) > 12_000


def test_density_that_a_budget_replaces_is_named() -> None:
    train = TrainConfig(rounds=10, per_round=4, budget=12_000)
    assert "instead of 0.7," in within_budget(fl.SPDST(density=0.7), wide(), train)[2]
    assert "instead" not in within_budget(fl.SPDST(), wide(), train)[2]


@pytest.mark.parametrize(
    ("text", "count"), [("2.3MB", 2_300_000), ("545 kB", 545_000), ("1gb", 10**9), ("700", 700), ("1e6", 10**6)]
)
def test_amounts_of_bytes(text: str, count: int) -> None:
    assert parse_bytes(text, "budget") == count
    assert make_config({}, {"budget": text}).train.budget == count
    assert make_config({}, {"max_bytes": text}).train.max_bytes == count


@pytest.mark.parametrize("text", ["", "MB", "2.3 megabytes", "-1MB", "1.2.3"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 2\.3MB"):
        make_config({}, {"budget": text})


def test_command_line_says_and_records_what_it_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--quick", "--budget", "20kB", "--method", "flashplus", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert "budget of 20000 bytes a client and round each way: density " in capsys.readouterr().err
    config = Results.read(tmp_path / "run").header["config"]
    assert 0 < config["method"]["density"] < 1
    assert config["train"]["budget"] == 20_000
