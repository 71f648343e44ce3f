"""What several methods do alike."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..aggregate import fedavg, union
from ..core.client import Clients, Field, Part, Rows
from ..core.errors import ConfigError, check_range, warn
from ..core.exchange import Client, Sums
from ..core.layout import Layout
from ..core.mask import Mask, Weights
from ..core.method import Method
from ..core.rng import fold
from ..core.state import Plan, State
from ..sparsity import PruneRegrow, share_out


@dataclass(frozen=True)
class AddedUp(Part):
    """Adds up something about every prunable weight, active or not, over the steps and reports it as `name`."""

    name: ClassVar[str] = ""

    def amount(self, weights: Tensor, gradient: Tensor) -> Tensor:
        """What one step adds, from the prunable weights and their gradient [rows, columns]."""
        raise NotImplementedError

    def reports(self, layout: Layout) -> Mapping[str, Field]:
        return {self.name: Field("dense", layout.prunable_size)}

    def begin(self, c: Clients) -> None:
        c.state[self.name] = c.start.new_zeros(len(c.start), c.layout.prunable_size)

    def before(self, r: Rows, gradient: Tensor) -> None:
        total = r.state[self.name]
        k = total.shape[1]
        total.add_(self.amount(r.weights[:, :k], gradient[:, :k]))

    def finish(self, c: Clients) -> None:
        c.report[self.name] = c.state[self.name]


def check_density(density: float) -> None:
    check_range("(0, 1]", "0.05 keeps 5 % of the weights", density=density)


@dataclass(frozen=True)
class WithDensity(Method):
    """The base of methods with a density. By default, they start from a dense model."""

    density: float = 0.05

    def __post_init__(self) -> None:
        check_density(self.density)

    def init(self, plan: Plan) -> State:
        return State(plan, Weights.dense(plan.layout, plan.initial()), self.phases[0])


def check_rule(adapt: PruneRegrow) -> None:
    if not isinstance(adapt, PruneRegrow):
        raise ConfigError(
            f"adapt = {adapt!r}: must be a PruneRegrow, such as PruneRegrow(rate=0.25), or derived from it"
        )
    if adapt.nm:
        raise ConfigError(f"adapt.nm = {adapt.nm}: set the method's own `nm` instead")


def warn_of_pattern(layout: Layout, budgets: Sequence[int], density: float, nm: int) -> None:
    """Warn if a pattern, which keeps at least one weight of each group, gives far more than was asked for."""
    if (found := sum(budgets) / max(1, layout.prunable_size)) > 1.5 * density:
        warn(
            f"the density is {found:.3f} instead of {density}: nm = {nm} keeps at least 1 of every {nm} weights. Raise "
            "nm, or set nm = 0 for no pattern"
        )


def follow(s: State, sums: Sums) -> Tensor:
    """The server's vector after a round in which clients reported changes: w + mean change. Statistics are averaged."""
    mean, trained = fedavg(sums), s.layout.trained_size
    return torch.cat([s.weights.vector[:trained] + mean[:trained], mean[trained:]])


def where_held(s: State, sums: Sums, mean: Tensor) -> Tensor:
    """An average in which a weight that no client of the round held keeps the server's value."""
    k = s.layout.prunable_size
    mean[:k] = torch.where(union(sums).bits, mean[:k], s.weights.vector[:k])
    return mean


@dataclass(frozen=True)
class Nested(Method):
    """The base of methods with nested parts. The density of a client names its part.

    `State.extra` holds the mask of each part and, as smaller models have other activations, its BatchNorm statistics.
    """

    @property
    def sizes(self) -> tuple[float, ...]:
        """The densities that name the parts. The largest is the server's whole model."""
        raise NotImplementedError

    def cohort(self, s: State, clients: Sequence[Client]) -> tuple[Client, ...]:
        """The same share of the clients of every density, at least one of each if there is room."""
        groups: dict[float, list[Client]] = {}
        for c in clients:
            groups.setdefault(c.density or 0.0, []).append(c)
        count = min(s.plan.per_round, len(clients))
        if count < len(groups):
            return s.sample(clients, count)
        sizes = [len(group) for group in groups.values()]
        each = list(share_out(sizes, sizes, count))
        while 0 in each:
            each[each.index(0)], each[each.index(max(each))] = 1, max(each) - 1
        pairs = zip(groups.items(), each, strict=True)
        picked = [c for (density, group), k in pairs for c in s.sample(group, k, f"cohort {density}")]
        return tuple(sorted(picked, key=lambda c: c.id))

    def models(self, s: State, clients: Sequence[Client]) -> Iterator[tuple[Client, Weights]]:
        made: dict[float, Weights] = {}
        for client in clients:
            size = client.density or max(self.sizes)
            if size not in made:
                made[size] = self.sub_model(s, size)
            yield client, made[size]

    def sub_model(self, s: State, size: float) -> Weights:
        """The part of the model for clients of this density, with its own statistics."""
        model = s.weights.restrict(s.kept(Mask, f"mask {size}"))
        return model.with_statistics(s.kept(Tensor, f"statistics {size}", model.statistics))

    def with_statistics(self, s: State, sums: Sums) -> State:
        return self.keep_statistics(s, super().with_statistics(s, sums), sums)

    def keep_statistics(self, s: State, after: State, sums: Sums) -> State:
        """`after` with the statistics that clients reported on each part.

        A part nobody reported on keeps its own. The server's model uses those of the largest part, or the average over
        all models while there are none.
        """
        extra = dict(after.extra)
        for size in self.sizes:
            name, mask = f"statistics {size}", s.kept(Mask, f"mask {size}")
            if mask.active in sums.statistics:
                extra[name] = sums.statistics_of(mask, s.kept(Tensor, name, after.weights.statistics))
        after = replace(after, extra=extra)
        top = after.kept(Tensor, f"statistics {max(self.sizes)}", after.weights.statistics)
        before = after.before and after.before.with_statistics(top)
        return replace(after, weights=after.weights.with_statistics(top), before=before)


def check_shares(densities: Sequence[float], shares: Sequence[float]) -> None:
    if len(densities) != len(shares) or not densities:
        raise ConfigError(
            f"the method has {len(densities)} densities (or widths), but `shares` has {len(shares)} numbers: set "
            "shares to one number for each, such as shares = (0.5, 0.5) for two"
        )
    if min(shares) < 0 or not abs(sum(shares) - 1) < 1e-6:
        raise ConfigError(f"shares = {tuple(shares)}: must be numbers of at least 0 that add up to 1")
    for density in densities:
        check_density(density)


def share_densities(
    clients: Sequence[Client], densities: Sequence[float], shares: Sequence[float], key: int
) -> tuple[Client, ...]:
    """Give every client that states no density one of these, in these shares. Refuse a client that states another."""
    for c in clients:
        if c.density is not None and c.density not in densities:
            raise ConfigError(
                f"client {c.id} states density {c.density}: must be one of the method's, {tuple(densities)}. Change "
                "the method's `densities` (`widths` of fjord and heterofl), or the client's density."
            )
    order = sorted((c for c in clients if c.density is None), key=lambda c: fold(key, "density", c.id))
    ends = [round(sum(shares[: i + 1]) / sum(shares) * len(order)) for i in range(len(shares))]
    given = {c.id: densities[bisect_right(ends, at)] for at, c in enumerate(order)}
    return tuple(replace(c, density=given.get(c.id, c.density)) for c in clients)
