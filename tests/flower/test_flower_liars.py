"""One authenticated client of ten lies, with the default settings: the model must end near that of honest clients."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from flower_support import PATIENT, RogueTrainer, federation, node_of, scaled, train
from flwr.app import Context, RecordDict

import flashfl as fl
from flashfl.core.exchange import Order, Update
from flashfl.core.mask import Weights
from flashfl.data.task import Task
from flashfl.flower import records
from flashfl.flower.client import app_around
from flashfl.flower.host import Host
from flashfl.flower.testing import InProcessGrid
from flashfl.run.config import TrainConfig, plan_of
from tests.conftest import DropoutNet, NormNet, blobs

LIAR, SECOND = 4, 7
HUGE = 1 << 32
Lie = Callable[[Update, Order], Update]


@functools.lru_cache(2)
def task_of(net: str) -> Task:
    """Three classes that a small net learns in a few rounds, and ten clients with all of them."""
    shape, model = ((6,), NoNorm) if net == "plain" else ((1, 5, 5), NormNet)
    return Task(model, [blobs(24 + i % 3, shape, 100 + i) for i in range(10)], blobs(90, shape, 7), name=net)


class NoNorm(nn.Module):
    """A net without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def with_vector(update: Update, change: Callable[[torch.Tensor, int], None]) -> Update:
    if update.weights is None:
        return update
    vector = update.weights.vector.clone()
    change(vector, update.weights.layout.trained_size)
    return replace(update, values=Weights(update.weights.mask, vector).packed())


def variances(update: Update, order: Order) -> Update:
    def change(vector: torch.Tensor, trained: int) -> None:
        for layer in order.weights.layout.of_kind("statistic"):
            if layer.name.endswith("running_var"):
                vector[layer.start : layer.stop] *= 72

    return with_vector(update, change)


def flipped(update: Update, order: Order) -> Update:
    return with_vector(update, lambda vector, trained: vector[:trained].neg_())


def shifted(update: Update, order: Order) -> Update:
    return with_vector(update, lambda vector, trained: vector[:trained].add_(1))


def all_statistics(value: float) -> Lie:
    return lambda update, order: with_vector(update, lambda vector, trained: vector[trained:].fill_(value))


def replay() -> Lie:
    """The first update again and again; the client writes the tag and the key of the round."""
    kept: list[Update] = []

    def lie(update: Update, order: Order) -> Update:
        if update.values is None:
            return update
        kept.append(replace(update, values=update.values.clone()))  # a dense one shares the trainer's memory
        return replace(update, mask=kept[0].mask, values=kept[0].values, counts=kept[0].counts)

    return lie


def votes(update: Update, order: Order) -> Update:
    """In the first phase, all weights in the last layers."""
    if update.mask is not None:
        return update
    left, counts = sum(update.counts), []
    for size in reversed(order.weights.layout.sizes):
        counts.append(min(left, size))
        left -= counts[-1]
    return replace(update, counts=tuple(reversed(counts)))


class Boaster(Host):
    """Registers 2^32 samples, and says so in its updates too."""

    def __init__(self, task: Task, lie: Lie) -> None:
        super().__init__(task)
        self.trainer = RogueTrainer(task, lambda update, order: replace(lie(update, order), n=HUGE))

    def about(self, context: Context) -> RecordDict:
        said = records.read_fields(super().about(context), "client")
        return records.fields("client", {**said, "n": HUGE})


def with_liars(task: Task, lie: Lie, liars: tuple[int, ...] = (LIAR,), boast: bool = False) -> InProcessGrid:
    grid = federation(task)
    for liar in liars:
        host = Boaster(task, lie) if boast else Host(task)
        if not boast:
            host.trainer = RogueTrainer(task, lie)
        grid.join(node_of(liar), app_around(host.serve), {"partition-id": liar})
    return grid


def method_of(name: str) -> fl.Method:
    warm = {} if name == "dense" else {"density": 0.5, "warmup_clients": 10, "warmup_epochs": 2}
    return fl.METHODS[name](**warm)


def run_of(name: str, net: str, grid: InProcessGrid, **settings: Any) -> fl.Run:
    much = {"epochs": 6, "lr": 0.3} if net == "plain" else {"epochs": 2}
    chosen = {"rounds": 10, "per_round": 10, "batch": 8, "robust": "auto", "lr_end": 0.02, **much, **settings}
    return train(method_of(name), task_of(net), grid, options=PATIENT, **chosen)


def accuracy(name: str, net: str, grid: InProcessGrid, **settings: Any) -> float:
    return 100 * run_of(name, net, grid, **settings).accuracy


@functools.lru_cache
def honest(name: str, net: str) -> float:
    found = accuracy(name, net, federation(task_of(net)))
    assert found > 85, "the task must be learnt, or an attack would not show"
    return found


LIES: dict[str, Callable[[], Lie]] = {
    "variances": lambda: variances,
    "replay": replay,
    "reversed": lambda: scaled(-9.0),
    "undone": lambda: scaled(-1.0),
    "flipped": lambda: flipped,
    "shifted": lambda: shifted,
    "far": lambda: scaled(1e6),
    "votes": lambda: votes,
    "statistics": lambda: all_statistics(3e38),
}


@pytest.mark.parametrize(
    ("name", "net", "lie"),
    [
        *(("dense", "norm", lie) for lie in LIES if lie != "votes"),
        *(("spdst", "plain", lie) for lie in LIES if lie not in ("variances", "statistics")),
        *(pytest.param("jmwst", "norm", lie, marks=pytest.mark.slow) for lie in LIES),
    ],
)
def test_one_liar_of_ten_costs_at_most_three_points(name: str, net: str, lie: str) -> None:
    found = accuracy(name, net, with_liars(task_of(net), LIES[lie]()))
    assert found >= honest(name, net) - 3


def trained_weights(net: str, grid: InProcessGrid, **settings: Any) -> torch.Tensor:
    run = run_of("dense", net, grid, **settings)
    return run.weights.vector[: run.task.layout.trained_size]


# The tasks above stand the next lies even in a plain average, so these tests compare the models themselves.


@pytest.mark.parametrize("net", ["norm", "plain"])
def test_replayed_update_moves_the_model_less_than_in_a_plain_average(net: str) -> None:
    far = {}
    for robust in ("auto", "off"):
        honest = trained_weights(net, federation(task_of(net)), robust=robust)
        lied = trained_weights(net, with_liars(task_of(net), replay()), robust=robust)
        far[robust] = float((lied - honest).norm())
    assert far["auto"] < far["off"] / 3, far


@pytest.mark.parametrize("net", ["norm", "plain"])
def test_liar_that_undoes_its_change_does_not_slow_the_others_down(net: str) -> None:
    """One of ten equal clients goes back as far as it should go ahead. A plain average then goes 8/10 of the way."""
    task, way = task_of(net), {}
    start = method_of("dense").init(plan_of(TrainConfig(), task, 10)).weights.vector[: task.layout.trained_size]
    for robust in ("auto", "off"):
        honest = trained_weights(net, federation(task), rounds=1, robust=robust) - start
        lied = trained_weights(net, with_liars(task, scaled(-1.0)), rounds=1, robust=robust) - start
        way[robust] = float(lied @ honest / (honest @ honest))
    assert way["off"] < 0.85
    assert way["auto"] > 0.95, way


def test_false_layer_counts_do_not_move_the_layers() -> None:
    """The first phase of SPDST decides how many weights each layer gets."""
    far = {}
    for robust in ("auto", "off"):
        found = [
            run_of("spdst", "plain", grid, rounds=1, robust=robust).weights.mask.counts
            for grid in (federation(task_of("plain")), with_liars(task_of("plain"), votes))
        ]
        far[robust] = sum(abs(a - b) for a, b in zip(*found, strict=True))
    assert far["auto"] < far["off"] / 3, far


@pytest.mark.parametrize("lie", [flipped, scaled(-9.0)])
def test_liar_that_registers_2_to_the_32_samples_costs_at_most_three_points(
    lie: Lie, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "flwr.flashfl"):
        found = accuracy("dense", "norm", with_liars(task_of("norm"), lie, boast=True))
    assert found >= honest("dense", "norm") - 3
    assert f"client {LIAR}: registered {HUGE} samples, but counts as 50" in caplog.text


def test_two_liars_of_ten_that_agree_leave_a_working_model() -> None:
    for lie in (variances, shifted, scaled(-9.0)):
        assert accuracy("dense", "norm", with_liars(task_of("norm"), lie, (LIAR, SECOND))) > 70


def test_liar_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr.flashfl"):
        accuracy("dense", "norm", with_liars(task_of("norm"), scaled(1e6)), rounds=1)
    assert f"client {LIAR}: its change is" in caplog.text


def test_plain_average_does_not_stand_the_same_liars() -> None:
    """The attacks above are real: without the defaults they ruin the model."""
    for lie in (variances, shifted):
        assert accuracy("dense", "norm", with_liars(task_of("norm"), lie), robust="off") < honest("dense", "norm") - 10


def test_evaluation_of_a_client_with_2_to_the_32_samples_is_bounded() -> None:
    from flashfl.flower import server_task

    task = Task(DropoutNet, [blobs(20, (6,), 100 + i) for i in range(6)], name="held")

    class Held(Host):
        def about(self, context: Context) -> RecordDict:
            said = records.read_fields(super().about(context), "client")
            return records.fields("client", {**said, "held": HUGE})

        def evaluate(self, context: Context, data: bytes) -> RecordDict:
            return records.fields("evaluated", {"n": HUGE, "loss": 0.0, "metric": float(HUGE)})

    found = {}
    for robust in ("on", "off"):
        grid = federation(task)
        grid.join(node_of(1), app_around(Held(task).serve), {"partition-id": 1})
        server = server_task(DropoutNet, example=blobs(1, (6,), 0)[0], metric=fl.accuracy)
        found[robust] = train(fl.Dense(), server, grid, rounds=1, eval_every=1, robust=robust).accuracy
    assert found["off"] > 0.999
    assert found["on"] < 0.9
