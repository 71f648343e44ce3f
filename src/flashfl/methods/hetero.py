"""hetero-FLASH: clients of different densities, each training its sub-model of one nested family of masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from ..aggregate import Aggregator
from ..core.errors import ConfigError
from ..core.method import sample
from ..core.state import Client, Mask, State, Sums, Weights
from ..sparsity import nested, pattern_budgets, top_mask
from .common import check_shares, inner_mask, keep_statistics, sample_each_density, share_densities, warn_of_pattern
from .jmwst import JMWST
from .spdst import SPDST


@dataclass(frozen=True)
class _Hetero(SPDST):
    """A wrapper around a FLASH method: one nested mask per density, averaged over those who hold a weight.

    densities, shares: the density budgets and the share of clients that has each, for clients that state none.
    """

    densities: tuple[float, ...] = (0.1, 0.15, 0.2)
    shares: tuple[float, ...] = (0.3, 0.3, 0.4)
    density: float = field(default=0.0, metadata={"derived": True})  # the highest of `densities`; not to be set
    aggregator: Aggregator = "wfa"

    def __post_init__(self) -> None:
        check_shares(self.densities, self.shares)
        if self.density not in (0.0, max(self.densities)):
            raise ConfigError("a heterogeneous method takes `densities`, not `density`")
        object.__setattr__(self, "density", max(self.densities))
        super().__post_init__()

    def admit(self, clients: Sequence[Client], key: int) -> tuple[Client, ...]:
        return share_densities(clients, self.densities, self.shares, key)

    def cohort(self, s: State, clients: Sequence[Client]) -> tuple[Client, ...]:
        if s.stage == 1:
            return sample(s, [c for c in clients if c.density == self.density] or clients, self.warmup_clients)
        return sample_each_density(s, clients)

    def held(self, s: State, client: Client) -> Weights:
        return self.sub_model(s, client.density or self.density)

    def sub_model(self, s: State, density: float) -> Weights:
        return s.once(f"density {density}", lambda: self._part(s, density))

    def _part(self, s: State, density: float) -> Weights:
        model, own = s.weights.restrict(s.kept(Mask, f"mask {density}")), s.extra.get(f"statistics {density}")
        return model.with_statistics(own) if isinstance(own, Tensor) and density != self.density else model

    def begin(self, s: State, densities: Sequence[float]) -> State:
        start = super().begin(s, densities)
        budgets = self.budgets(s, densities)
        for density in set(self.densities) - {self.density}:
            warn_of_pattern(s.layout, budgets[density], density, self.nm)
        return replace(start, extra=self.masks(s, budgets, start.weights))

    def aggregate(self, s: State, sums: Sums) -> State:
        after = super().aggregate(s, sums)
        return self._stated(s, after, sums) if s.stage == 2 and s.plan.local.statistics else after

    def with_statistics(self, s: State, sums: Sums) -> State:
        return self._stated(s, super().with_statistics(s, sums), sums)

    def _stated(self, s: State, after: State, sums: Sums) -> State:
        masks = {f"statistics {d}": s.kept(Mask, f"mask {d}") for d in self.densities}
        return keep_statistics(s, after, sums, masks, f"statistics {self.density}")

    def budgets(self, s: State, densities: Sequence[float]) -> dict[float, tuple[int, ...]]:
        """What the layers of each density's model keep; under a pattern, whose rounding would add up, what they had."""
        if self.nm and s.stage == 2:
            return {d: s.kept(Mask, f"mask {d}").counts for d in self.densities}
        found = nested(s.layout, densities, self.densities)
        return {d: pattern_budgets(s.layout, budgets, self.nm) for d, budgets in found.items()}

    def masks(self, s: State, budgets: Mapping[float, tuple[int, ...]], full: Weights) -> dict[str, Mask]:
        """One mask per density, each inside the next."""
        return {f"mask {d}": inner_mask(s, full, b, self.nm) for d, b in budgets.items()}

    def views(self, s: State) -> Mapping[str, Weights]:
        parts = sorted(self.densities)[:-1] if s.stage == 2 else []
        return {**super().views(s), **{f"density {d}": self.sub_model(s, d) for d in parts}}


@dataclass(frozen=True)
class HeteroSPDST(_Hetero):
    """SPDST with nested frozen masks, one per density."""

    name: ClassVar[str] = "hetero-spdst"


@dataclass(frozen=True)
class HeteroJMWST(_Hetero, JMWST):
    """JMWST whose server cuts one sub-model per density out of the averaged model."""

    name: ClassVar[str] = "hetero-jmwst"

    def subsample(self, s: State, sums: Sums, mean: Weights) -> State:
        budgets = self.budgets(s, mean.mask.layer_densities)
        full = mean.restrict(top_mask(s.layout, mean.vector, budgets[self.density], self.nm))
        return s.next(full, before=mean, **self.masks(s, budgets, full))
