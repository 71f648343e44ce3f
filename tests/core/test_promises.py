"""What a method must keep to is checked while it runs, and not only by these tests."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import flashfl as fl
from flashfl.aggregate import average
from flashfl.core.client import Part
from flashfl.core.engine import FixedPopulation
from flashfl.core.errors import ConfigError, FlashError
from flashfl.core.exchange import Local
from flashfl.core.parts import check_fields, part
from flashfl.data.task import Task
from flashfl.engine.cpu import CPUEngine
from flashfl.engine.gpu import GPUEngine
from flashfl.run.checks import check_method
from flashfl.run.config import TrainConfig
from flashfl.run.simulate import drive, plan_of
from flashfl.sparsity import PruneRegrow, allocate, top_mask
from tests.conftest import make_task

QUICK: dict[str, Any] = {"per_round": 2, "batch": 4, "workers": 1}


@dataclass(frozen=True)
class Forgetful(fl.Method):
    """Prunes after the last round, and forgets to make the weights it pruned zero."""

    name: ClassVar[str] = "forgetful"

    def init(self, plan: fl.Plan) -> fl.State:
        return fl.State(plan, fl.Weights.dense(plan.layout, plan.initial()))

    def aggregate(self, s: fl.State, sums: fl.Sums) -> fl.State:
        mean = average("fedavg", sums)
        return s.next(fl.Weights(top_mask(s.layout, mean, allocate(s.layout, "uniform", 0.2)), mean))


def test_evaluation_refuses_weights_outside_the_mask(small_task: Task) -> None:
    with pytest.raises(FlashError, match=r"forgetful.views\['after'\] \(s.weights\) has weights outside its mask"):
        fl.simulate(Forgetful(), small_task, 1, **QUICK)


@dataclass(frozen=True)
class Counting(fl.Dense):
    def init(self, plan: fl.Plan) -> fl.State:
        start = super().init(plan)
        return fl.State(plan, start.weights, extra={"seen": 3})  # type: ignore[dict-item]


def test_state_extra_must_be_storable(small_task: Task) -> None:
    with pytest.raises(FlashError, match=r"state.extra\['seen'\] is int: .*torch\.tensor\(value\)"):
        fl.simulate(Counting(), small_task, 1, **QUICK)


def test_missing_state_extra_says_how_to_store_it(small_task: Task) -> None:
    state = fl.Dense().init(plan_of(TrainConfig(per_round=1), small_task, 1))
    with pytest.raises(FlashError, match=r"has no Mask 'mine'\. Store it in `init`, with State\(\.\.\., extra="):
        state.kept(fl.Mask, "mine")


def test_a_client_cannot_be_asked_to_remember_what_it_cannot() -> None:
    assert Local(keep=("mask",))
    with pytest.raises(ConfigError, match=r"keep = \('mask', 'residual'\): must be .* `remembers`"):
        Local(keep=("mask", "residual"))


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (fl.SPDST, "expected a method with its settings"),
        ("spdst", "expected a method with its settings"),
        (fl.SPDST(mask_init="magnitud"), "mask_init = 'magnitud': expected one of"),  # type: ignore[arg-type]
        (fl.JMWST(r_int=2.5), r"r_int = 2\.5: expected int, got float"),  # type: ignore[arg-type]
        (fl.SPDST(aggregator="wfaa"), "aggregator = 'wfaa': expected one of"),  # type: ignore[arg-type]
        (fl.SPDST(warmup_clients=True), "warmup_clients = True: expected int"),
        (fl.NST(adapt=fl.PruneRegrow(growth="gradiant")), "growth = 'gradiant'"),  # type: ignore[arg-type]
    ],
)
def test_settings_made_in_python_are_checked_as_those_of_a_file_are(method: Any, said: str, small_task: Task) -> None:
    with pytest.raises(ConfigError, match=said):
        fl.simulate(method, small_task, 1, **QUICK)


def test_numbers_of_numpy_are_numbers() -> None:
    check_fields(fl.JMWST(density=np.float32(0.5), r_int=np.int64(2)))
    with pytest.raises(ConfigError, match="must be a finite number, above 0 and at most 1"):
        fl.PDST(density="0.1")  # type: ignore[arg-type]


@pytest.mark.parametrize("nm", [1, -2, 70_000])
@pytest.mark.parametrize("name", ["spdst", "jmwst", "hetero-jmwst"])
def test_a_pattern_that_cannot_be_is_refused_before_anything_runs(name: str, nm: int) -> None:
    with pytest.raises(ConfigError, match=f"nm = {nm}: must be at least 2 and at most 65535. It is the group size"):
        fl.METHODS[name](nm=nm)


@pytest.mark.parametrize("name", ["spdst", "nst"])
def test_a_pattern_is_the_methods_to_set(name: str) -> None:
    with pytest.raises(ConfigError, match=r"adapt\.nm = 4"):
        fl.METHODS[name](adapt=fl.PruneRegrow(nm=4))


@pytest.mark.parametrize("shares", [(float("nan"), 0.3, 0.4), (float("inf"), 0.3, 0.4), (-1, 1, 1), (0, 0, 0)])
def test_shares_are_numbers(shares: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="shares"):
        fl.METHODS["hetero-spdst"](shares=shares)


def test_is_masked(small_task: Task) -> None:
    mask = fl.Mask(small_task.layout, torch.arange(small_task.layout.prunable_size) % 2 == 0)
    vector: Tensor = torch.ones(small_task.layout.size)
    assert not fl.Weights(mask, vector).is_masked()
    assert fl.Weights.masked(mask, vector).is_masked()
    assert fl.Weights(fl.Mask.full(small_task.layout), vector).is_masked()


@dataclass(frozen=True)
class Mistaken(Forgetful):
    """Gives whatever it is told to."""

    name: ClassVar[str] = "mistaken"
    what: str = ""

    def init(self, plan: fl.Plan) -> Any:
        s = super().init(plan)
        return s.weights if self.what == "no first state" else s

    def aggregate(self, s: fl.State, sums: fl.Sums) -> Any:
        mean, full = average("fedavg", sums), fl.Mask.full(s.layout)
        if self.what == "no state":
            return fl.Weights(full, mean)
        if self.what == "same round":
            return replace(s, weights=fl.Weights(full, mean))
        if self.what == "other phase":
            return s.enter(fl.Phase("rest", 3), fl.Weights(full, mean))
        if self.what == "float64":
            mean = mean.double()
        if self.what == "short":
            mean = mean[:-1]
        if self.what == "not finite":
            mean = mean * float("nan")
        return s.next(fl.Weights(full, mean))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no first state", "mistaken.init returned Weights: expected a State"),
        ("no state", "mistaken.aggregate returned Weights: expected a State"),
        ("other phase", "phase 'rest': expected one of mistaken.phases"),
        ("same round", "of the same round: return s.next"),
        ("float64", "weights are torch.float64"),
        ("short", "weights are torch.float32"),
        ("not finite", "mistaken.aggregate returned weights that are NaN or infinite"),
    ],
)
def test_results_of_a_method_are_checked(what: str, said: str, small_task: Task) -> None:
    with pytest.raises(FlashError, match=said):
        fl.simulate(Mistaken(what=what), small_task, 2, **QUICK)


@part
@dataclass(frozen=True)
class Grows(PruneRegrow):
    def move(self, layout: Any, vectors: Any, masks: Any, *others: Any) -> None:
        masks[:] = True


@pytest.mark.parametrize("engine", ["cpu", "lanes"])
def test_a_rule_keeps_the_number_of_active_weights(engine: str) -> None:
    task, method = make_task("norm"), fl.JMWST(0.3, warmup_clients=0, adapt=Grows())
    config = TrainConfig(device="cpu", rounds=1, **QUICK)
    made: Any = GPUEngine(task, config, "cpu") if engine == "lanes" else CPUEngine(task, config)
    with closing(made), pytest.raises(FlashError, match="must keep the number"):
        drive(method, task, config, made, FixedPopulation(task.clients))


def test_failures_of_repeated_attempts_are_recorded() -> None:
    task = make_task("norm", clients=4)
    run = fl.simulate(fl.PDST(0.3), task, 12, dropout=0.5, min_replies=4, retries=400, per_round=4, batch=4, workers=1)
    again = [line for line in run.history if line.attempt]
    assert again
    assert all(line.missed and not line.failures for line in again)
    assert not any(line.missed for line in run.history if not line.attempt)


@pytest.mark.parametrize("seed", range(3))
def test_static_batch_norm_survives_an_attempt_without_reports(seed: int) -> None:
    task = make_task("norm", clients=2)
    settings = {"dropout": 0.7, "retries": 60, "per_round": 2, "batch": 4, "workers": 1, "static_bn": True}
    run = fl.simulate(fl.PDST(0.3), task, 2, seed=seed, **settings)
    assert np.isfinite(run.history[-1].metrics["after"].loss)


@part
class Slower(PruneRegrow):
    rate: float = 0.1


class Halved(Part):
    def __init__(self, share: float) -> None:
        object.__setattr__(self, "share", share)


def test_settings_that_would_not_reach_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match="Slower is not a dataclass, so its settings rate would be lost"):
        Local(adapt=Slower())
    with pytest.raises(ConfigError, match="Halved is not a dataclass, so its settings share would be lost"):
        Local(parts=(Halved(0.1),))


class Stronger(fl.PDST):
    strength = 0.5

    def __init__(self, strength: float) -> None:
        super().__init__()
        object.__setattr__(self, "strength", strength)


@dataclass(frozen=True)
class Noted(fl.PDST):
    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "notes", [])


def test_settings_of_methods_that_would_be_lost_are_refused() -> None:
    """Also where the class has the name as an attribute; a dataclass is not told to become one."""
    with pytest.raises(ConfigError, match="Stronger is not a dataclass, so its settings strength would be lost"):
        check_method(Stronger(0.7))
    with pytest.raises(ConfigError, match=r"Noted has settings that are no fields and would be lost: notes\. List"):
        check_method(Noted())


@part
@dataclass(frozen=True)
class Unfinished:
    """A rule without the gradient needs `collect` too, although nothing calls it."""

    dense_gradient: ClassVar[bool] = False

    def moments(self, epochs: int, batches: int) -> dict[int, Any]:
        return {}

    def move(self, *others: Any) -> None: ...


def test_an_unfinished_rule_is_told_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"such as PruneRegrow\(\)\. Yours lacks collect\."):
        Local(adapt=Unfinished())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must be None or a rule .*such as PruneRegrow\(\)\. Yours lacks its paren"):
        Local(adapt=PruneRegrow)  # type: ignore[arg-type]
