"""Robust sums and shortened changes, on numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flashfl.engine.server import Inbox, ServerSide
from flashfl.wire.trust import Trust

from flashfl.aggregate import average
from flashfl.core.exchange import Client, Local, Order, Sums, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Weights
from flashfl.engine.client import update_message
from flashfl.engine.robust import trimmed_mean, trimmed_sums
from flashfl.wire import encode

LAYOUT = Layout.build({"prunable": [("w", (3, 3))], "dense": [("b", (2,))], "statistic": [("bn.running_mean", (1,))]})


def update(client: int, n: int, bits: list[int], values: list[float]) -> Update:
    mask = Mask(LAYOUT, torch.tensor(bits, dtype=torch.bool))
    return Update(client, n, Weights.masked(mask, torch.tensor(values)), mask.counts, {"loss": 1.0})


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
    column = torch.tensor(values, dtype=torch.float32)[:, None]
    assert trimmed_mean(column, torch.tensor(held, dtype=torch.bool)[:, None], trim).tolist() == [mean]


def test_three_tenths_of_ten_are_three() -> None:
    column = torch.arange(10.0)[:, None]
    column[7:] = 1e9
    assert trimmed_mean(column, torch.ones(10, 1, dtype=torch.bool), 0.3).tolist() == [4.5]


def test_sums_serve_every_aggregator(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashfl.engine import robust

    monkeypatch.setattr(robust, "_STRETCH", 8)  # two or three weights at a time: stretches cross byte borders
    every, values = [1] * 9, [float(i) for i in range(12)]
    updates = [update(i, 10, every, values) for i in range(3)]
    updates.append(update(3, 10, [0, 1] * 4 + [0], [-50.0] * 12))
    sums = trimmed_sums(LAYOUT, updates, 0.25)
    assert (sums.n, sums.clients, sums.mean_loss) == (40, 4, 1.0)
    assert average("wfa", sums).tolist() == pytest.approx(values)
    share = torch.tensor([3 / 4, 1.0] * 4 + [3 / 4, 1.0, 1.0, 1.0])
    expected = torch.tensor(values) * share
    # Of four holders one is cut at either end, the rogue below and an honest one above.
    assert average("fedavg", sums).tolist() == pytest.approx(expected.tolist())


def test_without_trimming_the_sums_are_the_plain_ones_of_equal_clients() -> None:
    from flashfl.aggregate import add

    updates = [update(i, 5, [1, 0, 1, 1, 0, 1, 1, 1, i % 2], [float(i + j) for j in range(12)]) for i in range(4)]
    plain = Sums(LAYOUT)
    for each in updates:
        add(plain, each)
    robust = trimmed_sums(LAYOUT, updates, 0.0)
    assert torch.allclose(average("wfa", plain), average("wfa", robust))
    assert torch.allclose(average("fedavg", plain), average("fedavg", robust))
    assert plain.holders is not None
    assert robust.holders is not None
    assert torch.equal(plain.holders, robust.holders)
    assert plain.statistics.keys() == robust.statistics.keys() == {6, 7}
    for active, total in plain.statistics.items():
        torch.testing.assert_close(total, robust.statistics[active])


def test_counts_alone_need_no_weights() -> None:
    sums = trimmed_sums(LAYOUT, [replace(update(0, 5, [1] * 9, [1.0] * 12), weights=None)], 0.2)
    assert sums.weights is None
    assert sums.counts == [9]


def test_a_long_change_is_shortened_to_the_cohorts_measure() -> None:
    """Three clients move by (1, 1, 10) along one weight; clipped at twice the median, the third counts as 2."""
    server = ServerSide(LAYOUT, trust=Trust(factor=0), clip=2.0)
    inbox, mask = Inbox(server), Mask.full(LAYOUT)
    start = Weights(mask, torch.zeros(12))
    for client, step in ((0, 1.0), (1, 1.0), (2, 10.0)):
        order = Order(start, Local(), 1, (2, 0, 0))
        message = server.message(Client(client, 5), order)
        inbox.sent(message, server.encode(message))
        vector = torch.zeros(12)
        vector[4], vector[11] = step, 3.0
        done = Update(client, 5, Weights(mask, vector), mask.counts, {"loss": 0.0})
        inbox.arrived(client, encode(update_message(done, order, LAYOUT), (mask,)).data)
    assert not inbox.failures
    moved = [u.weights.vector for u in inbox.updates() if u.weights is not None]
    inbox.spool.close()
    assert [float(v[4]) for v in moved] == [1.0, 1.0, 2.0]
    assert [float(v[11]) for v in moved] == [3.0] * 3, "a statistic is no change of weights"
