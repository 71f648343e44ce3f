"""Clients of several densities: every sub-model has BatchNorm statistics of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.aggregate import add
from flashfl.core.exchange import Client, Local, Sums, Update
from flashfl.core.state import State
from flashfl.engine.train import ClientFailed, Trainer
from flashfl.run.config import TrainConfig, plan_of
from tests.conftest import make_task

METHOD = fl.HeteroSPDST(densities=(0.2, 0.4), shares=(0.5, 0.5), warmup_clients=0)


def started() -> State:
    task = make_task("norm")
    return METHOD.init(plan_of(TrainConfig(device="cpu", rounds=5, per_round=4), task, len(task.clients), "cpu"))


def reported(s: State, id: int, n: int, density: float, statistic: float) -> Update:
    weights = METHOD.sub_model(s, density)
    values = torch.full((s.layout.size - s.layout.trained_size,), statistic)
    return Update.of(id, n, weights.with_statistics(values), weights.mask.counts)


def tail(s: State, density: float) -> torch.Tensor:
    return METHOD.sub_model(s, density).statistics


@pytest.mark.parametrize(
    ("clients", "per_round", "expected"),
    [
        ((30, 30, 40), 10, [3, 3, 4]),
        ((1020, 1020, 1360), 34, [10, 10, 14]),
        ((6, 6, 8), 5, [2, 1, 2]),
        ((1, 1, 98), 10, [1, 1, 8]),
        ((2, 2, 2), 9, [2, 2, 2]),
    ],
)
def test_cohort_has_the_size_asked_for(clients: tuple[int, ...], per_round: int, expected: list[int]) -> None:
    s = started()
    s = replace(s, plan=replace(s.plan, clients=sum(clients) + 3, per_round=per_round))
    densities = [d for d, count in zip((0.1, 0.2, 0.4), clients, strict=True) for _ in range(count)]
    cohort = METHOD.cohort(s, [Client(i, 5, d) for i, d in enumerate(densities)])
    assert [[c.density for c in cohort].count(d) for d in (0.1, 0.2, 0.4)] == expected


def test_small_cohorts_draw_from_every_density() -> None:
    s = started()
    s = replace(s, plan=replace(s.plan, per_round=2))
    clients = [Client(i, 5, (0.1, 0.2, 0.4)[i % 3]) for i in range(9)]
    cohorts = [METHOD.cohort(replace(s, round=r), clients) for r in range(20)]
    assert {len(cohort) for cohort in cohorts} == {2}
    assert {c.density for cohort in cohorts for c in cohort} == {0.1, 0.2, 0.4}


def test_statistics_are_averaged_among_models_of_one_density() -> None:
    s = started()
    sums = Sums(s.layout)
    for update in (reported(s, 0, 1, 0.2, 3.0), reported(s, 1, 3, 0.2, 7.0), reported(s, 2, 2, 0.4, 20.0)):
        add(sums, update)
    after = METHOD.aggregate(s, sums)
    assert set(tail(after, 0.2).tolist()) == {6.0}
    assert set(tail(after, 0.4).tolist()) == {20.0}
    views = {name: model.statistics for name, model in METHOD.views(after).items()}
    assert torch.equal(views["after"], tail(after, 0.4))
    assert torch.equal(views["density 0.2"], tail(after, 0.2))


def test_density_without_updates_keeps_its_statistics() -> None:
    s = started()
    sums = add(add(Sums(s.layout), reported(s, 0, 1, 0.2, 3.0)), reported(s, 2, 2, 0.4, 20.0))
    after = METHOD.aggregate(s, sums)
    again = METHOD.aggregate(after, add(Sums(s.layout), reported(after, 2, 2, 0.4, 30.0)))
    assert (set(tail(again, 0.2).tolist()), set(tail(again, 0.4).tolist())) == ({3.0}, {30.0})
    again = METHOD.aggregate(again, add(Sums(s.layout), reported(again, 0, 1, 0.2, 5.0)))
    assert (set(tail(again, 0.2).tolist()), set(tail(again, 0.4).tolist())) == ({5.0}, {30.0})


def test_density_without_clients_uses_the_others_statistics() -> None:
    s = started()
    after = METHOD.aggregate(s, add(Sums(s.layout), reported(s, 0, 1, 0.2, 3.0)))
    assert (set(tail(after, 0.2).tolist()), set(tail(after, 0.4).tolist())) == ({3.0}, {3.0})
    after = METHOD.aggregate(s, add(Sums(s.layout), reported(s, 2, 1, 0.4, 20.0)))
    assert (set(tail(after, 0.2).tolist()), set(tail(after, 0.4).tolist())) == ({20.0}, {20.0})


def test_clients_of_one_density_share_a_model() -> None:
    s = started()
    found = [w for _, w in METHOD.models(s, [Client(0, 1, 0.2), Client(1, 1, 0.4), Client(7, 3, 0.2)])]
    assert found[0] is found[2]
    assert found[1] is not found[0]


def test_density_without_reports_borrows_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of the lower density fail at the very end, where static BatchNorm gathers; before it nobody has any."""
    task = make_task("norm")
    config = TrainConfig(device="cpu", rounds=2, per_round=4, batch=4, workers=1, static_bn=True)
    gather = Trainer._gather
    small = METHOD.sub_model(started(), 0.2).mask.active

    def fails(trainer: Trainer, local: Local, data: Any) -> float:
        if int((trainer.vector[: task.layout.prunable_size] != 0).sum()) <= small:
            raise ClientFailed("no")
        return gather(trainer, local, data)

    monkeypatch.setattr(Trainer, "_gather", fails)
    run = fl.simulate(METHOD, task, train=config)
    scores = run.history[-1].metrics
    assert scores["density 0.2"].loss < 10 * scores["after"].loss


@pytest.mark.parametrize("name", ["hetero-spdst", "hetero-jmwst"])
def test_static_statistics_belong_to_each_sub_model(name: str) -> None:
    task = make_task("norm")
    method = fl.METHODS[name](densities=(0.2, 0.4), shares=(0.5, 0.5), warmup_clients=0)
    config = TrainConfig(device="cpu", rounds=2, per_round=4, batch=4, workers=1, static_bn=True)
    states: list[State] = []
    fl.simulate(method, task, train=config, watch=lambda s, _: states.append(s))
    s, trainer = states[-1], Trainer(task, "cpu")
    work = replace(s.plan.local, report="statistics", statistics=True)
    for density in (0.2, 0.4):
        clients = [c for c in method.admit(task.clients, s.plan.key) if c.density == density]
        assert clients
        total = torch.zeros(s.layout.size - s.layout.trained_size, dtype=torch.float64)
        for c in clients:
            update = trainer.train(s.order(c, work, method.sub_model(s, density)), c.id, task.train[c.id])
            assert update.weights is not None
            total += update.n * update.weights.statistics
        expected = (total / sum(c.n for c in clients)).float()
        found = method.sub_model(s, density).statistics
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_pattern_too_dense_for_a_density_warns() -> None:
    task = make_task("norm")
    method = fl.HeteroSPDST(densities=(0.1, 0.25), shares=(0.5, 0.5), warmup_clients=0, nm=4)
    with pytest.warns(RuntimeWarning, match="instead of 0.1: nm = 4 keeps at least 1 of every 4 weights"):
        method.init(plan_of(TrainConfig(device="cpu", rounds=5, per_round=4), task, len(task.clients), "cpu"))
