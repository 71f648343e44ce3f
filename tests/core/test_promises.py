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
from flashfl.core.errors import ConfigError, FlashError
from flashfl.core.parts import check_fields, part
from flashfl.core.exchange import Local
from flashfl.data.task import Task
from flashfl.engine.cpu import CPUEngine
from flashfl.engine.gpu import GPUEngine
from flashfl.run.config import TrainConfig
from flashfl.run.runner import drive
from flashfl.sparsity import PruneRegrow, allocate, top_mask
from tests.conftest import make_task

QUICK: dict[str, Any] = {"per_round": 2, "batch": 4, "workers": 1}


@dataclass(frozen=True)
class Forgetful(fl.Method):
    """Prunes after the last round, and forgets to make the weights it pruned zero."""

    name: ClassVar[str] = "forgetful"

    def init(self, plan: fl.Plan) -> fl.State:
        return fl.State(plan, fl.Weights(fl.Mask.full(plan.layout), plan.draw(plan.key)))

    def aggregate(self, s: fl.State, sums: fl.Sums) -> fl.State:
        mean = average("fedavg", sums)
        return s.next(fl.Weights(top_mask(s.layout, mean, allocate(s.layout, "uniform", 0.2)), mean))


def test_a_model_with_weights_outside_its_mask_is_not_judged(small_task: Task) -> None:
    with pytest.raises(FlashError, match=r"forgetful gives a model \(after\) with weights outside its mask"):
        fl.simulate(Forgetful(), small_task, 1, **QUICK)


@dataclass(frozen=True)
class Counting(fl.Dense):
    def init(self, plan: fl.Plan) -> fl.State:
        start = super().init(plan)
        return fl.State(plan, start.weights, extra={"seen": 3})  # type: ignore[dict-item]


def test_what_a_checkpoint_could_not_hold_is_refused_at_once(small_task: Task) -> None:
    with pytest.raises(FlashError, match=r"keeps 'seen' as int: .*torch\.tensor\(value\)"):
        fl.simulate(Counting(), small_task, 1, **QUICK)


def test_a_client_cannot_be_asked_to_remember_what_it_cannot() -> None:
    assert Local(keep=("mask",))
    with pytest.raises(ConfigError, match="keep = residual: a client can remember its mask only"):
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
    with pytest.raises(ConfigError, match="must be above 0 and at most 1"):
        fl.PDST(density="0.1")  # type: ignore[arg-type]


@pytest.mark.parametrize("nm", [1, -2, 70_000])
@pytest.mark.parametrize("name", ["spdst", "jmwst", "hetero-jmwst"])
def test_a_pattern_that_cannot_be_is_refused_before_anything_runs(name: str, nm: int) -> None:
    with pytest.raises(ConfigError, match=f"nm = {nm}: the group size"):
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

    def order(self, s: fl.State, client: fl.Client) -> Any:
        return None if self.what == "no order" else super().order(s, client)

    def views(self, s: fl.State) -> Any:
        return {} if self.what == "no model to judge" else super().views(s)

    def aggregate(self, s: fl.State, sums: fl.Sums) -> Any:
        mean, full = average("fedavg", sums), fl.Mask.full(s.layout)
        if self.what == "no state":
            return fl.Weights(full, mean)
        if self.what == "same round":
            return replace(s, weights=fl.Weights(full, mean))
        if self.what == "float64":
            mean = mean.double()
        if self.what == "short":
            mean = mean[:-1]
        if self.what == "no bits":
            full = fl.Mask(s.layout, full.bits.float(), full.counts)
        if self.what == "false counts":
            full = fl.Mask(s.layout, full.bits, tuple(c - 1 for c in full.counts))
        if self.what == "counts in a list":
            full = fl.Mask(s.layout, full.bits, list(full.counts))  # type: ignore[arg-type]
        if self.what == "not finite":
            mean = mean * float("nan")
        return s.next(fl.Weights(full, mean))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no first state", "mistaken.init gives Weights, not a State"),
        ("no order", "mistaken.order gives NoneType, not an Order"),
        ("no model to judge", "mistaken.views gives no model to judge"),
        ("no state", "mistaken.aggregate gives Weights, not a State"),
        ("same round", "of the same round: make it with s.next"),
        ("float64", "weights are torch.float64"),
        ("short", "weights are torch.float32"),
        ("no bits", "a mask is torch.float32"),
        ("false counts", "a mask is said to have"),
        ("not finite", "mistaken.aggregate gives weights that are not finite"),
    ],
)
def test_what_a_method_gives_is_looked_at(what: str, said: str, small_task: Task) -> None:
    with pytest.raises(FlashError, match=said):
        fl.simulate(Mistaken(what=what), small_task, 2, **QUICK)


@part
@dataclass(frozen=True)
class Loose(PruneRegrow):
    """Says what it must, in other containers."""

    def moments(self, epochs: int, batches: int) -> Any:
        return {step: [rate] for step, rate in super().moments(epochs, batches).items()} | {1: None}

    def move(self, layout: Any, vectors: Any, masks: Any, scores: Any, rate: Any, keys: Any, counts: Any) -> Any:
        yield from map(list, super().move(layout, vectors, masks, scores, rate[0], keys, counts))


def test_containers_do_not_matter(small_task: Task) -> None:
    fl.simulate(Mistaken(what="counts in a list"), small_task, 1, **QUICK)
    task, config, runs = make_task("norm"), TrainConfig(device="cpu", rounds=2, **QUICK), []
    for method in (fl.JMWST(0.3, warmup_clients=0), fl.JMWST(0.3, warmup_clients=0, adapt=Loose())):
        for made in (GPUEngine(task, "cpu", "fp32"), CPUEngine(task, workers=1)):
            with closing(made):  # type: ignore[type-var]
                runs.append(drive(method, task, config, made, task.clients))
    assert all(run.weights.mask.equal(runs[0].weights.mask) for run in runs)


@part
@dataclass(frozen=True)
class Grows(PruneRegrow):
    lies: bool = False

    def move(self, layout: Any, vectors: Any, masks: Any, scores: Any, rate: Any, keys: Any, counts: Any) -> Any:
        found = super().move(layout, vectors, masks, scores, rate, keys, counts)
        masks[:] = True
        return found if self.lies else [layout.sizes] * len(counts)


@pytest.mark.parametrize("engine", ["cpu", "lanes"])
@pytest.mark.parametrize(("lies", "said"), [(False, "it has to keep them"), (True, "says its layers have")])
def test_a_rule_keeps_the_number_of_active_weights(lies: bool, said: str, engine: str) -> None:
    task, method = make_task("norm"), fl.JMWST(0.3, warmup_clients=0, adapt=Grows(lies=lies))
    config = TrainConfig(device="cpu", rounds=1, **QUICK)
    made: Any = GPUEngine(task, "cpu", "fp32") if engine == "lanes" else CPUEngine(task, workers=1)
    with closing(made), pytest.raises(FlashError, match=said):
        drive(method, task, config, made, task.clients)


def test_who_was_left_out_of_an_attempt_is_told_with_the_round_that_came_of_it() -> None:
    task = make_task("norm", clients=4)
    run = fl.simulate(fl.PDST(0.3), task, 12, dropout=0.5, min_replies=4, retries=400, per_round=4, batch=4, workers=1)
    again = [line for line in run.history if line["attempt"]]
    assert again
    assert all(line["missed"] and not line["failures"] for line in again)
    assert not any("missed" in line for line in run.history if not line["attempt"])


@pytest.mark.parametrize("seed", range(3))
def test_static_batch_norm_outlives_an_attempt_in_which_nobody_reports(seed: int) -> None:
    task = make_task("norm", clients=2)
    settings = {"dropout": 0.7, "retries": 60, "per_round": 2, "batch": 4, "workers": 1, "static_bn": True}
    run = fl.simulate(fl.PDST(0.3), task, 2, seed=seed, **settings)
    assert np.isfinite(run.history[-1]["metrics"]["after"]["loss"])
