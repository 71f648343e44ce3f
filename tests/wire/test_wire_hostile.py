"""Updates in good form and bad faith: extras nobody asked for, numbers no model has, statistics of another world."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from wire_support import mask_of, order, small_layout, update

from flashfl.core.exchange import Extra, Local
from flashfl.engine.trust import Cohort, Number, Trust, activations, check_update
from flashfl.wire.errors import ChangeTooLarge, WrongContent
from flashfl.wire.message import Message

LAYOUT = small_layout((400, 800))
MASK = mask_of(LAYOUT, [0.2, 0.1], 1)
ORDER, UPDATE = order(MASK, n=100), update(MASK)
ASKED = {
    "control": Extra("masked", torch.zeros(MASK.active)),
    "scores": Extra("dense", torch.zeros(2, 3)),
    "votes": Extra("bits", torch.ones(4, 2, dtype=torch.bool)),
    "weight": Extra("scalar", torch.tensor(2.5)),
}


def with_extra(name: str, extra: Extra) -> Message:
    return dataclasses.replace(UPDATE, extra={name: extra})


def test_extras_answer_those_of_the_order() -> None:
    asked = order(MASK, extra=ASKED, n=100)
    check_update(UPDATE, asked)
    check_update(dataclasses.replace(UPDATE, extra={**ASKED, "votes": Extra("bits", torch.zeros(8).bool())}), asked)
    shorter = Extra("masked", torch.zeros(7))  # the mask a client keeps may be another than the order's
    check_update(with_extra("control", shorter), asked)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("other", Extra("scalar", torch.tensor(1.0))),
        ("scores", Extra("dense", torch.zeros(3, 2))),
        ("scores", Extra("scalar", torch.tensor(1.0))),
        ("votes", Extra("bits", torch.ones(9, dtype=torch.bool))),
        ("weight", Extra("scalar", torch.tensor(1e200, dtype=torch.float64))),
    ],
)
def test_any_other_extra_is_refused(name: str, extra: Extra) -> None:
    for asked in (ORDER, order(MASK, extra=ASKED, n=100)):
        with pytest.raises(WrongContent, match=name):
            check_update(with_extra(name, extra), asked)


@pytest.mark.parametrize("value", [1.7e308, -1e31, float("inf"), float("nan")])
def test_metrics_that_mean_nothing_are_refused(value: float) -> None:
    check_update(dataclasses.replace(UPDATE, metrics={"loss": 1e29}), ORDER)
    with pytest.raises(WrongContent, match="loss"):
        check_update(dataclasses.replace(UPDATE, metrics={"loss": value}), ORDER)


@pytest.mark.parametrize(
    ("at", "good", "bad"), [(3, -1e6, -1.1e6), (85, 1e6, 1e30), (-6, -1e12, -2e12), (-1, 9e23, 1.1e24)]
)
def test_no_number_is_larger_than_a_models(at: int, good: float, bad: float) -> None:
    """A weight, a dense weight, a running mean and a running variance, whatever the cohort."""
    assert UPDATE.values is not None
    values = UPDATE.values.clone()
    values[at] = good
    check_update(dataclasses.replace(UPDATE, values=values), ORDER)
    values[at] = bad
    check_update(dataclasses.replace(UPDATE, values=values), ORDER, bounded=False)
    with pytest.raises(ChangeTooLarge, match="above"):
        check_update(dataclasses.replace(UPDATE, values=values), ORDER)
    if at < -1:
        alone = dataclasses.replace(UPDATE, mask=None, values=values[-10:], carries="statistics")
        with pytest.raises(ChangeTooLarge, match="running_mean"):
            check_update(alone, order(MASK, Local(report="statistics"), n=100))


def test_activations_are_mean_squares_of_what_a_layer_sees() -> None:
    assert UPDATE.values is not None
    values = UPDATE.values.clone()
    values[-10:-5], values[-5:] = -3.0, 16.0
    assert activations(dataclasses.replace(UPDATE, values=values)) == {"norm": 5.0}
    assert activations(dataclasses.replace(UPDATE, values=values[-10:], carries="statistics")) == {"norm": 5.0}
    assert activations(update(MASK, "weights")) == {}


def seen(*sizes: float, n: int = 10, before: float = 1.0) -> list[Number]:
    return [Number(size, before, n) for size in sizes]


def rejected(numbers: list[Number]) -> list[int]:
    cohort = Cohort(Trust())
    cohort.layers = {"norm": dict(enumerate(numbers))}
    return list(cohort.rejected())


def test_statistics_are_held_against_the_cohorts() -> None:
    assert rejected(seen(1.0, 2.0, 0.5, 21.0)) == [3]
    assert rejected(seen(1.0, 2.0, 0.0, 9.0)) == []
    assert rejected(seen(1.0, 100.0)) == [], "two have no median worth the name"
    assert rejected(seen(1.0, 1.0, 21.0, before=21.0)) == [], "it is what it was sent"
    assert rejected(seen(0.0, 0.0, 0.0, 0.9)) == [], "a layer that is dead elsewhere may live here"


def test_the_larger_median_counts() -> None:
    """Six clients of one step still hold statistics near where they began, the seventh has seen all of its data."""
    few = seen(*[1.0] * 6, n=16)
    assert rejected([*few, Number(30.0, 1.0, 4000)]) == [], "it is most of the data"
    assert rejected([*few, Number(0.05, 0.0, 4000), Number(5.0, 0.0, 16)]) == []
    assert rejected([*seen(*[1.0] * 300, n=16), Number(30.0, 1.0, 4000)]) == [300]
