"""The masked step on stacks small enough to compute by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashfl.core.exchange import Local
from flashfl.engine.step import MaskedStep
from flashfl.sparsity import PruneRegrow

MASKS = torch.tensor([[True, False], [True, True]])
BUSY = torch.tensor([[True], [False]])


def begun(weights: list[list[float]], masks: Tensor | None = MASKS, lr: float = 0.1, **settings: Any) -> MaskedStep:
    """A step on rows of two prunable weights and one other."""
    step = MaskedStep(torch.tensor(weights), 2, masks)
    step.begin(Local(lr=lr, **settings))
    return step


def gradients(*rows: list[float]) -> tuple[Tensor, Tensor]:
    whole = torch.tensor(rows)
    return whole[:, :2].clone(), whole[:, 2:].clone()


def test_each_row_follows_its_own_gradient_and_mask() -> None:
    step = begun([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    step(*gradients([1.0, 5.0, 2.0], [3.0, 4.0, 5.0]))
    assert step.weights[0].tolist() == pytest.approx([0.9, 0.0, 0.8])
    assert step.weights[1].tolist() == pytest.approx([0.7, 0.6, 0.5])


def test_begin_zeroes_inactive_weights_before_the_proximal_term_remembers_them() -> None:
    masks = MASKS.clone()
    step = begun([[1.0, 7.0, 1.0], [1.0, 1.0, 1.0]], masks, prox=1.0)
    masks[0, 1] = True
    step.moved()
    step(*gradients([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]))
    assert step.weights[0].tolist() == [1.0, 0.0, 1.0], "a regrown weight is not pulled to an old value"


def test_weights_that_leave_the_mask_become_zero() -> None:
    masks = MASKS.clone()
    step = begun([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]], masks)
    masks[1, 0] = False
    step.moved()
    assert step.weights[1].tolist() == [0.0, 1.0, 1.0]


def test_idle_rows_keep_weights_velocity_and_scores() -> None:
    rule = PruneRegrow(growth="momentum")
    step = begun([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]], momentum=0.5, adapt=rule)
    step(*gradients([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]))
    step(*gradients([1.0, 1.0, 1.0], [9.0, 9.0, 9.0]), BUSY)
    assert step.weights[1].tolist() == pytest.approx([0.8, 0.8, 0.8])
    step(*gradients([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]))
    assert step.weights[1].tolist() == pytest.approx([0.7, 0.7, 0.7]), "the velocity was still 2, then 1"
    assert step.scores is not None
    assert step.scores.tolist() == [pytest.approx([0.9 * 1.9] * 2), pytest.approx([0.9 * 2.0] * 2)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_of_inactive_weights_may_be_anything(value: float) -> None:
    step = begun([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]], momentum=0.9)
    step(*gradients([1.0, value, 1.0], [1.0, 1.0, 1.0]))
    assert step.weights.isfinite().all()


def test_without_masks_every_weight_trains() -> None:
    step = begun([[1.0, 0.0, 1.0]], None)
    step(*gradients([1.0, 1.0, 1.0]))
    assert step.weights.tolist() == [pytest.approx([0.9, -0.1, 0.9])]


def test_a_second_client_starts_without_the_velocity_of_the_first() -> None:
    step = begun([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]], momentum=0.9)
    step(*gradients([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]))
    step.begin(Local(lr=0.1, momentum=0.9))
    before = step.weights.clone()
    step(*gradients([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]))
    assert torch.equal(step.weights, before)
