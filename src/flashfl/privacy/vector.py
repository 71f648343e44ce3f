"""What a client reports in a private round, as one vector of whole numbers that can be added up in Z/2^b.

The vector holds changes against the model that was sent: active weights, dense weights, BatchNorm statistics. Behind
them stand the training loss, the number of samples and the number of clamped values. Changes, statistics and loss are
multiplied by the number of samples, so that sums give averages. Each section has one scale. Rounding is random and
unbiased. Values beyond a section's declared range are clamped, and counted.

Under differential privacy the changes are clipped together to one length instead. All clients weigh alike. Loss,
samples and clamped values are not reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..aggregate import add_statistics
from ..core.errors import ConfigError, check_range
from ..core.exchange import Local, Sums, Update
from ..core.layout import Layout
from ..core.mask import Weights
from ..core.rng import fold, uniform
from .noise import LARGEST

_PART = 1 << 20  # values rounded at a time: in double precision they need room
_ROOM = 12.0  # standard deviations of noise that must fit into the numbers
_EXACT = 52  # bits that double precision holds exactly


@dataclass(frozen=True)
class Ranges:
    """The largest values that clients report in private rounds; what lies beyond is clamped. They are public."""

    weights: float = 1.0  # private rounds: larger changes of prunable weights are cut to this
    dense: float = 4.0  # private rounds: larger changes of other weights are cut to this
    statistics: float = 64.0  # private rounds: larger changes of BatchNorm statistics are cut to this
    samples: int = 4096  # private rounds: a client counts as at most this many samples
    loss: float = 64.0  # private rounds: larger losses are cut to this

    def __post_init__(self) -> None:
        for name in ("weights", "dense", "statistics", "samples", "loss"):
            if not 0 < getattr(self, name) <= 2**24:
                raise ConfigError(f"ranges.{name} = {getattr(self, name)}: must be above 0 and at most 2^24")

    @property
    def of_changes(self) -> tuple[float, float, float]:
        return self.weights, self.dense, self.statistics


@dataclass(frozen=True)
class Noise:
    """Differential privacy of one release. clip: the longest change of a client. multiplier: of `clip`, the noise."""

    clip: float
    multiplier: float

    def __post_init__(self) -> None:
        check_range("(0, inf)", clip=self.clip, noise=self.multiplier)

    def deviation(self, scale: float, length: int, honest: int = 1) -> int:
        """The standard deviation of one share of noise, as a whole number, if `honest` shares are added up.

        Rounding moves each of `length` values by less than 1, so a clipped change may get longer by its root.
        """
        return math.ceil(self.multiplier * (scale * self.clip + math.sqrt(length)) / math.sqrt(honest))


@dataclass(frozen=True)
class Section:
    """Some consecutive numbers with one scale."""

    name: str
    start: int
    stop: int
    scale: float  # a power of 2, so that multiplying is exact
    range: float  # before scaling


@dataclass(frozen=True)
class Packing:
    """How the reports of one round become whole numbers: the same for all its clients.

    active: weights in the common mask. cohort: no more clients than this are added up. honest: of whom so many are
    sure to add their share of the noise (1: the server adds all of it). planned: what sums are divided by under
    differential privacy (0: the cohort).
    """

    layout: Layout
    local: Local
    active: int
    cohort: int
    ranges: Ranges = field(default_factory=Ranges)
    noise: Noise | None = None
    honest: int = 1
    planned: int = 0

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        made, at = [], 0
        for name, length, limit, whole in self._parts():
            if length:
                made.append(Section(name, at, at + length, 1.0 if whole else self._scale(limit, length), limit))
                at += length
        return tuple(made)

    @property
    def length(self) -> int:
        return self.sections[-1].stop

    @cached_property
    def bits(self) -> int:
        """32, or 64 if sums could overflow: each section needs 20 bits for a client's values, or its whole range."""
        whole = max([limit for _, length, limit, exact in self._parts() if exact and length] or [0])
        return 32 if self.cohort * max(whole + 1, 2.0**19) < 2.0**31 else 64

    @cached_property
    def _changed(self) -> tuple[int, int, int]:
        """How many changes of active weights, of dense weights and of statistics are reported."""
        layout, report = self.layout, self.local.report
        statistics = layout.size - layout.trained_size
        if report == "weights":
            dense = layout.trained_size - layout.prunable_size
            return self.active, dense, statistics if self.local.statistics else 0
        return 0, 0, statistics if report == "statistics" else 0

    @property
    def _span(self) -> slice:
        """Which of the packed values these are."""
        first = self.active + self.layout.trained_size - self.layout.prunable_size
        start = first if self.local.report == "statistics" else 0
        return slice(start, start + sum(self._changed))

    def _parts(self) -> Iterator[tuple[str, int, float, bool]]:
        """The name, length and range of each section, and whether its values are whole numbers."""
        layout, ranges, report = self.layout, self.ranges, self.local.report
        if self.noise is not None:
            if report == "counts":
                raise ConfigError(
                    "under differential privacy, clients cannot report layer counts, because noise cannot hide them. "
                    "Set warmup_clients = 0, or use pdst with allocation = 'erk'."
                )
            yield "changes", sum(self._changed), self.noise.clip, False
            return
        n = float(ranges.samples)
        for name, length, limit in zip(
            ("weights", "dense", "statistics"), self._changed, ranges.of_changes, strict=True
        ):
            yield name, length, n * limit, False
        if report == "counts":
            yield "counts", len(layout.prunable), float(max(layout.sizes, default=0)), True
        yield "loss", 1, n * ranges.loss, False
        yield "samples", 1, n, True
        yield "clamped", 1, 2.0**19, True

    def _scale(self, limit: float, length: int) -> float:
        """The largest power of 2 with which neither the sum nor its noise can overflow, nor noise be too large."""
        total, most = self.cohort * limit, 2.0**_EXACT
        if self.noise is not None:
            total += _ROOM * self.noise.multiplier * limit * math.sqrt(self.cohort / self.honest)
            most = max(1.0, LARGEST / self.noise.multiplier - math.sqrt(length) - 1)  # see Noise.deviation
        # Rounding adds less than 1 to each client's number.
        room = math.log2(min((2.0 ** (self.bits - 1) - 2 * self.cohort) / total, most / limit))
        if self.noise is None and room + math.log2(limit) < 8:
            raise ConfigError(
                f"{self.cohort} clients a round are too many: in sums of {self.bits}-bit integers, each value would "
                "have less than 8 bits. Lower per_round."
            )
        return 2.0 ** math.floor(room)

    @property
    def deviation(self) -> int:
        """The standard deviation of each share of the noise, in whole numbers; 0: no noise."""
        return 0 if self.noise is None else self.noise.deviation(self.sections[0].scale, self.length, self.honest)

    def encode(self, update: Update, start: Tensor, key: int) -> Tensor:
        """A client's report as int64. start: the packed values it was sent. key: of the rounding."""
        values, clamped = self._values(update, start)
        out, chance = torch.empty(self.length, dtype=torch.int64, device=values.device), fold(key, "fixed point")
        for section in self.sections:
            for at in range(section.start, section.stop, _PART):
                part = values[at : min(at + _PART, section.stop)].double() * section.scale
                drawn = uniform(fold(chance, at), len(part), values.device)
                out[at : at + len(part)] = torch.floor(part + drawn)
        if self.noise is None:
            out[-1] = min(clamped, 2**19 - 1)
        return out

    def _values(self, update: Update, start: Tensor) -> tuple[Tensor, int]:
        """The vector before scaling, and how many of its values were clamped."""
        ranges = self.ranges
        change = start.new_zeros(0) if update.values is None else (update.values - start)[self._span]
        if self.noise is not None:
            length = torch.linalg.vector_norm(change, dtype=torch.float64)
            # A change that overflows has no direction: it counts as none.
            return (change.double() * (self.noise.clip / length.clamp(min=self.noise.clip))).nan_to_num(nan=0.0), 0
        n = min(update.n, ranges.samples)
        parts = change.split(self._changed)
        held = [part.clamp(-limit, limit) for part, limit in zip(parts, ranges.of_changes, strict=True)]
        loss = update.metrics.get("loss", 0.0)
        clamped = sum(int((a != b).sum()) for a, b in zip(parts, held, strict=True))
        clamped += (n != update.n) + (abs(loss) > ranges.loss)
        counts = update.counts if self.local.report == "counts" else ()
        rest = [*counts, n * max(-ranges.loss, min(loss, ranges.loss)), n, 0]
        behind = torch.tensor(rest, dtype=torch.float64, device=change.device)
        return torch.cat([*(part.double() * n for part in held), behind]), clamped

    def problem(self, total: Tensor, clients: int) -> str:
        """Why so many clients within the declared ranges cannot have this sum; empty if they can.

        This is all that a server can check in a secure round.
        """
        for s in self.sections:
            part, most = total[s.start : s.stop].double(), clients * (s.scale * s.range + 1)
            if self.noise is None:
                found, low = float(part.abs().max()), s.name == "samples" and float(part[0]) < clients
            else:  # the length of all changes; if everybody's share of noise comes, up to three times its variance
                found, low, root = float(part.norm()), False, math.sqrt(self.length)
                spread = math.sqrt(3) * self.noise.deviation(s.scale, self.length)
                most += clients * root + spread * (root + _ROOM)
            if found > most or low:
                return (
                    f"the sum of '{s.name}' is {found / s.scale:.4g}, which {clients} correct clients cannot have. At "
                    "least one of them is faulty or lies; the sum does not show which"
                )
        return ""

    def decode(self, total: Tensor, start: Weights, clients: int) -> tuple[Sums, int]:
        """The sums of a round from those of its vectors (int64), and how many values clients clamped.

        Under differential privacy the denominator is fixed, whoever dropped out.
        """
        layout, values = self.layout, [total[s.start : s.stop].double() / s.scale for s in self.sections]
        found = {s.name: part for s, part in zip(self.sections, values, strict=True)}
        n = (self.planned or self.cohort) if self.noise is not None else int(found["samples"])
        sums = Sums(layout, n=n, clients=clients, counts=[0] * len(layout.prunable))
        sums.loss = float(found["loss"]) if "loss" in found else math.nan
        if self.local.report == "counts":
            sums.counts = [int(count) for count in found["counts"]]
        else:
            self._add(sums, torch.cat(values)[: sum(self._changed)], start)
        return sums, int(found.get("clamped", 0))

    def _add(self, sums: Sums, change: Tensor, start: Weights) -> None:
        """Add n times the model that was sent, and what clients changed."""
        packed = start.packed().double()
        summed = torch.zeros_like(packed)
        summed[self._span] = packed[self._span] * sums.n + change
        total = Weights.unpack(start.mask, summed).vector
        for layer in self.layout.of_kind("statistic"):  # rounding and noise must not make a variance negative
            if layer.name.rsplit(".", 1)[-1] == "running_var":
                total[layer.span].clamp_(min=0.0)
        weights, holders = sums.flat(total.device)
        weights.copy_(total)
        holders += start.mask.bits * sums.n
        if self.local.report == "weights":
            sums.counts = [count * sums.clients for count in start.mask.counts]
        if self._changed[-1]:
            add_statistics(sums, start.mask.active, total[self.layout.trained_size :], sums.n)
