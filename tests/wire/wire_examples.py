"""Example messages whose bytes are fixed for version 1 of the format; `test_wire_examples.py` holds the bytes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from wire_support import count_values

from flashfl.core.exchange import Carries, Extra, Local
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Recipe
from flashfl.core.precision import Precision
from flashfl.sparsity import PruneRegrow, recipe_mask
from flashfl.wire import Message, encode

LAYOUT = Layout.build(
    {
        "prunable": [("body.weight", (4, 6)), ("up.weight", (6, 2, 3)), ("größe", (300,))],
        "dense": [("norm.weight", (2,)), ("head.weight", (2, 2))],
        "statistic": [("norm.running_mean", (2,)), ("norm.running_var", (2,))],
        "fixed": [("table", (5,))],
    },
    turned=["up.weight"],
)


def every(step: int, first: int) -> Mask:
    """Each `step`-th weight from `first` on."""
    return Mask(LAYOUT, torch.arange(LAYOUT.prunable_size) % step == first)


BASE, DENSE = every(11, 3), every(2, 1)
NEAR = Mask(LAYOUT, BASE.bits.clone().index_fill_(0, torch.tensor([3, 40, 91, 200]), True).index_fill_(
    0, torch.tensor([14, 102, 355]), False))  # fmt: skip
MADE = recipe_mask(LAYOUT, Recipe(2**63 + 5, (12, 18, 30), 2))
LOCAL = Local(
    epochs=3, lr=0.03, momentum=0.9, max_steps=7, adapt=PruneRegrow(0.125, "gradient"),
    start=Recipe(99, (2, 5, 17)), keep=("mask",), report="weights",
)  # fmt: skip
EXTRA = {
    "grads": Extra("masked", torch.arange(BASE.active, dtype=torch.float32) / 4),
    "scores": Extra("dense", torch.arange(6, dtype=torch.int64).view(2, 3)),
    "votes": Extra("bits", torch.arange(13) % 3 == 0),
    "weight": Extra("scalar", torch.tensor(-2.5, dtype=torch.float64)),
}


def values(mask: Mask | None, carries: Carries = "all") -> Tensor:
    count = count_values(LAYOUT, mask.active if mask is not None else 0, carries)
    return ((torch.arange(count) * 37 % 101 - 40) / 96).float()


def order(mask: Mask, **more: object) -> Message:
    return Message("order", LAYOUT, (2, 70_000, 1), 5, 321, 77, mask=mask, values=values(mask), **more)  # type: ignore[arg-type]


def update(mask: Mask | None, carries: Carries = "all", **more: object) -> Message:
    return Message(
        "update", LAYOUT, (2, 3, 0), 2**40, 100, 9, mask=mask, values=values(mask, carries), carries=carries, **more
    )  # type: ignore[arg-type]


def written() -> dict[str, bytes]:
    """Each example as the codec writes it now."""
    counts = Message("update", LAYOUT, (1, 0, 0), 3, 50, counts=BASE.counts, metrics={"loss": -0.0, "steps": 3.0})
    some = values(DENSE)
    small = replace(update(DENSE), values=some * some * some)
    return {
        "order recipe fp32": encode(order(MADE, local=LOCAL), form="recipe").data,
        "order known fp32": encode(
            order(BASE, local=Local(), start=(1, 2, 3), own=NEAR.hash, extra={"a": EXTRA["votes"]}), (BASE,)
        ).data,
        "update rice fp32": encode(update(BASE, extra=EXTRA), form="rice").data,
        "update rice of a complement fp32": encode(update(DENSE, "weights"), form="rice").data,
        "update difference int8": encode(update(NEAR), (BASE,), Precision("int8"), form="difference").data,
        "update bitmap fp16": encode(update(BASE), (), Precision("fp16"), form="bitmap").data,
        "update known bf16": encode(update(BASE, "weights"), (BASE,), Precision("bf16")).data,
        "update of coded changes int4": encode(small, (BASE,), Precision("int4", "fp16", changes=True)).data,
        "update of coded changes int8": encode(small, (BASE,), Precision("int8", changes=True)).data,
        "update counts": encode(counts).data,
        "update statistics": encode(update(None, "statistics")).data,
        "lack": encode(Message("lack", LAYOUT, (1, 0, 1), 3, lacks=BASE.hash)).data,
    }
