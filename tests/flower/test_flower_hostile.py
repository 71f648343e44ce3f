"""What a hostile node cannot do: ruin the average, end the run, or train another model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from flower_support import PATIENT, QUICK, assert_equal, federation, node_of, only, rogue, train

import flashfl as fl
from flashfl.core.errors import ConfigError, RunStopped
from flashfl.core.exchange import Extra, Order, Update
from flashfl.core.mask import Weights
from flashfl.data.task import Task
from flashfl.flower import FlashStrategy, FlowerOptions, client_app, records, server_task
from flashfl.flower.app import read_config, task_of
from flashfl.flower.registration import Entry, difference, fingerprint
from flashfl.flower.testing import InProcessGrid
from tests.conftest import blobs, make_task
from tests.test_every_method import small

EVERY = {"per_round": 8}
BAD = (2, 5)


def with_statistics(value: float) -> Callable[[Update, Order], Update]:
    def change(update: Update, order: Order) -> Update:
        if update.weights is None:
            return update
        vector = update.weights.vector.clone()
        vector[update.weights.layout.trained_size :] = value
        return Update.of(update.client, update.n, Weights(update.weights.mask, vector), update.counts, update.metrics)

    return change


def with_weights(value: float) -> Callable[[Update, Order], Update]:
    def change(update: Update, order: Order) -> Update:
        if update.weights is None:
            return update
        vector, trained = update.weights.vector.clone(), update.weights.layout.trained_size
        vector[:trained][vector[:trained] != 0] = value
        return Update.of(update.client, update.n, Weights(update.weights.mask, vector), update.counts, update.metrics)

    return change


def with_extra(update: Update, order: Order) -> Update:
    return replace(update, extra={"x": Extra("dense", torch.ones(update.client))})


HOSTILE = {
    "extras of different sizes": (with_extra, "TooLarge: 1 extras"),
    "a loss near the end of doubles": (lambda u, o: replace(u, metrics={"loss": 1.7e308}), "WrongContent"),
}


def with_bad(change: Callable[[Update, Order], Update], task: Task, bad: tuple[int, ...] = BAD) -> InProcessGrid:
    grid = federation(task)
    for client in bad:
        grid.join(node_of(client), rogue(task, change), {"partition-id": client})
    return grid


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_updates_do_not_change_the_model(kind: str, tmp_path: Path) -> None:
    change, why = HOSTILE[kind]
    task = make_task("norm")
    run = train(small("pdst"), task, with_bad(change, task), tmp_path, **EVERY)
    for line in run.history:
        assert list(line.failures) == list(BAD)
        assert all(re.match(why, reason) for reason in line.failures.values()), line.failures
    silent = with_bad(lambda update, order: replace(update, n=10**6), task)
    assert_equal(run, train(small("pdst"), task, silent, **EVERY))
    for line in (tmp_path / "results.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_one_of_two_clients_cannot_send_huge_weights(tmp_path: Path) -> None:
    task = make_task("norm", clients=2)
    run = train(small("pdst"), task, with_bad(with_weights(1e30), task, (1,)), tmp_path, per_round=2)
    assert run.weights.vector.abs().max() < 100, "its change is no longer than the other's"
    further = train(small("pdst"), task, federation(task), tmp_path, resume=True, per_round=2)
    assert math.isfinite(further.history[-1].loss)


@pytest.mark.parametrize("name", ["dense", "nst", "hetero-spdst"])
@pytest.mark.parametrize("static", [False, True])
def test_skewed_honest_clients_are_accepted(name: str, static: bool) -> None:
    """One class each, brightness from a fifth to five times, and one with many times the others' data."""
    parts = []
    for i, share in enumerate((0.2, 0.5, 1.0, 1.0, 1.0, 1.0, 2.0, 5.0)):
        x, y = blobs(30 if i else 600, (1, 5, 5), 100 + i)
        parts.append((x[y == i % 3] * share, y[y == i % 3]))
    task = make_task("norm")
    skewed = Task(task._model, parts, blobs(30, (1, 5, 5), 7), name="skewed")
    run = train(small(name), skewed, federation(skewed), static_bn=static, **EVERY)
    assert not any(line.failures for line in run.history)


# -- registration -------------------------------------------------------------------------------------------------


NONE = "{}"  # the fingerprint of a model without fixed tensors


def fields(**said: Any) -> dict[str, Any]:
    from flashfl import __version__
    from flashfl.wire.frame import VERSION

    about = {"layout": "a", "fixed": NONE, "wire": VERSION, "package": __version__}
    return {"client": 1, "n": 10, "held": 0, **about, **said}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"n": 2**32 + 1}, "4294967297 samples"),
        ({"n": 2**63 - 1}, "samples"),
        ({"n": 101}, "flower.max_samples = 100"),
        ({"held": 2**32 + 1}, "held back"),
        ({"fixed": '{"back.weight": [[2, 2], 1.0, 0.5]}'}, "other fixed weights: 'back.weight'"),
        ({"fixed": "[" * 100_000}, "cannot be read"),
        ({"fixed": '{"a": 3}'}, "cannot be read"),
    ],
)
def test_registration_out_of_bounds_is_refused(said: dict[str, Any], why: str) -> None:
    assert Entry.read(7, fields(n=100), "a", NONE, most=100).client.n == 100
    assert Entry.read(7, fields(n=2**32), "a", NONE, most=0).client.n == 2**32
    with pytest.raises(ConfigError, match=why):
        Entry.read(7, fields(**said), "a", NONE, most=100)


def test_max_samples_refuses_larger_clients() -> None:
    task = make_task("norm")  # clients of 11 to 18 samples
    options = replace(PATIENT, max_samples=14, clients=4)
    run = train(small("dense"), task, federation(task), options=options, per_round=4)
    assert {c for line in run.history for c in line.cohort} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="max_samples"):
        FlowerOptions(max_samples=-1)


# -- fixed weights ------------------------------------------------------------------------------------------------


class Backed(nn.Module):
    """A frozen layer that is drawn, and a table that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(6, 16).requires_grad_(False)
        self.a, self.norm, self.b, self.c = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.register_buffer("table", torch.sin(torch.arange(16.0)), persistent=False)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.norm(self.a(self.back(x) + self.table))).relu())


def drawn(seed: int) -> Backed:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Backed()


def nodes(*models: Any) -> InProcessGrid:
    grid = InProcessGrid({})
    for i, model in enumerate(models):
        grid.join(100 + i, client_app(Task(model, [blobs(12, (6,), i)], holdout=0)), {"partition-id": i})
    return grid


def test_nodes_with_other_fixed_weights_are_refused() -> None:
    server = server_task(drawn(0), blobs(30, (6,), 9))
    assert train(small("pdst"), server, nodes(*[drawn(0)] * 3), per_round=3).accuracy >= 0
    with pytest.raises(
        RunStopped, match=r"1 clients registered within.*client 1 has other fixed weights: 'back.bias'.*file"
    ):
        train(small("pdst"), server, nodes(*map(drawn, range(3))), options=QUICK, min_replies=2, per_round=3)


def test_model_class_draws_fixed_weights_from_one_seed() -> None:
    for key in range(3):  # whatever was drawn before
        torch.manual_seed(key)
        assert train(small("pdst"), server_task(Backed, blobs(30, (6,), 9)), nodes(Backed, Backed), per_round=2).history


def one(model: nn.Module) -> str:
    return fingerprint(Task(model, [blobs(12, (6,), 0)]))


def test_fingerprints_differ_beyond_rounding_only() -> None:
    ours, other = one(drawn(0)), drawn(0)
    assert set(json.loads(ours)) == {"back.bias", "back.weight", "mask", "table"}, "no counters, nothing that travels"
    with torch.no_grad():
        other.norm.num_batches_tracked += 3  # type: ignore[operator]
        other.a.weight += 1
        other.table *= 1 + 1e-6  # type: ignore[operator]
    assert difference(ours, one(other)) is None
    with torch.no_grad():
        other.table[[3, 4]] = other.table[[4, 3]]  # type: ignore[index]
    assert difference(ours, one(other)) == "table"
    assert one(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))) == NONE


# -- what a process keeps, and evaluation -------------------------------------------------------------------------


def test_new_run_reads_its_data_again() -> None:
    from flashfl.flower import host

    made: list[int] = []

    def mine(context: Any) -> Task:
        made.append(context.run_id)
        i = int(context.node_config["partition-id"])
        return Task(make_task("norm")._model, [blobs(11 + i, (1, 5, 5), 100 + i)], holdout=0)

    grid = InProcessGrid({})
    for i in range(2):
        grid.join(50 + i, client_app(mine), {"partition-id": i})
    server = server_task(make_task("norm")._model, blobs(30, (1, 5, 5), 7))
    for run in (7, 8):
        for context in grid.contexts.values():
            context.run_id = run
        train(small("dense"), server, grid, rounds=2, per_round=2)
        assert host._kept.cache_info().currsize == 1, "the tasks of the run before are dropped"
    assert made == [7, 7, 8, 8]


def test_task_of_the_app_is_made_once_per_run() -> None:
    from flwr.app import Context, RecordDict

    node, run = {"partition-id": 0, "num-partitions": 3}, {"task.dataset": "digits"}
    first, again, second = (task_of(Context(i, 1, dict(node), RecordDict(), dict(run))) for i in (1, 1, 2))
    assert first is again
    assert second is not first


def test_default_is_a_checkpoint_after_every_round(tmp_path: Path) -> None:
    assert FlashStrategy(small("dense"), make_task("norm")).train.checkpoint_every == 1
    path = tmp_path / "run.toml"
    for text, every in (("rounds = 9", 1), ("checkpoint_every = 7", 7)):
        path.write_text(f"[train]\n{text}\n")
        assert read_config({"config": str(path)}).run.train.checkpoint_every == every


def test_clients_may_evaluate_by_a_metric_unknown_to_the_server() -> None:
    def large(output: Any, target: Any) -> float:
        return 700.0

    task = Task(make_task("norm")._model, [blobs(12, (1, 5, 5), i) for i in range(3)], metric=large)
    run = train(fl.Dense(), server_task(task._model, example=blobs(1, (1, 5, 5), 0)[0]), federation(task), per_round=3)
    assert run.accuracy == 700.0


def test_server_with_a_loss_alone_asks_for_the_metric() -> None:
    with pytest.raises(ConfigError, match=r"but no test samples and no metric.*metric=flashfl\.accuracy"):
        server_task(make_task("norm")._model, loss=torch.nn.functional.mse_loss)


@pytest.mark.parametrize("said_of", [{"loss": 1.7e308}, {"metric": 1e29}, {"metric": -1.0}])
def test_impossible_evaluation_is_dropped(said_of: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    task = Task(make_task("norm")._model, [blobs(12 + i, (1, 5, 5), i) for i in range(3)], name="held")

    def lie(message: Any, reply: Any) -> Any:
        said = records.read_fields(reply.content, "evaluated")
        reply.content = records.fields("evaluated", {**said, **said_of})
        return [reply]

    server = server_task(task._model, example=blobs(1, (1, 5, 5), 0)[0], metric=fl.accuracy)
    run = train(fl.Dense(), server, federation(task, only(node_of(1), "evaluate", lie)), per_round=3)
    assert all(found.loss < 1e6 and 0 <= found.metric <= 1 for line in run.history for found in line.metrics.values())
    assert "client 1 is dropped from this evaluation" in caplog.text
