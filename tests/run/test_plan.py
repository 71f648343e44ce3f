"""A sparse method and a model that is hardly sparse, or not at all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

import flashfl as fl
from flashfl.core.errors import ConfigError
from flashfl.data.tasks import TaskConfig, build_task
from flashfl.run.checks import check_sparse
from flashfl.run.config import TrainConfig, plan_of
from tests.conftest import DropoutNet, blobs

SPARSE = [fl.PDST(density=0.1), fl.SPDST(warmup_clients=0), fl.JMWST(), fl.NST(), fl.HeteroSPDST()]


def plan(task: fl.Task, method: Any) -> Any:
    check_sparse(method, task)
    return plan_of(TrainConfig(per_round=1), task, len(task.clients), method=method)


def task_of(model: Any, **settings: Any) -> fl.Task:
    return fl.Task(model, [blobs(9, (6,), i) for i in range(3)], blobs(9, (6,), 9), **settings)


@pytest.mark.parametrize("method", SPARSE)
def test_a_sparse_method_needs_prunable_weights(method: Any) -> None:
    said = f"{method.name} is a sparse method, but the model has no prunable weights. .* are: layers.0.weight, "
    with pytest.raises(ConfigError, match=said):
        plan(task_of(DropoutNet, prunable="none"), method)


def test_a_dense_method_does_not() -> None:
    assert plan(task_of(nn.Linear(6, 3)), fl.Dense()).layout.prunable_size == 0


@pytest.mark.parametrize("prunable", ["auto", "none"])
def test_a_run_is_held_against_it(prunable: str) -> None:
    task = task_of(nn.Linear(6, 3), prunable=prunable)
    assert fl.simulate(fl.Dense(), task, 1, per_round=2, workers=1).state is not None
    for method in SPARSE:
        with pytest.raises(ConfigError, match="the model has no prunable weights"):
            fl.simulate(method, task, 1, per_round=2, workers=1)


def test_a_run_says_it_once() -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 30))
    with pytest.warns(RuntimeWarning, match="only 12% of the model's values are prunable") as caught:
        fl.simulate(fl.PDST(density=0.5), task_of(model), 2, per_round=2, workers=1)
    assert len(caught) == 1


class Wordy(nn.Module):
    """Mostly an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 3)


def test_a_model_that_is_mostly_dense_is_said_to_be() -> None:
    said = r"only 7% of .* others are words.weight \(800\), b.weight \(24\)"
    with pytest.warns(RuntimeWarning, match=said) as caught:
        plan(task_of(Wordy), fl.PDST(density=0.1))
    assert len(caught) == 1


class Deliberate(Wordy):
    prunable = ("a.weight",)


@pytest.mark.parametrize(
    ("model", "method"),
    [(Wordy, fl.Dense()), (Wordy, fl.PDST(density=1.0)), (Deliberate, fl.PDST()), (DropoutNet, fl.PDST())],
)
def test_nothing_is_said_where_it_is_meant_so(model: type[nn.Module], method: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(task_of(model), method)


DEFAULTS = ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "tinyimagenet", "femnist"]


@pytest.mark.parametrize(
    "settings", [*({"dataset": name} for name in DEFAULTS), {"dataset": "sst2", "model": "tiny-transformer"}]
)
def test_nothing_is_said_of_our_own_tasks(settings: dict[str, Any]) -> None:
    task = build_task(TaskConfig(**settings, clients=2, partition="iid", synthetic=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(task, fl.SPDST())
