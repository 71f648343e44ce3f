"""Layouts, masks and messages for the tests of the wire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from flashfl.core.exchange import Carries, Extra, Local
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Recipe
from flashfl.sparsity import recipe_mask
from flashfl.wire import Message

RESNET18 = (
    [(64, 3, 3, 3)]
    + [(64, 64, 3, 3)] * 4
    + [(128, 64, 3, 3), (128, 128, 3, 3), (128, 64, 1, 1)]
    + [(128, 128, 3, 3)] * 2
    + [(256, 128, 3, 3), (256, 256, 3, 3), (256, 128, 1, 1)]
    + [(256, 256, 3, 3)] * 2
    + [(512, 256, 3, 3), (512, 512, 3, 3), (512, 256, 1, 1)]
    + [(512, 512, 3, 3)] * 2
)


def small_layout(sizes: Sequence[int] = (40, 300, 0, 17)) -> Layout:
    return Layout.build(
        {
            "prunable": [(f"layer{i}.weight", (1, size)) for i, size in enumerate(sizes)],
            "dense": [("norm.weight", (5,)), ("fc.weight", (3, 4))],
            "statistic": [("norm.running_mean", (5,)), ("norm.running_var", (5,))],
        }
    )


def resnet_layout() -> Layout:
    norms = [shape[0] for shape in RESNET18]
    return Layout.build(
        {
            "prunable": [(f"conv{i}.weight", shape) for i, shape in enumerate(RESNET18)],
            "dense": [(f"norm{i}.{part}", (n,)) for i, n in enumerate(norms) for part in ("weight", "bias")]
            + [("fc.weight", (10, 512)), ("fc.bias", (10,))],
            "statistic": [(f"norm{i}.running_{part}", (n,)) for i, n in enumerate(norms) for part in ("mean", "var")],
        }
    )


def mask_of(layout: Layout, densities: Sequence[float], seed: int) -> Mask:
    """A mask with exactly rounded densities, layer by layer, and no recipe."""
    rng = np.random.default_rng(seed)
    bits = np.zeros(layout.prunable_size, bool)
    counts = []
    for layer, density in zip(layout.prunable, densities, strict=True):
        count = round(layer.size * density)
        bits[layer.start + rng.permutation(layer.size)[:count]] = True
        counts.append(count)
    return Mask(layout, torch.from_numpy(bits), tuple(counts))


def changed(mask: Mask, share: float, seed: int) -> Mask:
    """`share` of the active weights dropped, as many grown elsewhere in the same layer."""
    rng = np.random.default_rng(seed)
    bits = mask.bits.numpy().copy()
    for layer in mask.layout.prunable:
        part = bits[layer.start : layer.stop]
        on, off = np.flatnonzero(part), np.flatnonzero(~part)
        count = min(round(len(on) * share), len(off))
        part[rng.choice(on, count, replace=False)] = False
        part[rng.choice(off, count, replace=False)] = True
    return Mask(mask.layout, torch.from_numpy(bits), mask.counts)


def count_values(layout: Layout, active: int, carries: Carries) -> int:
    """How many values a message carries."""
    statistics, dense = layout.size - layout.trained_size, layout.trained_size - layout.prunable_size
    of = {"all": active + dense + statistics, "weights": active + dense, "statistics": statistics}
    return of.get(carries, dense + statistics)


def values_for(mask: Mask, carries: Carries = "all", seed: int = 0) -> torch.Tensor:
    count = count_values(mask.layout, mask.active, carries)
    return torch.from_numpy(np.abs(np.random.default_rng(seed).standard_normal(count)).astype(np.float32))


def update(mask: Mask, carries: Carries = "all", **more: object) -> Message:
    values = values_for(mask, carries)
    return Message("update", mask.layout, (2, 3, 0), 5, 100, 9, mask=mask, values=values, carries=carries, **more)  # type: ignore[arg-type]


def order(mask: Mask, local: Local | None = None, **more: object) -> Message:
    local = local or Local(lr=0.03, start=Recipe(11, mask.counts), keep=("mask",))
    values = values_for(mask, seed=1)
    return Message("order", mask.layout, (2, 3, 0), 5, key=77, local=local, mask=mask, values=values, **more)  # type: ignore[arg-type]


def samples(layout: Layout) -> list[tuple[Message, tuple[Mask, ...]]]:
    """One message of every kind and of every part, with the masks its receiver holds."""
    base = mask_of(layout, [0.2, 0.1, 0.0, 1.0][: len(layout.sizes)], 1)
    near = changed(base, 0.2, 2)
    dense = mask_of(layout, [0.9, 0.6, 1.0, 0.5][: len(layout.sizes)], 3)
    recipe = recipe_mask(layout, Recipe(123456789, base.counts))
    extra = {
        "grads": Extra("masked", torch.ones(near.active)),
        "scores": Extra("dense", torch.arange(6, dtype=torch.int64).view(2, 3)),
        "votes": Extra("bits", near.bits),
        "wanted": Extra("indices", near.bits),
        "weight": Extra("scalar", torch.tensor(2.5, dtype=torch.float64)),
    }
    return [
        (update(base), (base,)),
        (update(near, extra=extra, metrics={"loss": 0.5, "steps": 3.0}), (base,)),
        (update(dense, "weights"), ()),
        (order(recipe, start=(2, 1, 0), own=base.hash), ()),
        (order(base, Local(epochs=2)), ()),
        (Message("update", layout, (1, 0, 0), 3, 50, counts=base.counts, metrics={"loss": 1.0}), ()),
        (Message("update", layout, (1, 0, 0), 3, 50, values=values_for(base, "statistics"), carries="statistics"), ()),
        (Message("lack", layout, (1, 0, 1), 3, lacks=base.hash), ()),
    ]


@st.composite
def layouts(draw: st.DrawFn, least: int = 0) -> Layout:
    """Up to five prunable layers, some empty; `least` weights in all."""
    sizes = st.lists(st.integers(0, 200), min_size=0, max_size=5)
    return small_layout(draw(sizes.filter(lambda found: sum(found) >= least)))


@st.composite
def masks(draw: st.DrawFn, layout: Layout) -> Mask:
    """Any mask: each layer empty, full, sparse, dense or clustered."""
    bits = np.zeros(layout.prunable_size, bool)
    for layer in layout.prunable:
        seed, density = draw(st.integers(0, 2**20)), draw(st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.97, 1.0]))
        part = np.random.default_rng(seed).random(layer.size) < density
        if draw(st.booleans()):
            part.sort()
        bits[layer.start : layer.stop] = part
    return Mask(layout, torch.from_numpy(bits))
