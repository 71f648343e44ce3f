"""How many weights each layer keeps: exact integer budgets from real-valued wishes, computed on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ..core.errors import ConfigError, check_range, unknown
from ..core.layout import Layout


def share_out(wishes: Sequence[float], caps: Sequence[int], total: int) -> tuple[int, ...]:
    """`total` units in proportion to `wishes`, at most `caps` each, summing exactly to `total`.

    All wishes are scaled by one factor; whoever would pass its cap is filled and the rest is rescaled until nobody
    passes; fractions are settled by largest remainder, the earlier of equals first. Where wishes run out (all zero)
    what is left goes in proportion to the room that is left. All in whole numbers: no rounding surprises.
    """
    if not 0 <= total <= sum(caps):
        raise ValueError(f"total = {total}: must lie between 0 and the sum of caps, {sum(caps)}")
    want = _whole(wishes)
    given, rest = [0] * len(caps), [0] * len(caps)  # whole units, and the remainders over one common divisor
    open_, left = [i for i, cap in enumerate(caps) if cap > 0], total
    while left > 0 and open_:
        if not any(want[i] for i in open_):
            want = list(caps)
        wanted = sum(want[i] for i in open_)
        full = [i for i in open_ if want[i] * left >= caps[i] * wanted]
        for i in full or open_:
            given[i], rest[i] = (caps[i], 0) if full else divmod(want[i] * left, wanted)
        if not full:
            break
        left -= sum(caps[i] for i in full)
        open_ = [i for i in open_ if i not in full]
    for i in sorted(range(len(caps)), key=lambda i: (-rest[i], i))[: total - sum(given)]:
        given[i] += 1
    return tuple(given)


def _whole(wishes: Sequence[float]) -> list[int]:
    """Whole numbers in exactly the proportions of some floats, each of which is a whole number over a power of two."""
    ratios = [w.as_integer_ratio() for w in wishes]
    common = max((below for _, below in ratios), default=1)
    return [above * (common // below) for above, below in ratios]


def weight_budget(layout: Layout, density: float) -> int:
    """round(d * K): how many prunable weights a model of this density has."""
    check_range("(0, 1]", density=density)
    total = round(density * layout.prunable_size)
    if total < 1 and layout.prunable_size:
        raise ConfigError(
            f"density = {density} keeps none of the model's {layout.prunable_size} prunable weights: raise it to "
            f"{1 / layout.prunable_size:.2g} or more"
        )
    return total


def calibrate(
    layout: Layout, densities: Sequence[float], density: float, caps: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Layer budgets for which layer densities have the proportions of `densities`.

    The budgets add up to exactly round(density * K), where K is the number of prunable weights (Eq. 3).
    """
    wishes = [rho * k for rho, k in zip(densities, layout.sizes, strict=True)]
    return share_out(wishes, caps if caps is not None else layout.sizes, weight_budget(layout, density))


def nested(layout: Layout, densities: Sequence[float], targets: Sequence[float]) -> dict[float, tuple[int, ...]]:
    """Layer budgets for several densities. A smaller mask fits into the larger ones."""
    budgets: dict[float, tuple[int, ...]] = {}
    caps: Sequence[int] = layout.sizes
    for target in sorted(set(targets), reverse=True):
        caps = budgets[target] = calibrate(layout, densities, target, caps)
    return budgets


ERK_PLUS_SMALL, ERK_PLUS_FLOOR = 10_000, 0.2


def _uniform(layout: Layout, density: float) -> list[float]:
    return [1.0] * len(layout.prunable)


def _erk(layout: Layout, density: float) -> list[float]:
    return [sum(layer.shape) / layer.size for layer in layout.prunable]


def _erk_plus(layout: Layout, density: float) -> list[float]:
    """ERK, but layers of at most 10,000 weights get a density of at least 0.2 before all are scaled to the total."""
    budgets = calibrate(layout, _erk(layout, density), density)
    floors = [ERK_PLUS_FLOOR if k <= ERK_PLUS_SMALL else 0.0 for k in layout.sizes]
    return [max(b / k, floor) for b, k, floor in zip(budgets, layout.sizes, floors, strict=True)]


Allocation = Literal["uniform", "erk", "erk+"]
ALLOCATIONS: dict[str, Callable[[Layout, float], list[float]]] = {
    "uniform": _uniform,
    "erk": _erk,
    "erk+": _erk_plus,
}


def allocate(layout: Layout, allocation: str, density: float) -> tuple[int, ...]:
    """Exact layer budgets. allocation: `uniform`, `erk` (small layers are denser) or `erk+`."""
    if allocation not in ALLOCATIONS:
        raise unknown("allocation", allocation, ALLOCATIONS)
    return calibrate(layout, ALLOCATIONS[allocation](layout, density), density)
