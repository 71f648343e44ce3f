"""A client with much data moves further than the others, and is accepted."""

from __future__ import annotations

import torch

import flashfl as fl
from flashfl.core.exchange import Client, Local
from flashfl.data.task import Task
from flashfl.engine.cpu import CPUEngine
from flashfl.engine.trust import Trust
from flashfl.run.config import TrainConfig, plan_of


def samples(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=generator)
    return x, (x[:, :4] * 2).argmax(1)


def task() -> Task:
    data = [samples(8, i) for i in range(6)] + [samples(2000, 9)]
    net = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return fl.Task(net, data, samples(9, 10))


def failures(trust: Trust | None, boost: dict[int, float]) -> dict[int, str]:
    """Failures of a round in which some clients use other learning rates."""
    made = task()
    engine, method = CPUEngine(made, TrainConfig(workers=1), trust=trust), fl.Dense()
    try:
        s = method.init(plan_of(TrainConfig(per_round=7, batch=8), made, len(made.clients)))

        def local(client: Client) -> Local:
            return Local(batch=8, lr=0.1 * boost.get(client.id, 1.0))

        outcome = engine.train(s, ((c, s.order(c, local(c))) for c in made.clients))
    finally:
        engine.close()
    return dict(outcome.failures)


def test_client_with_much_data_is_accepted() -> None:
    assert failures(Trust(), {}) == {}


def test_client_that_leaps_is_rejected() -> None:
    assert list(failures(Trust(), {2: 100.0})) == [2]


def test_simulation_accepts_every_finite_update() -> None:
    assert failures(None, {2: 100.0}) == {}
