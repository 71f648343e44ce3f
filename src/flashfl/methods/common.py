"""What several methods do alike."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real

from torch import Tensor

from ..core.errors import ConfigError
from ..core.layout import Layout
from ..core.method import sample
from ..core.rng import fold
from ..core.state import Client, Mask, Plan, State, Sums, Weights
from ..sparsity import PruneRegrow, random_mask, share_out, top_mask


def check_density(density: float) -> None:
    if not isinstance(density, Real) or not 0 < density <= 1:
        raise ConfigError(f"density = {density}: must be above 0 and at most 1 (0.05 keeps every twentieth weight)")


def check_shares(densities: Sequence[float], shares: Sequence[float]) -> None:
    if len(densities) != len(shares) or not densities:
        raise ConfigError(f"{len(densities)} densities but {len(shares)} shares of clients")
    if min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ConfigError(f"shares = {shares}: numbers of at least 0, and not all 0")
    for density in densities:
        check_density(density)


def check_rule(adapt: PruneRegrow) -> None:
    if nm := getattr(adapt, "nm", 0):
        raise ConfigError(f"adapt.nm = {nm}: an N:M pattern is the method's to set, by its own nm")


def warn_of_pattern(layout: Layout, budgets: Sequence[int], density: float, nm: int) -> None:
    """A pattern keeps at least one weight of each group, which may be far more than was asked for."""
    if (found := sum(budgets) / max(1, layout.prunable_size)) > 1.5 * density:
        warnings.warn(f"density {found:.3f}, not {density}: a pattern keeps at least 1 of {nm}", RuntimeWarning)


def share_densities(
    clients: Sequence[Client], densities: Sequence[float], shares: Sequence[float], key: int
) -> tuple[Client, ...]:
    """Give every client that states no density one of these, in these shares; refuse one that states another."""
    for c in clients:
        if c.density is not None and c.density not in densities:
            raise ConfigError(f"client {c.id} has density {c.density}; the method offers {tuple(densities)}")
    order = sorted((c for c in clients if c.density is None), key=lambda c: fold(key, "density", c.id))
    ends = [round(sum(shares[: i + 1]) / sum(shares) * len(order)) for i in range(len(shares))]
    given = {c.id: densities[next(i for i, end in enumerate(ends) if at < end)] for at, c in enumerate(order)}
    return tuple(replace(c, density=given.get(c.id, c.density)) for c in clients)


def sample_each_density(s: State, clients: Sequence[Client]) -> tuple[Client, ...]:
    """A round's cohort: the same share of the clients of every density, at least one of each if it is that large."""
    groups: dict[float, list[Client]] = {}
    for c in clients:
        groups.setdefault(c.density or 0.0, []).append(c)
    count = min(s.plan.per_round, len(clients))
    if count < len(groups):
        return sample(s, clients, count)
    sizes = [len(group) for group in groups.values()]
    each = list(share_out(sizes, sizes, count))
    while 0 in each:
        each[each.index(0)], each[each.index(max(each))] = 1, max(each) - 1
    picked = [c for (d, group), k in zip(groups.items(), each, strict=True) for c in sample(s, group, k, f"cohort {d}")]
    return tuple(sorted(picked, key=lambda c: c.id))


def inner_mask(s: State, full: Weights, budgets: tuple[int, ...], nm: int) -> Mask:
    """A mask of these budgets inside the mask of `full`: from the ranking that made it, by key or by magnitude."""
    if budgets == full.mask.counts:
        return full.mask
    if recipe := full.mask.recipe:
        return random_mask(s.layout, budgets, recipe.key, s.plan.device, nm)
    return top_mask(s.layout, full.vector, budgets, nm)


def keep_statistics(s: State, after: State, sums: Sums, masks: Mapping[str, Mask], whole: str) -> State:
    """`after` with the BatchNorm statistics of each of these models by itself: a sparser one's activations differ.

    Of one that has not been heard of they stay as they were in `s`. The server's own are those kept as `whole`, or the
    average over all models while there are none.
    """
    extra = dict(after.extra)
    for name, mask in masks.items():
        if mask.active in sums.statistics:
            old = s.kept(Tensor, name) if name in s.extra else after.weights.statistics
            extra[name] = sums.statistics_of(mask, old)
    after = replace(after, extra=extra)
    top = after.kept(Tensor, whole) if whole in extra else after.weights.statistics
    before = after.before and after.before.with_statistics(top)
    return replace(after, weights=after.weights.with_statistics(top), before=before)


def initial(plan: Plan, stage: int = 1) -> Tensor:
    """The model's initial weights on the plan's device; another stage draws others."""
    return plan.draw(fold(plan.key, "weights", stage)).to(plan.device)


def fresh(s: State, budgets: tuple[int, ...], mask_init: str, nm: int = 0) -> Weights:
    """A new start with these budgets: weights drawn anew, under a mask that is random or by their magnitude."""
    vector = initial(s.plan, stage=2)
    mask: Mask = (
        top_mask(s.layout, vector, budgets, nm)
        if mask_init == "magnitude"
        else random_mask(s.layout, budgets, s.key("mask"), s.plan.device, nm)
    )
    return Weights.masked(mask, vector)
