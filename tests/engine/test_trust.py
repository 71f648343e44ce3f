"""Checks of an update against its order and its cohort."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from flashfl.core.exchange import Local
from flashfl.core.mask import Recipe, Weights
from flashfl.engine.trust import Cohort, Number, Trust, change_norm, check_update, length
from flashfl.wire.errors import NegativeVariance, WrongContent, WrongDensity, WrongTag
from tests.wire.wire_support import changed, mask_of, order, small_layout, update

LAYOUT = small_layout((400, 800))
MASK = mask_of(LAYOUT, [0.2, 0.1], 1)
ORDER, UPDATE = order(MASK, n=100), update(changed(MASK, 0.3, 2))


def test_honest_update_passes() -> None:
    check_update(UPDATE, ORDER)
    counted = dataclasses.replace(UPDATE, mask=None, values=None, counts=(100, 60))
    check_update(counted, order(MASK, Local(report="counts"), n=100))
    alone = dataclasses.replace(UPDATE, mask=None, values=torch.ones(10), carries="statistics")
    check_update(alone, order(MASK, Local(report="statistics"), n=100))


def test_update_of_another_round_or_client_is_rejected() -> None:
    for other in ({"tag": (2, 3, 1)}, {"client": 6}, {"kind": "order"}):
        with pytest.raises(WrongTag):
            check_update(dataclasses.replace(UPDATE, **other), ORDER)  # type: ignore[arg-type]


def test_wrong_density_is_rejected() -> None:
    dense = mask_of(LAYOUT, [0.2, 0.2], 1)
    with pytest.raises(WrongDensity, match="240"):
        check_update(update(dense), ORDER)
    with pytest.raises(WrongDensity):
        check_update(UPDATE, order(MASK, Local(start=Recipe(1, (7, 0))), n=100))


def test_wrong_content_is_rejected() -> None:
    wrong = [
        (dataclasses.replace(UPDATE, n=0), ORDER),
        (dataclasses.replace(UPDATE, n=101), ORDER),
        (dataclasses.replace(UPDATE, values=None), ORDER),
        (UPDATE, order(MASK, Local(report="counts"), n=100)),
        (dataclasses.replace(UPDATE, values=None), order(MASK, Local(report="counts"), n=100)),
        (dataclasses.replace(UPDATE, mask=None), ORDER),
        (dataclasses.replace(UPDATE, carries="weights"), ORDER),
        (dataclasses.replace(UPDATE, carries="weights"), order(MASK, Local(report="statistics"), n=100)),
        (dataclasses.replace(UPDATE, values=None), order(MASK, Local(report="statistics"), n=100)),
        (UPDATE, order(MASK, Local(report="statistics"), n=100)),
    ]
    for message, asked in wrong:
        with pytest.raises(WrongContent):
            check_update(message, asked)


def with_value(at: int, value: float) -> object:
    assert UPDATE.values is not None
    values = UPDATE.values.clone()
    values[at] = value
    return dataclasses.replace(UPDATE, values=values)


def test_negative_variance_is_rejected() -> None:
    with pytest.raises(NegativeVariance, match="running_var"):
        check_update(with_value(-1, -0.1), ORDER)  # type: ignore[arg-type]
    check_update(with_value(-6, -0.1), ORDER)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_change_norm_equals_the_dense_computation(share: float) -> None:
    """Against the dense vectors: over the new mask and the dense layers, weights outside the old mask from 0."""
    mask = changed(MASK, share, 3)
    new, old = torch.randn(LAYOUT.size), torch.randn(LAYOUT.size)
    a, b = Weights.masked(mask, new), Weights.masked(MASK, old)
    up, down = dataclasses.replace(UPDATE, mask=mask, values=a.packed()), dataclasses.replace(ORDER, values=b.packed())
    active = torch.cat([mask.bits, torch.ones(LAYOUT.size - LAYOUT.prunable_size, dtype=torch.bool)])
    active[LAYOUT.trained_size :] = False
    expected = float(((a.vector - b.vector) * active).double().norm())
    assert np.isclose(change_norm(up, down), expected)


def rejected(*paces: float, trust: Trust | None = None, fine: float = 0.0) -> list[int]:
    """Who is rejected in a cohort with these changes per step; the last one's is accepted up to `fine`."""
    cohort = Cohort(trust or Trust())
    cohort.changes = {i: Number(pace, fine if i == len(paces) - 1 else 0.0, 10) for i, pace in enumerate(paces)}
    return list(cohort.rejected())


def test_change_far_above_the_median_is_rejected() -> None:
    assert rejected(1.0, 1.2, 0.8, 12.0) == [3]
    assert rejected(1.0, 1.2, 0.8, 12.0, trust=Trust(factor=20)) == []
    assert rejected(1.0, 100.0) == []
    assert rejected(0.0, 0.0, 5.0) == [], "nobody else has moved at all"


def test_small_change_is_accepted_in_a_converged_cohort() -> None:
    assert rejected(1e-4, 1e-4, 1e-4, 0.08) == [3]
    assert rejected(1e-4, 1e-4, 1e-4, 0.08, fine=0.16) == []
    assert rejected(1e-4, 1e-4, 1e-4, 0.08, fine=0.03) == [3], "it would replace the model"


def test_a_fifth_of_the_weights_length_is_a_small_change() -> None:
    cohort = Cohort(Trust())
    cohort.see(UPDATE, ORDER)
    [(value, fine, n)] = cohort.changes.values()
    local = ORDER.local or Local()
    steps = local.epochs * local.batches(100)
    assert np.isclose(value, change_norm(UPDATE, ORDER) / steps)
    assert np.isclose(fine, 0.2 * length(ORDER) / steps)
    assert n == 100
    ignoring = Cohort(Trust(factor=0))
    ignoring.see(UPDATE, ORDER)
    assert not ignoring.changes


def test_length_of_an_order() -> None:
    weights = ORDER.weights().vector[: LAYOUT.trained_size]
    assert np.isclose(length(ORDER), float(weights.double().norm()))
