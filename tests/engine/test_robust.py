"""Robust sums and shortened changes, on numbers that can be checked by hand."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.aggregate import add, average
from flashfl.core.engine import FixedPopulation
from flashfl.core.exchange import Client, Extra, Local, Order, Sums, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Weights, repacked
from flashfl.data.task import Task
from flashfl.engine.client import update_message
from flashfl.engine.counting import Counting
from flashfl.engine.encoding import Encoding
from flashfl.engine.gpu import GPUEngine
from flashfl.engine.memory import ClientMemory
from flashfl.engine.robust import Bounds, Others, Robust, add_bounded, trimmed_mean
from flashfl.engine.store import MaskStore
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


def sums_of(updates: Iterable[Update], robust: Robust, start: Weights | None = None) -> Sums:
    """The sums of updates whose clients were sent the model `start`."""
    sums = Sums(LAYOUT)
    add_bounded(sums, [each if start is None else started(each, start) for each in updates], robust)
    return sums


def started(each: Update, start: Weights) -> Update:
    assert each.mask is not None
    return replace(each, start=repacked(start.packed(), start.mask, each.mask)[:-1])


def trimmed_sums(updates: Iterable[Update], trim: float) -> Sums:
    return sums_of(updates, Robust(trim=trim))


@pytest.mark.parametrize(
    ("values", "shares", "trim", "mean"),
    [
        ([1, 2, 3, 100], [1, 1, 1, 1], 0.25, 2.5),
        ([1, 2, 3, 100], [1, 1, 1, 1], 0.0, 26.5),
        ([1, 2, 3, 100], [1, 1, 1, 0], 0.25, 2.0),
        ([-9, 2, 3, 100, 4], [1, 1, 1, 1, 1], 0.2, 3.0),
        ([-9, 2, 3, 100, 4], [1, 1, 1, 1, 1], 0.5, 3.0),
        ([7, 8, 9], [0, 1, 0], 0.4, 8.0),
        ([7, 8, 9], [0, 0, 0], 0.4, 0.0),
        ([1, 2, 3e38], [2, 6, 2], 0.2, 2.0),  # a rounding error times 3e38 would be seen
        ([0, 4, 8], [1, 1, 2], 0.25, 6.0),  # by samples, not by clients
    ],
)
def test_trimmed_mean_over_holders(values: list[float], shares: list[int], trim: float, mean: float) -> None:
    column = torch.tensor([value if share else torch.nan for value, share in zip(values, shares, strict=True)])[:, None]
    assert trimmed_mean(column, torch.tensor(shares), trim).tolist() == pytest.approx([mean], rel=1e-7)


def test_trim_of_three_tenths_drops_three_of_ten() -> None:
    column = torch.arange(10.0)[:, None]
    column[7:] = 1e9
    assert trimmed_mean(column, torch.full((10,), 144), 0.3).tolist() == pytest.approx([4.5])


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


def account_sums(robust: Robust, changes: tuple[float, ...], counts: tuple[int, ...] = ()) -> Sums:
    """Clients that move one weight by these changes; a statistic becomes 3."""
    account = Encoding(ClientMemory(MaskStore(LAYOUT, {})), robust=robust)
    for client, change in enumerate(changes):
        n = counts[client] if counts else 5
        order = Order(START, Local(), 1, (2, 0, 0))
        account.sent(Client(client, n), order)
        vector = torch.zeros(12)
        vector[4], vector[11] = change, 3.0
        done = Update.of(client, n, Weights(MASK, vector), MASK.counts, {"loss": 0.0})
        account.received(client, encode(update_message(done, order, LAYOUT), (MASK,)).data)
    outcome = account.close()
    assert not outcome.failures
    return outcome.sums


def test_long_change_is_clipped_to_the_cohorts_median() -> None:
    """Three clients move by (1, 1, 10) along one weight. Clipped at twice the median, the third counts as 2.

    That takes 0.8 of one client away, and the average is lengthened by 3 / 2.2 for it.
    """
    found = average("fedavg", account_sums(Robust(clip=2.0), (1.0, 1.0, 10.0)))
    assert float(found[4]) == pytest.approx(4 / 3 * 3 / 2.2)
    assert float(found[11]) == 3.0, "a statistic is not a change of weights"


def test_clip_does_not_slow_down_clients_that_agree() -> None:
    for changes in ((1.0, 1.0, 1e30), (1.0, 1.0, 1.0)):
        assert float(average("fedavg", account_sums(Robust(clip=1.0), changes))[4]) == pytest.approx(1.0, rel=0.5)
    far = average("fedavg", account_sums(Robust(clip=1.0), (1.0, 1.0, 1.0, 1.0, -1e30)))
    assert float(far[4]) == pytest.approx((4 - 1) / 4), "a liar is as long as the others and counts no further"


def test_client_with_more_samples_may_add_no_more_than_others() -> None:
    """With 2^32 samples, a change may not be twice as long and count twice as well."""
    sums = account_sums(Robust(bounded=True, clip=2.0), (1.0, 1.0, 1.0, -1e9), (10, 10, 10, 2**32))
    assert sums.n == 50
    again = 50 / (30 + 20 * 20 / 20e9)  # the average is lengthened by what clipping took away
    # The liar counts as 20 samples, so its change may be 1 long. It is then replaced by the others' direction.
    assert float(average("fedavg", sums)[4]) == pytest.approx((30 + 20) / 50 * again)


def test_clip_of_two_takes_the_shorter_as_measure() -> None:
    assert abs(float(average("fedavg", account_sums(Robust(clip=1.0), (1.0, -1e30)))[4])) <= 1


def test_clip_when_most_clients_have_not_moved() -> None:
    assert float(average("fedavg", account_sums(Robust(clip=1.0), (0.0, 0.0, 5.0)))[4]) == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_values_are_packed_under_another_mask(share: float) -> None:
    """Against the dense vectors: a weight outside the old mask counts as 0."""
    torch.manual_seed(int(10 * share))
    old = Mask(LAYOUT, torch.rand(9) < 0.5)
    new = Mask(LAYOUT, torch.where(torch.rand(9) < share, ~old.bits, old.bits))
    model = Weights.masked(old, torch.randn(12))
    assert torch.equal(repacked(model.packed(), old, new), model.restrict(new).packed())


def test_samples_are_bounded_by_twice_the_median() -> None:
    plain = account_sums(Robust(), (1.0, 1.0, 1.0, 5.0), (10, 12, 14, 2**32))
    bounded = account_sums(Robust(bounded=True), (1.0, 1.0, 1.0, 5.0), (10, 12, 14, 2**32))
    assert float(average("fedavg", plain)[4]) == pytest.approx(5.0)
    assert bounded.n == 10 + 12 + 14 + 24
    assert float(average("fedavg", bounded)[4]) == pytest.approx((36 + 5 * 24) / 60)


def many(statistics: list[float], counts: list[int] | None = None, bits: list[list[int]] | None = None) -> Sums:
    """Clients with these statistics, votes for a layer, and masks."""
    made = []
    for i, value in enumerate(statistics):
        one = update(i, 10, bits[i] if bits else [1] * 9, [1.0] * 11 + [value])
        made.append(replace(one, metrics={"loss": value}, counts=(counts[i],) if counts else one.counts))
    return sums_of(made, Robust(bounded=True))


def test_one_statistic_of_three_or_more_may_be_anything() -> None:
    for honest in ([1.0, 2.0], [1.0, 2.0, 3.0], [1.0 + i / 8 for i in range(9)]):
        for lie in (-1e30, 3e38):
            sums = many([*honest, lie])
            for mean in (average("fedavg", sums)[11], average("wfa", sums)[11], sums.statistics[9][0] / sums.n):
                assert min(honest) <= float(mean) <= max(honest)
            assert min(honest) <= sums.mean_loss <= max(honest)


def test_two_statistics_of_ten_may_be_anything() -> None:
    assert 1.0 <= float(average("fedavg", many([1.0 + i / 7 for i in range(8)] + [1e30] * 2))[11]) <= 2.0


def test_statistics_of_a_rare_density_stay_within_those_of_the_cohort() -> None:
    sparse = [1, 1, 1, 0, 0, 0, 0, 0, 0]
    sums = many([1.0, 2.0, 3.0, 4.0, 1e30], bits=[[1] * 9] * 4 + [sparse])
    assert float(sums.statistics[3][0] / sums.statistics[3][1]) == 4.0
    assert 2.0 <= float(sums.statistics[9][0] / sums.statistics[9][1]) <= 3.0


def test_layer_counts_of_one_client_do_not_move_the_vote() -> None:
    assert many([1.0] * 5, [4, 5, 5, 6, 9]).counts == many([1.0] * 5, [4, 5, 5, 6, 6]).counts
    assert many([1.0] * 10, [5] * 9 + [0]).layer_densities == [5 / 9]


def test_extras_are_bounded_by_the_cohorts_median() -> None:
    """Whatever a method asks for beside the weights: a control variate, scores."""
    made = [update(i, 10, [1] * 9, [1.0] * 12) for i in range(5)]
    made = [replace(u, extra={"c": Extra("dense", torch.tensor([1.0]))}) for u in made[:4]] + [
        replace(made[4], extra={"c": Extra("dense", torch.tensor([-1e9]))})
    ]
    sums = sums_of(made, Robust(clip=1.0))
    assert float(sums.extra["c"] / sums.n) == pytest.approx(3 / 4)


def test_updates_are_held_one_at_a_time() -> None:
    """Of a large cohort they wait in a file."""
    alive: list[weakref.ref[torch.Tensor]] = []

    class FromFile:
        def __iter__(self) -> Iterator[Update]:
            for i in range(9):
                each = started(update(i, 10, [1] * 9, [1.0 + i] * 12), START)
                each = replace(each, extra={"c": Extra("dense", torch.ones(4))}, start=each.start + 0)  # type: ignore[operator]
                alive.extend(map(weakref.ref, (each.values, each.start, each.extra["c"].value)))  # type: ignore[arg-type]
                yield each
                del each
                assert sum(ref() is not None for ref in alive) <= 3

    add_bounded(Sums(LAYOUT), FromFile(), Robust(True, 2.0))


@pytest.mark.parametrize("kind", [torch.float64, torch.int64])
def test_extras_are_bounded_whatever_their_type(kind: torch.dtype) -> None:
    """The sender chooses the type of a tensor, so whole numbers must not escape the bound."""
    lie = torch.tensor([10**18]).to(kind)
    values = [torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([1.0]), lie]
    made = [
        replace(update(i, 10, [1] * 9, [1.0] * 12), extra={"c": Extra("dense", value)})
        for i, value in enumerate(values)
    ]
    assert float(sums_of(made, Robust(clip=1.0)).extra["c"] / 40) <= 2


ZERO = Weights(MASK, torch.zeros(12))


def agreed(changes: list[list[float]], most: float = 2.0) -> torch.Tensor:
    """The average of clients that move the first weights by these changes, with the bounds of `robust`."""
    updates = [update(i, 10, [1] * 9, [*change, *[0.0] * (12 - len(change))]) for i, change in enumerate(changes)]
    return average("fedavg", sums_of(updates, Robust(True, most), ZERO))


def test_client_that_undoes_the_others_change_does_not_slow_them_down() -> None:
    """Clients go one step ahead, and one or two go back. Those are replaced by the others' direction."""
    assert float(agreed([[1.0]] * 4 + [[-1.0]])[0]) == pytest.approx(1.0)
    assert float(agreed([[1.0]] * 8 + [[-1.0]] * 2)[0]) == pytest.approx(1.0), "two of ten are held too"
    assert float(agreed([[1.0]] * 7 + [[-1.0]] * 3)[0]) == pytest.approx(4 / 10), "three are more than a fifth"


def test_change_across_the_others_is_left_alone() -> None:
    """What only one client has learnt is kept, unless it undoes what the others have learnt."""
    assert agreed([[1.0]] * 4 + [[0.0, 1.0]])[:2].tolist() == pytest.approx([4 / 5, 1 / 5])
    mean = agreed([[1.0, 0.0]] * 4 + [[-0.28, 0.96]])
    share = 2 * 0.28  # blended with (1, 0)
    last = [(1 - share) * -0.28 + share, (1 - share) * 0.96]
    assert mean[:2].tolist() == pytest.approx([(4 + last[0]) / 5, last[1] / 5])


def test_clients_that_all_differ_are_left_alone() -> None:
    """Near the end of training, unlike clients pull in different directions: none goes along with the others."""
    changes = [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.1, 0.0]]
    plain = [sum(change[i] for change in changes) / 5 for i in range(2)]
    assert agreed(changes)[:2].tolist() == pytest.approx(plain, abs=0.06)


def test_blended_change_is_no_longer_than_before() -> None:
    torch.manual_seed(5)
    for _ in range(20):
        changes = torch.randn(6, 9)
        changes[5] = -changes[:5].sum(0)
        rows = [[*row, 0.0, 0.0, 0.0] for row in changes.tolist()]
        updates = [started(update(i, 10, [1] * 9, row), ZERO) for i, row in enumerate(rows)]
        others = Others(LAYOUT, Bounds(updates, Robust(clip=1e9)))
        for look in (others.add, others.compare):
            for each in updates:
                look(each)
        for each in updates:
            assert each.values is not None
            blended = others.blend(each, 1).values
            assert blended is not None
            assert float(blended[:9].norm()) <= float(each.values[:9].norm()) * (1 + 1e-6)


def test_trimmed_account_drops_the_extremes() -> None:
    sums = account_sums(Robust(trim=0.25), (1.0, 2.0, 3.0, 100.0))
    assert float(average("fedavg", sums)[4]) == pytest.approx(2.5)


def test_settings_choose_the_bounds() -> None:
    assert Robust.of(TrainConfig()) == Robust(), "in a simulation, plain averages unless asked for"
    assert Robust.of(TrainConfig(robust="on")) == Robust(True, 2.0, 0.0)
    assert Robust.of(TrainConfig(robust="on", clip=3.0)) == Robust(True, 3.0, 0.0)
    assert Robust.of(TrainConfig(robust="on", trim=0.1)) == Robust(True, 0.0, 0.1)
    assert Robust.of(TrainConfig(robust="off", clip=2.0)) == Robust(False, 2.0, 0.0)


@pytest.mark.parametrize(
    "robust", [Robust(clip=1.0), Robust(trim=0.3), Robust(False, 1.0, 0.3), Robust(True, 1.0), Robust(True, 0.0, 0.3)]
)
@pytest.mark.parametrize("chunk", [5, 2, 1])
def test_counting_account_agrees_with_the_encoding_one(robust: Robust, chunk: int) -> None:
    """Masks and values of five clients, one of them not finite, through both accounts."""
    torch.manual_seed(3)
    masks = [Mask(LAYOUT, torch.rand(9) < 0.7) for _ in range(5)]
    start = Weights(MASK, torch.randn(12))
    vectors = [Weights.masked(mask, torch.randn(12) * (10 if i == 1 else 1)).vector for i, mask in enumerate(masks)]
    order = Order(start, Local(adapt=PruneRegrow()), 1, (2, 0, 0))
    updates = [Update.of(i, 5 + i, Weights(masks[i], vectors[i]), masks[i].counts) for i in (0, 1, 2, 4)]
    expected = sums_of(updates, robust, start)

    vectors[3] = vectors[3] + torch.nan
    account = Counting(ClientMemory(MaskStore(LAYOUT, {})), robust=robust)
    clients = [Client(i, 5 + i) for i in range(5)]
    works = [Work(order.local, 1, c.n, 1, c, order, masks[c.id], masks[c.id].counts, start) for c in clients]
    for work in works:
        account.sent(work.client, order)
    for at in range(0, 5, chunk):
        some = slice(at, at + chunk)
        account.received(works[some], torch.stack(vectors[some]), torch.ones(len(works[some])))
    outcome = account.close()
    assert list(outcome.failures) == [3]
    assert (outcome.sums.n, outcome.sums.counts) == (expected.n, expected.counts)
    for name in ("weights", "holders"):
        torch.testing.assert_close(getattr(outcome.sums, name), getattr(expected, name), rtol=1e-6, atol=1e-6)
    assert outcome.sums.statistics.keys() == expected.statistics.keys()
    for active, total in expected.statistics.items():
        torch.testing.assert_close(outcome.sums.statistics[active], total)


@pytest.mark.parametrize("settings", [{"clip": 1.0}, {"trim": 0.3}, {"robust": "on"}])
def test_robust_settings_work_in_a_simulation_on_every_engine(settings: dict[str, Any]) -> None:
    """One of eight clients has samples a hundred times too large."""
    data = [blobs(12, (6,), 100 + i) for i in range(8)]
    data[2] = (data[2][0] * 100, data[2][1])
    task = Task(DropoutNet, data, blobs(30, (6,), 7))
    config = TrainConfig(device="cpu", rounds=2, per_round=8, batch=12, workers=1, lr=0.01, **settings)
    plain = fl.simulate(fl.PDST(0.5), task, train=replace(config, robust="off", clip=0.0, trim=0.0))
    robust = fl.simulate(fl.PDST(0.5), task, train=config)
    start = fl.PDST(0.5).init(plan_of(config, task, 8)).weights.vector
    moved = [float((run.weights.vector - start).norm()) for run in (plain, robust)]
    assert moved[1] < moved[0] / 1.5
    engine = GPUEngine(task, replace(config, lanes=3), "cpu")
    lanes = drive(fl.PDST(0.5), task, config, engine, FixedPopulation(task.clients))
    torch.testing.assert_close(lanes.weights.vector, robust.weights.vector, rtol=1e-4, atol=1e-5)
    assert lanes.traffic == robust.traffic
