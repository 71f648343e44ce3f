"""hetero-FLASH: clients of different densities, each training its part of one nested family of masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..aggregate import Aggregator
from ..core.errors import ConfigError
from ..core.exchange import Client, Sums
from ..core.mask import Mask, Weights
from ..core.state import State
from ..sparsity import nested, pattern_budgets, random_mask, top_mask
from .common import Nested, check_shares, share_densities, warn_of_pattern
from .jmwst import JMWST
from .spdst import SENSITIVITY, SPDST


@dataclass(frozen=True)
class HeteroSPDST(Nested, SPDST):
    """SPDST for clients with different budgets: one frozen mask for each density.

    The first phase runs on clients of the highest density. Then the server ranks the weights and gives each density a
    mask. A smaller mask is part of the larger ones (Algorithm 2). The server averages each weight over the clients that
    have it (Algorithm 3, weightedFedAvg). Each density has its own BatchNorm statistics.

    Bytes: as SPDST at each client's own density.
    When: clients differ in bandwidth and must not move masks. hetero-JMWST is more accurate (LOG.md).
    Not to be confused with HeteroFL or FjORD, which remove whole channels from the model.

    densities: the densities of clients, such as 0.1,0.2. A client may also state its own. shares: the share of clients
    with each density, such as 0.3,0.7. density: the highest of `densities`. Leave it out. The other settings are
    SPDST's.
    """

    name: ClassVar[str] = "hetero-spdst"
    densities: tuple[float, ...] = (0.1, 0.15, 0.2)
    shares: tuple[float, ...] = (0.3, 0.3, 0.4)
    density: float = field(default=0.0, metadata={"derived": True})  # the highest of `densities`
    aggregator: Aggregator = "wfa"

    def __post_init__(self) -> None:
        check_shares(self.densities, self.shares)
        if self.density not in (0.0, max(self.densities)):
            raise ConfigError(f"density = {self.density}: {self.name} takes `densities` instead")
        object.__setattr__(self, "density", max(self.densities))
        super().__post_init__()

    @property
    def common(self) -> bool:
        return False

    @property
    def sizes(self) -> tuple[float, ...]:
        return self.densities

    def admit(self, clients: Sequence[Client], key: int) -> tuple[Client, ...]:
        return share_densities(clients, self.densities, self.shares, key)

    def cohort(self, s: State, clients: Sequence[Client]) -> tuple[Client, ...]:
        if s.phase == SENSITIVITY:
            return s.sample([c for c in clients if c.density == self.density] or clients, self.warmup_clients)
        return super().cohort(s, clients)

    def models(self, s: State, clients: Sequence[Client]) -> Iterator[tuple[Client, Weights]]:
        return SPDST.models(self, s, clients) if s.phase == SENSITIVITY else super().models(s, clients)

    def begin(self, s: State, densities: Sequence[float]) -> State:
        start = super().begin(s, densities)
        budgets = self.budgets(s, densities)
        for density in set(self.densities) - {self.density}:
            warn_of_pattern(s.layout, budgets[density], density, self.nm)
        return replace(start, extra=self.masks(s, budgets, start.weights))

    def aggregate(self, s: State, sums: Sums) -> State:
        after = super().aggregate(s, sums)
        return after if s.phase == SENSITIVITY or not s.plan.local.statistics else self.keep_statistics(s, after, sums)

    def budgets(self, s: State, densities: Sequence[float]) -> dict[float, tuple[int, ...]]:
        """Layer budgets of each density. Under a pattern they stay what they were, as its rounding would add up."""
        if self.nm and s.phase != SENSITIVITY:
            return {d: s.kept(Mask, f"mask {d}").counts for d in self.densities}
        found = nested(s.layout, densities, self.densities)
        return {d: pattern_budgets(s.layout, budgets, self.nm) for d, budgets in found.items()}

    def masks(self, s: State, budgets: Mapping[float, tuple[int, ...]], full: Weights) -> dict[str, Mask]:
        """One mask per density, each inside the next, by the ranking that made the mask of `full`."""

        def inner(counts: tuple[int, ...]) -> Mask:
            if counts == full.mask.counts:
                return full.mask
            if recipe := full.mask.recipe:
                return random_mask(s.plan, counts, recipe.key, self.nm)
            return top_mask(s.layout, full.vector, counts, self.nm)

        return {f"mask {d}": inner(counts) for d, counts in budgets.items()}

    def views(self, s: State) -> Mapping[str, Weights]:
        parts = [] if s.phase == SENSITIVITY else sorted(self.densities)[:-1]
        return {**super().views(s), **{f"density {d}": self.sub_model(s, d) for d in parts}}


@dataclass(frozen=True)
class HeteroJMWST(HeteroSPDST, JMWST):
    """JMWST for clients with different budgets: one moving mask for each density.

    The server averages each weight over the clients that have it. Then it ranks the weights of each layer by magnitude.
    Each density gets the largest weights, so a smaller mask is part of the larger ones (Algorithms 2 and 4).

    Bytes: as JMWST at each client's own density.
    When: clients differ in bandwidth. On CIFAR-10 it reached 85.88 %, and hetero-SPDST 84.06 % (LOG.md).
    Not to be confused with hetero-SPDST, whose masks are frozen.
    """

    name: ClassVar[str] = "hetero-jmwst"

    def subsample(self, s: State, sums: Sums, mean: Weights) -> State:
        budgets = self.budgets(s, mean.mask.layer_densities)
        full = mean.restrict(top_mask(s.layout, mean.vector, budgets[self.density], self.nm))
        return s.next(full, before=mean, **self.masks(s, budgets, full))
