"""A client that moves a frozen mask is dropped, and the run goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from flower_support import assert_equal, federation, node_of, rogue, train

from flashfl.core.exchange import Order, Update
from flashfl.core.mask import Mask, Weights
from tests.conftest import make_task
from tests.test_every_method import small


def swapped(update: Update, order: Order) -> Update:
    """One active weight less, one more elsewhere: as many as before, and hardly a change."""
    if update.weights is None or order.local.adapt is not None:
        return update
    bits, vector = update.weights.mask.bits.clone(), update.weights.vector.clone()
    on, off = bits.nonzero()[0], (~bits).nonzero()[0]
    bits[on], bits[off], vector[on], vector[off] = False, True, 0.0, 1e-3
    mask = Mask(update.weights.layout, bits)
    return Update.of(update.client, update.n, Weights(mask, vector), mask.counts, update.metrics)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("pdst", {}), ("spdst", {}), ("hetero-spdst", {}), ("jmwst", {"r_int": 3}), ("jmwst", {"freeze_after": 1})],
)
def test_client_that_moves_a_frozen_mask_is_dropped(name: str, changes: dict[str, Any]) -> None:
    task = make_task("norm")
    grid = federation(task)
    grid.join(node_of(2), rogue(task, swapped), {"partition-id": 2})
    run = train(small(name, **changes), task, grid, per_round=8)
    why = [line.failures[2] for line in run.history if line.failures]
    assert why
    assert all("frozen masks must be returned unchanged" in reason for reason in why)


def test_moved_frozen_mask_does_not_change_the_model() -> None:
    task = make_task("norm")
    runs = []
    for change in (swapped, lambda update, order: replace(update, n=10**6)):
        grid = federation(task)
        grid.join(node_of(2), rogue(task, change), {"partition-id": 2})
        runs.append(train(small("pdst"), task, grid, per_round=8))
    assert_equal(*runs)
