"""Robust sums and shortened changes, on numbers that can be checked by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

import flashfl as fl
from flashfl.aggregate import add, average
from flashfl.core.engine import FixedPopulation
from flashfl.core.exchange import Client, Local, Order, Sums, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Weights
from flashfl.data.task import Task
from flashfl.engine.client import update_message
from flashfl.engine.counting import Counting
from flashfl.engine.encoding import Server
from flashfl.engine.gpu import GPUEngine
from flashfl.engine.memory import ClientMemory
from flashfl.engine.robust import add_updates, trimmed_mean
from flashfl.engine.store import MaskStore
from flashfl.engine.trust import Trust
from flashfl.engine.work import Work
from flashfl.run.config import TrainConfig, plan_of
from flashfl.run.simulate import drive
from flashfl.sparsity import PruneRegrow
from flashfl.wire import encode
from tests.conftest import DropoutNet, blobs

LAYOUT = Layout.build({"prunable": [("w", (3, 3))], "dense": [("b", (2,))], "statistic": [("bn.running_mean", (1,))]})


def update(client: int, n: int, bits: list[int], values: list[float]) -> Update:
    mask = Mask(LAYOUT, torch.tensor(bits, dtype=torch.bool))
    return Update.of(client, n, Weights.masked(mask, torch.tensor(values)), mask.counts, {"loss": 1.0})


def trimmed_sums(updates: Iterable[Update], trim: float) -> Sums:
    sums = Sums(LAYOUT)
    add_updates(sums, updates, {}, Trust(factor=0, trim=trim))
    return sums


@pytest.mark.parametrize(
    ("values", "held", "trim", "mean"),
    [
        ([1, 2, 3, 100], [1, 1, 1, 1], 0.25, 2.5),
        ([1, 2, 3, 100], [1, 1, 1, 1], 0.0, 26.5),
        ([1, 2, 3, 100], [1, 1, 1, 0], 0.25, 2.0),
        ([-9, 2, 3, 100, 4], [1, 1, 1, 1, 1], 0.2, 3.0),
        ([-9, 2, 3, 100, 4], [1, 1, 1, 1, 1], 0.49, 3.0),
        ([7, 8, 9], [0, 1, 0], 0.4, 8.0),
        ([7, 8, 9], [0, 0, 0], 0.4, 0.0),
    ],
)
def test_trimmed_mean_over_holders(values: list[float], held: list[int], trim: float, mean: float) -> None:
    column = torch.tensor([value if bit else torch.nan for value, bit in zip(values, held, strict=True)])[:, None]
    assert trimmed_mean(column, trim).tolist() == [mean]


def test_trim_of_three_tenths_drops_three_of_ten() -> None:
    column = torch.arange(10.0)[:, None]
    column[7:] = 1e9
    assert trimmed_mean(column, 0.3).tolist() == [4.5]


def test_sums_serve_every_aggregator(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashfl.engine import robust

    monkeypatch.setattr(robust, "_STRETCH", 8)  # two or three weights at a time: stretches cross byte borders
    every, values = [1] * 9, [float(i) for i in range(12)]
    updates = [update(i, 10, every, values) for i in range(3)]
    updates.append(update(3, 10, [0, 1] * 4 + [0], [-50.0] * 12))
    sums = trimmed_sums(updates, 0.25)
    assert (sums.n, sums.clients, sums.mean_loss) == (40, 4, 1.0)
    assert average("wfa", sums).tolist() == pytest.approx(values)
    share = torch.tensor([3 / 4, 1.0] * 4 + [3 / 4, 1.0, 1.0, 1.0])
    expected = torch.tensor(values) * share
    # Of four holders one is cut at either end, the rogue below and an honest one above.
    assert average("fedavg", sums).tolist() == pytest.approx(expected.tolist())


def test_no_trimming_gives_the_plain_sums_for_equal_clients() -> None:
    updates = [update(i, 5, [1, 0, 1, 1, 0, 1, 1, 1, i % 2], [float(i + j) for j in range(12)]) for i in range(4)]
    plain = Sums(LAYOUT)
    for each in updates:
        add(plain, each)
    robust = trimmed_sums(updates, 0.0)
    assert torch.allclose(average("wfa", plain), average("wfa", robust))
    assert torch.allclose(average("fedavg", plain), average("fedavg", robust))
    assert plain.holders is not None
    assert robust.holders is not None
    assert torch.equal(plain.holders, robust.holders)
    assert plain.statistics.keys() == robust.statistics.keys() == {6, 7}
    for active, total in plain.statistics.items():
        torch.testing.assert_close(total, robust.statistics[active])


def test_counts_alone_need_no_weights() -> None:
    sums = trimmed_sums([replace(update(0, 5, [1] * 9, [1.0] * 12), mask=None, values=None)], 0.2)
    assert sums.weights is None
    assert sums.counts == [9]


MASK = Mask.full(LAYOUT)
START = Weights(MASK, torch.zeros(12))


def clipped_and_trimmed(trust: Trust, steps: tuple[float, ...]) -> Sums:
    """Clients that move one weight by these steps; a statistic becomes 3."""
    account = Server(ClientMemory(MaskStore(LAYOUT, {})), trust=trust).open()
    for client, step in enumerate(steps):
        order = Order(START, Local(), 1, (2, 0, 0))
        account.sent(Client(client, 5), order)
        vector = torch.zeros(12)
        vector[4], vector[11] = step, 3.0
        done = Update.of(client, 5, Weights(MASK, vector), MASK.counts, {"loss": 0.0})
        account.received(client, encode(update_message(done, order, LAYOUT), (MASK,)).data)
    outcome = account.close()
    assert not outcome.failures
    return outcome.sums


def test_long_change_is_clipped_to_the_cohorts_median() -> None:
    """Three clients move by (1, 1, 10) along one weight; clipped at twice the median, the third counts as 2."""
    found = average("fedavg", clipped_and_trimmed(Trust(factor=0, clip=2.0), (1.0, 1.0, 10.0)))
    assert float(found[4]) == pytest.approx(4 / 3)
    assert float(found[11]) == 3.0, "a statistic is not a change of weights"


def test_trimmed_account_drops_the_extremes() -> None:
    sums = clipped_and_trimmed(Trust(factor=0, trim=0.25), (1.0, 2.0, 3.0, 100.0))
    assert float(average("fedavg", sums)[4]) == pytest.approx(2.5)
    both = clipped_and_trimmed(Trust(factor=0, clip=2.0, trim=0.25), (1.0, 2.0, 3.0, 100.0))
    assert float(average("fedavg", both)[4]) == pytest.approx(2.5)


@pytest.mark.parametrize("trust", [Trust(factor=0, clip=1.0), Trust(factor=0, trim=0.3), Trust(0, 3, 1.0, 0.3)])
@pytest.mark.parametrize("chunk", [5, 2, 1])
def test_counting_account_agrees_with_the_encoding_one(trust: Trust, chunk: int) -> None:
    """Masks and values of five clients, one of them not finite, through both accounts."""
    torch.manual_seed(3)
    masks = [Mask(LAYOUT, torch.rand(9) < 0.7) for _ in range(5)]
    start = Weights(MASK, torch.randn(12))
    vectors = [Weights.masked(mask, torch.randn(12) * (10 if i == 1 else 1)).vector for i, mask in enumerate(masks)]
    order = Order(start, Local(adapt=PruneRegrow()), 1, (2, 0, 0))
    updates = [Update.of(i, 5 + i, Weights(masks[i], vectors[i]), masks[i].counts) for i in (0, 1, 2, 4)]
    expected = Sums(LAYOUT)
    add_updates(expected, updates, {one.client: lambda: start for one in updates}, trust)

    vectors[3] = vectors[3] + torch.nan
    account = Counting(ClientMemory(MaskStore(LAYOUT, {})), trust=trust)
    seats = [Work(order.local, 1, 5 + i, 1, Client(i, 5 + i), order, mask, mask.counts) for i, mask in enumerate(masks)]
    for seat in seats:
        account.sent(seat.client, order)
    for at in range(0, 5, chunk):
        some = slice(at, at + chunk)
        account.received(seats[some], torch.stack(vectors[some]), torch.ones(len(seats[some])))
    outcome = account.close()
    assert list(outcome.failures) == [3]
    assert outcome.sums.n == expected.n
    for name in ("weights", "holders"):
        torch.testing.assert_close(getattr(outcome.sums, name), getattr(expected, name), rtol=1e-6, atol=1e-6)
    assert outcome.sums.statistics.keys() == expected.statistics.keys()
    for active, total in expected.statistics.items():
        torch.testing.assert_close(outcome.sums.statistics[active], total)


@pytest.mark.parametrize("settings", [{"clip": 1.0}, {"trim": 0.3}])
def test_robust_settings_work_in_a_simulation_on_every_engine(settings: dict[str, float]) -> None:
    """One of eight clients has samples a hundred times too large."""
    data = [blobs(12, (6,), 100 + i) for i in range(8)]
    data[2] = (data[2][0] * 100, data[2][1])
    task = Task(DropoutNet, data, blobs(30, (6,), 7))
    config = TrainConfig(device="cpu", rounds=2, per_round=8, batch=12, workers=1, lr=0.01, **settings)
    plain = fl.simulate(fl.PDST(0.5), task, train=replace(config, clip=0.0, trim=0.0))
    robust = fl.simulate(fl.PDST(0.5), task, train=config)
    start = fl.PDST(0.5).init(plan_of(config, task, 8)).weights.vector
    moved = [float((run.weights.vector - start).norm()) for run in (plain, robust)]
    assert moved[1] < moved[0] / 1.5
    engine = GPUEngine(task, replace(config, lanes=3), "cpu")
    lanes = drive(fl.PDST(0.5), task, config, engine, FixedPopulation(task.clients))
    torch.testing.assert_close(lanes.weights.vector, robust.weights.vector, rtol=1e-4, atol=1e-5)
    assert lanes.traffic == robust.traffic
