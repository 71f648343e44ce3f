"""Checks of an update against its order."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashfl.core.exchange import Local
from flashfl.core.mask import Recipe
from flashfl.engine.trust import check_update
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
