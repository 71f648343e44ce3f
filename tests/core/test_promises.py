"""What a method must keep to is checked while it runs, and not only by these tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import flashfl as fl
from flashfl.aggregate import average
from flashfl.core.errors import ConfigError, FlashError
from flashfl.core.parts import check_fields
from flashfl.core.state import Local
from flashfl.data.task import Task
from flashfl.sparsity import allocate, top_mask

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
