"""FedAvg and WFA on three prunable weights and two dense ones, worked out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashfl.aggregate import AGGREGATORS, add, average, fedavg, union, wfa
from flashfl.core.exchange import Extra, Sums, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Weights

LAYOUT = Layout.build({"prunable": [("a", (2,)), ("b", (1,))], "dense": [("bias", (1,))], "statistic": [("s", (1,))]})


def update(client: int, n: int, bits: list[int], values: list[float], loss: float = 0.0) -> Update:
    mask = Mask(LAYOUT, torch.tensor(bits, dtype=torch.bool))
    return Update.of(client, n, Weights.masked(mask, torch.tensor(values)), mask.counts, {"loss": loss})


def summed(*updates: Update) -> Sums:
    sums = Sums(LAYOUT)
    for each in updates:
        add(sums, each)
    return sums


FIRST = update(0, 1, [1, 1, 0], [2.0, 4.0, 9.0, 10.0, 1.0], loss=3.0)
SECOND = update(1, 3, [1, 0, 0], [6.0, 9.0, 9.0, 2.0, 5.0], loss=1.0)


def test_fedavg_counts_a_missing_weight_as_zero() -> None:
    # (1*2 + 3*6)/4, (1*4 + 3*0)/4, nobody, then the unprunable ones: (1*10 + 3*2)/4 and (1*1 + 3*5)/4
    assert fedavg(summed(FIRST, SECOND)).tolist() == [5.0, 1.0, 0.0, 4.0, 4.0]


def test_wfa_averages_over_holders() -> None:
    # (1*2 + 3*6)/(1+3), 1*4/1, zero where nobody holds it; unprunable weights as in FedAvg
    assert wfa(summed(FIRST, SECOND)).tolist() == [5.0, 4.0, 0.0, 4.0, 4.0]


def test_statistics_are_kept_by_model_size() -> None:
    third = update(2, 1, [0, 1, 0], [0.0, 9.0, 0.0, 2.0, 9.0])
    sums, none = summed(FIRST, SECOND, third), torch.tensor([-1.0])
    one, two, three = (
        Mask(LAYOUT, torch.tensor(bits)) for bits in ([True, False, False], [True, True, False], [True] * 3)
    )
    assert sums.statistics_of(two, none).tolist() == [1.0]
    assert sums.statistics_of(one, none).tolist() == [(3 * 5 + 9) / 4]
    assert sums.statistics_of(three, none) is none


def test_fedavg_equals_wfa_on_full_masks() -> None:
    updates = [update(i, n, [1, 1, 1], [i + 0.5, -i, 3.0, i, 1.0]) for i, n in enumerate((2, 5, 1))]
    assert torch.equal(fedavg(summed(*updates)), wfa(summed(*updates)))


def test_active_zero_counts_as_held() -> None:
    """A regrown weight that is still zero counts in WFA's denominator: masks are never read off the values."""
    sums = summed(update(0, 1, [1, 0, 0], [8.0, 0, 0, 0, 0]), update(1, 1, [1, 1, 0], [0.0, 0.0, 0, 0, 0]))
    assert wfa(sums)[0] == 4.0
    assert union(sums).bits.tolist() == [True, True, False]


@pytest.mark.parametrize("name", AGGREGATORS)
def test_one_client_is_the_identity(name: str) -> None:
    for n in (1, 7, 1_000_003):
        one = update(4, n, [1, 0, 1], [0.1, 0.2, -0.3, 1 / 3, 7.7])
        assert one.weights is not None
        assert torch.equal(average(name, summed(one)), one.weights.vector)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_result_does_not_depend_on_arrival_order(name: str) -> None:
    updates = [update(i, i + 1, [1, i % 2, 1], [0.1 * i, 1e-3 / (i + 1), 1e6 * i, 0.7, i / 3]) for i in range(5)]
    expected = average(name, summed(*updates))
    for arrival in itertools.permutations(updates):
        ascending = sorted(arrival, key=lambda u: u.client)
        assert torch.equal(average(name, summed(*ascending)), expected)


def test_counts_losses_and_layer_densities() -> None:
    sums = summed(FIRST, SECOND)
    assert (sums.n, sums.clients, sums.counts) == (4, 2, [3, 0])
    assert sums.layer_densities == [3 / 4, 0.0], "each client counts once, whatever its number of samples"
    assert sums.mean_loss == (1 * 3.0 + 3 * 1.0) / 4
    assert sums.holders is not None
    assert sums.holders.tolist() == [4, 1, 0]


def test_sums_are_exact_enough_for_many_clients() -> None:
    """A thousand equal clients average to themselves: float32 sums would not."""
    value = [0.1, -1e-4, 3.3, 1e3, 1e-7]
    sums = summed(*(update(i, 17, [1, 1, 1], value) for i in range(1000)))
    assert torch.equal(fedavg(sums), torch.tensor(value))


def test_counts_alone_give_no_average() -> None:
    sums = summed(Update(0, 3, None, None, (2, 1)))
    assert sums.counts == [2, 1]
    assert sums.weights is None
    with pytest.raises(ValueError, match="no weights"):
        fedavg(sums)


def test_extras_are_added_weighted() -> None:
    sent = [(0, 1, 2.0), (1, 3, 4.0)]
    updates = [Update(c, n, None, None, (0, 0), extra={"x": Extra("scalar", torch.tensor(v))}) for c, n, v in sent]
    assert summed(*updates).extra["x"] == 14.0


def test_equal_masks_are_added_packed_and_the_sums_are_the_same_bits() -> None:
    """Sums under one mask are packed until they are read; reading early, or a second mask, changes nothing."""
    bits = [1, 0, 1]
    alike = [update(i, 3 * i + 1, bits, [0.1 * i, 9.0, -1 / (i + 3), 1e3, 0.3]) for i in range(5)]
    packed, early = summed(*alike), Sums(LAYOUT)
    for each in alike:
        add(early, each)
        assert early.weights is not None
    dense = torch.zeros(LAYOUT.size, dtype=torch.float64)
    for each in alike:
        assert each.weights is not None
        dense += each.weights.vector.double() * each.n
    for sums in (packed, early):
        assert sums.weights is not None
        assert torch.equal(sums.weights, dense)
        assert sums.holders is not None
        assert sums.holders.tolist() == [35, 0, 35]
    add(packed, FIRST)
    assert packed.holders is not None
    assert packed.holders.tolist() == [36, 1, 35]


def test_update_gives_back_its_weights() -> None:
    weights = FIRST.weights
    assert weights is not None
    assert weights.vector.tolist() == [2.0, 4.0, 0.0, 10.0, 1.0]
    assert Update(0, 3, None, None, (2, 1)).weights is None
