"""Models and data that are not what training expects: they fail in one line, or are made fit."""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flashfl as fl
from flashfl.core.engine import FixedPopulation
from flashfl.core.errors import ConfigError, RunStopped
from flashfl.core.exchange import Local, Order
from flashfl.core.mask import Mask, Weights
from flashfl.data.sources import Arrays
from flashfl.data.task import Task
from flashfl.engine.client import ClientSide
from flashfl.engine.cpu import CPUEngine
from flashfl.engine.encoding import Encoding
from flashfl.engine.memory import ClientMemory
from flashfl.engine.store import MaskStore
from flashfl.engine.train import ClientFailed, Trainer
from flashfl.run.config import TrainConfig
from flashfl.run.simulate import drive
from tests.conftest import DropoutNet, blobs

Data = tuple[Any, Any]


def clients(count: int = 4) -> list[Data]:
    return [blobs(9 + i, (6,), i) for i in range(count)]


def simulate(task: Task, method: Any = None, **settings: Any) -> Any:
    return fl.simulate(
        method or fl.PDST(density=0.3), task, 2, **{"per_round": len(task.train), "workers": 1, **settings}
    )


# -- errors in training ---------------------------------------------------------------------------------------------


def wide(data: Data) -> Data:
    return torch.cat([data[0], data[0]], 1), data[1]


ODD = {
    "int32 targets": (lambda data: (data[0], data[1].int()), "RuntimeError: expected (target dtype|scalar type)"),
    "targets out of range": (lambda data: (data[0], data[1] + 7), "IndexError: Target"),
    "wrong width": (wide, r"RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied .*\(conftest.py, line"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("odd", ODD)
def test_client_with_unfit_data_is_dropped_and_the_run_goes_on(odd: str, workers: int) -> None:
    spoil, said = ODD[odd]
    good = clients()
    run = simulate(Task(DropoutNet, [*good, spoil(good[0])], blobs(9, (6,), 9)), workers=workers)
    assert [list(line.failures) for line in run.history] == [[4]] * 2
    assert re.match(said, run.history[0].failures[4])


@pytest.mark.parametrize("workers", [1, 2])
def test_run_stops_with_one_line_if_all_clients_fail(workers: int) -> None:
    task = Task(DropoutNet, [wide(data) for data in clients()], blobs(9, (6,), 9))
    with pytest.raises(RunStopped, match=r"client 0: RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be") as caught:
        simulate(task, workers=workers)
    assert "\n" not in str(caught.value)


class Raising(Arrays):
    error: Exception = OSError("the disk\nis gone")

    def fetch(self, *given: Any) -> Any:
        raise self.error


class Exhausted(Raising):
    error = MemoryError()


class Refusing(Raising):
    error = ConfigError("not like this")


def work(kind: type[Raising]) -> Any:
    x, y = blobs(9, (6,), 5)
    task = Task(DropoutNet, [kind((x,), y)], (x, y))
    order = Order(Weights(Mask.full(task.layout), task.draw(0)), Local(), 1, (2, 0, 0))
    server = Encoding(ClientMemory(MaskStore(task.layout, {})))
    data = server.encode(server.message(task.clients[0], order)).data
    return ClientSide(Trainer(task), MaskStore(task.layout, {})).work(0, task.train[0], data, [])


def test_training_error_is_the_cause_and_its_traceback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "flashfl"), pytest.raises(ClientFailed) as caught:
        work(Raising)
    assert str(caught.value).startswith("OSError: the disk is gone (test_odd_models.py, line ")
    assert isinstance(caught.value.__cause__, OSError)
    assert "in fetch" in caplog.text


@pytest.mark.parametrize(("kind", "error"), [(Exhausted, MemoryError), (Refusing, ConfigError)])
def test_errors_no_client_is_to_blame_for_are_raised(kind: type[Raising], error: type[Exception]) -> None:
    with pytest.raises(error):
        work(kind)


# -- numbers that are not float32 -----------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Frozen, trained and normalised layers, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.frozen.requires_grad_(False)
        self.bn = nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.bn(self.a(torch.relu(self.frozen(x * self.scale))))))
        return out


def cast(data: Data, dtype: torch.dtype) -> Data:
    return data[0].to(dtype), data[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_other_numbers_is_trained_in_float32(dtype: torch.dtype) -> None:
    given = [cast(data, dtype) for data in clients()]
    task = Task(Mixed().to(dtype), given, cast(blobs(9, (6,), 9), dtype))
    with pytest.warns(RuntimeWarning, match=f"of type {dtype}. flashfl converts them to float32"):
        layout = task.layout
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert task.layout is layout, "it is said once"
        run = simulate(task)
    assert run.history[-1].failures == {}
    assert {t.dtype for t in run.model().state_dict().values() if t.is_floating_point()} == {torch.float32}


def test_float64_arrays_give_what_float32_gives() -> None:
    def run(kind: Any) -> str:
        data = [(x.numpy().astype(kind), y.numpy()) for x, y in [*clients(), blobs(9, (6,), 9)]]
        return str(simulate(Task(DropoutNet, data[:-1], data[-1])).checksum)

    assert run(np.float64) == run(np.float32)


def test_data_sets_of_float64_samples_and_float_targets() -> None:
    data = [[(x.double().numpy(), float(t)) for x, t in zip(*each, strict=True)] for each in clients()]
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    task = Task(model, data, loss=nn.functional.mse_loss, metric=nn.functional.l1_loss, higher_is_better=False)
    assert simulate(task).history[-1].failures == {}


def test_whole_numbers_stay_what_they_are() -> None:
    task = Task(DropoutNet, [(np.zeros((4, 6), np.uint8), np.zeros(4, np.int32))], holdout=0)
    (x,), y = task.train[0].fetch(torch.arange(2))
    assert (x.dtype, y.dtype) == (torch.uint8, torch.int32)


# -- nothing to prune -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [fl.SPDST(density=0.3, warmup_clients=2), fl.JMWST(density=0.3), fl.NST(density=0.3)]
)
def test_moving_masks_need_prunable_weights(method: Any) -> None:
    with pytest.raises(ConfigError, match="the model has no prunable weights"):
        simulate(Task(DropoutNet, clients(), blobs(9, (6,), 9), prunable="none"), method)


def test_dense_training_needs_no_prunable_weights() -> None:
    assert simulate(Task(nn.Linear(6, 3), clients(), blobs(9, (6,), 9), prunable="none"), fl.Dense()).history


class Raw(nn.Module):
    """A norm right behind raw features, as tables have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(6), nn.Linear(6, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(self.norm(x)).relu())
        return out


def raw(scale: float) -> fl.Task:
    generator = torch.Generator().manual_seed(0)
    data = [(scale * torch.randn(12, 6, generator=generator) + scale, torch.arange(12) % 3) for _ in range(4)]
    return fl.Task(Raw, data, data[0])


@pytest.mark.parametrize("static", [False, True])
def test_features_need_not_be_scaled(static: bool) -> None:
    run = fl.simulate(fl.PDST(density=0.5), raw(3e7), 2, per_round=3, workers=1, static_bn=static)
    assert not any(line.failures for line in run.history)
    assert float(run.model().norm.running_mean.min()) > 1e6


def test_statistics_that_nobody_can_report_end_the_run_and_single_failures_are_recorded() -> None:
    def run(broken: set[int]) -> Any:
        task = raw(1.0)
        method = fl.PDST(density=0.5)
        config = TrainConfig(rounds=1, per_round=3, static_bn=True, workers=1)
        engine = CPUEngine(task, config)
        train = engine.train

        def sometimes(s: Any, orders: Any) -> Any:
            outcome = train(s, (o for o in orders if o[1].local.report != "statistics" or o[0].id not in broken))
            return replace(outcome, failures={**outcome.failures, **dict.fromkeys(broken, "gone")})

        engine.train = sometimes  # type: ignore[method-assign]
        try:
            return drive(method, task, config, engine, FixedPopulation(task.clients))
        finally:
            engine.close()

    assert run({2}).history[-1].failures == {2: "gone"}
    with pytest.raises(RunStopped, match="no client could report BatchNorm statistics"):
        run({0, 1, 2, 3})
