"""Updates in good form and bad faith: extras nobody asked for, and metrics that mean nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from wire_support import mask_of, order, small_layout, update

from flashfl.core.exchange import Extra
from flashfl.engine.trust import check_update
from flashfl.wire.errors import WrongContent
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
