"""Robust sums: a few clients that lie cannot move the model far, whatever they send.

Nobody is judged. Each number that a client adds to the sums has a bound, and the bound comes from the cohort:

- A client counts as at most twice the median of the cohort's samples.
- A change of the weights is shortened to twice the median length, and so is what it adds to the sum: this length times
  the client's samples. The same holds for every extra tensor.
- A change that goes against those of the others, further than a fifth of the cohort does, is blended with theirs: the
  further, the more. A client may differ from the others, but it cannot undo what they learn.
- Of BatchNorm statistics, layer counts and losses, a fifth of the samples is dropped at either end before averaging;
  more in small cohorts, so that any one client can be dropped as a whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..aggregate import add, ranked_shares, trimmed_mean
from ..core.exchange import Sums, Update
from ..core.layout import Layout
from ..core.mask import Mask, repacked
from .settings import EngineSettings

SAMPLES = 2  # a client counts as at most this many times the median of the cohort's samples
_CLIP = 2.0  # changes are at most this many times as long as the median
_TRIM = 0.2  # share of the samples whose statistics, counts and losses are dropped at either end
_FEW = 3  # fewer values than this cannot be trimmed
_SUSPICIOUS = 10.0  # changes longer than this many times the median are named
_ROUNDING = 1e-12  # changes that cancel each other out up to this have no direction
_STRETCH = 32 << 20  # numbers that are ranked at a time, over all clients
_CHANGE = ""  # the name of a change among those of extras, which are not empty
_PART = 1 << 16  # numbers of a change that a CPU works on at a time: they stay in its cache


@dataclass(frozen=True)
class Robust:
    """How the updates of a cohort are bounded.

    bounded: bound samples, statistics, layer counts and losses. clip: shorten changes of the weights, and extras, to
    this many times the cohort's median; 0: never. trim: of each weight, drop this share of the samples at either end;
    0: none.
    """

    bounded: bool = False
    clip: float = 0.0
    trim: float = 0.0

    @staticmethod
    def of(config: EngineSettings) -> Robust:
        """What a run's settings ask for. Unless they say otherwise, changes are clipped at twice the median."""
        bounded = config.robust == "on"
        return Robust(bounded, config.clip or (_CLIP if bounded and not config.trim else 0.0), config.trim)


PLAIN = Robust()


class Told(NamedTuple):
    """The statistics of a model."""

    n: int
    active: int
    statistics: Tensor


def add_bounded(sums: Sums, updates: Iterable[Update], robust: Robust, folder: Path | None = None) -> dict[int, str]:
    """Bound and add the updates of a cohort: client -> what was bounded by much.

    updates: in ascending client id, with their `start`. They are gone through up to four times. folder: where a
    temporary file would be.
    """
    bounds = Bounds(updates, robust)
    layout, seen, told, rows = sums.layout, list[Update](), list[Told](), None
    for update in _bounded(layout, updates, bounds, robust.bounded):
        add(sums, update)
        seen.append(replace(update, mask=None, values=None, extra={}, start=None))  # tensors may wait in a file
        if update.mask is None or update.values is None:
            continue
        statistics = update.values[len(update.values) - (layout.size - layout.trained_size) :].clone()
        if robust.trim:
            if rows is None:
                rows = _rows(len(bounds.samples), layout.trained_size, statistics.device, folder)
            _write(rows[len(told)], update.mask, update.values)
        told.append(Told(update.n, update.mask.active, statistics))
    if rows is not None:
        _add_trimmed(sums, rows[: len(told)], _shares([one.n for one in told], rows), robust.trim)
    if sums.statistics and (robust.bounded or robust.trim):
        _bound_statistics(sums, told)
    if robust.bounded and seen:
        losses = torch.tensor([[update.metrics.get("loss", 0.0)] for update in seen], dtype=torch.float64)
        votes, shares = torch.tensor([u.counts for u in seen]), _shares([u.n for u in seen], losses)
        each = torch.ones_like(shares)
        sums.loss = sums.n * float(trimmed_mean(losses, shares, _cut(shares)))
        sums.counts = [round(vote) for vote in (trimmed_mean(votes, each, _cut(each)) * len(each)).tolist()]
    return bounds.notes


class Bounds:
    """As how many samples each client of a cohort counts, and by what its change and its extras are multiplied.

    `lengths` are those of changes that have been multiplied by their factor, `changes`.
    """

    def __init__(self, updates: Iterable[Update], robust: Robust) -> None:
        counts: dict[int, int] = {}
        norms: dict[str, dict[int, float]] = {}  # name -> client -> a length
        for update in updates:
            counts[update.client] = update.n
            for name, norm in _norms(update) if robust.clip else ():
                norms.setdefault(name, {})[update.client] = norm
        most = most_samples(counts.values()) if robust.bounded and counts else max(counts.values(), default=0)
        self.samples = {client: min(n, most) for client, n in counts.items()}
        self.notes: dict[int, str] = {}  # client -> what is bounded by much
        self.factors = {name: self._factors(name, norms[name], robust.clip) for name in sorted(norms)}
        self.changes = self.factors.get(_CHANGE, {})
        self.lengths = {client: norms[_CHANGE][client] * factor for client, factor in self.changes.items()}
        for client, n in counts.items():
            if n > most:
                self.notes[client] = f"registered {n} samples, but counts as {most} (twice the median)"

    def _factors(self, name: str, norms: Mapping[int, float], clip: float) -> dict[int, float]:
        """Client -> by what to multiply its change, or its extra of this name.

        Both the change and what it adds to the sum (the change times the samples) are shortened to `clip` times their
        median. Then all are lengthened by the share of the samples that this took away: so the average does not move
        less because clients are unlike, or because one of them lies.
        """
        samples, median = self.samples, median_low(norms.values())
        added = {client: samples[client] * norm for client, norm in norms.items()}
        most, most_added = clip * median, clip * median_low(added.values())
        short = {
            client: min(most / max(norm, most), most_added / max(added[client], most_added)) if norm else 1.0
            for client, norm in norms.items()
        }
        for client, norm in norms.items():
            if norm > _SUSPICIOUS * median:
                what = f"its {name!r}" if name else "its change"
                times = (
                    f"{norm / median:.3g} times as long as the cohort's median"
                    if median
                    else "not 0, while the cohort's median is 0"
                )
                self.notes[client] = f"{what} is {times}; it is scaled down"
        again = sum(samples[client] for client in short) / sum(samples[c] * share for c, share in short.items())
        return {client: share * again for client, share in short.items()}


def _norms(update: Update) -> Iterator[tuple[str, float]]:
    """The lengths of an update's extras and of its change."""
    for name, extra in update.extra.items():
        # Whole numbers too, as the sender chooses the type. Only bits need no bound.
        if extra.value.dtype != torch.bool:
            yield name, float(torch.linalg.vector_norm(extra.value + 0.0, dtype=torch.float64))
    if update.start is not None:
        yield _CHANGE, sum(float(change @ change) for _, change in _change(update)) ** 0.5


def _bounded(layout: Layout, updates: Iterable[Update], bounds: Bounds, blends: bool) -> Iterator[Update]:
    """The updates with bounded samples, changes and extras. Those that go against the others most are blended."""
    others, blends = Others(layout, bounds), blends and len(bounds.changes) >= _FEW
    for look in (others.add, others.compare) if blends else ():
        for update in updates:
            look(update)
    for update in updates:
        found = replace(update, n=bounds.samples[update.client])
        for name, mine in bounds.factors.items():
            found = _scaled(found, name, mine.get(update.client, 1.0))
        yield others.blend(found, max(1, int(_TRIM * len(bounds.changes)))) if blends else found


def _rows(count: int, size: int, device: torch.device, folder: Path | None) -> Tensor:
    """Room for the weights of all clients: on a CPU in a file without a name."""
    if device.type != "cpu":
        return torch.empty((count, size), device=device)
    with tempfile.TemporaryFile(dir=folder) as file:
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(count, size)))


class Others:
    """For each client, the sum of the others' changes. `add` all updates, then `compare` them all, then `blend` them.

    How far a change goes along with the others is its length in the direction of their sum, below 0 if it goes against
    them. Changes count with their bounds; `blend` takes updates that have been bounded.
    """

    def __init__(self, layout: Layout, bounds: Bounds) -> None:
        self.layout, self.bounds = layout, bounds
        self._mask: Mask | None = None  # of the sum: that of all updates if they have one mask, else the full mask
        self._total = torch.zeros(0)  # packed
        self._square: float | None = None  # of the sum, once all changes are in it
        self._along: dict[int, tuple[float, float]] = {}  # client -> how far it goes along, length of the others' sum

    def add(self, update: Update) -> None:
        """Add a change to the sum, as many times as its client has samples."""
        mask, k = update.mask, self.layout.prunable_size
        if update.start is None or mask is None:
            return
        times = self.bounds.samples[update.client] * self.bounds.changes[update.client]
        if self._mask is None:
            self._mask, self._total = mask, torch.zeros_like(update.start, dtype=torch.float64)
        if self._mask.equal(mask):
            for span, change in _change(update):
                self._total[span].add_(change, alpha=times)
            return
        if self._mask.active < k:
            full = Mask.full(self.layout, update.start.device)
            self._mask, self._total = full, repacked(self._total, self._mask, full)
        places = torch.cat([mask.places, torch.arange(k, len(self._total), device=mask.places.device)])
        for span, change in _change(update):
            self._total.index_add_(0, places[span], change, alpha=times)

    def compare(self, update: Update) -> None:
        """Find how far a change goes along with the others."""
        if update.start is None:
            return
        total, client = self._sum(update), update.client
        dot = self.bounds.changes[client] * sum(float(change @ total[span]) for span, change in _change(update))
        n, square = self.bounds.samples[client], self.bounds.lengths[client] ** 2
        whole = self._square = float(self._total @ self._total) if self._square is None else self._square
        others = whole - 2 * n * dot + n**2 * square  # the square of total - n * change
        length = others**0.5 if others > _ROUNDING * (whole + n**2 * square) else 0.0
        self._along[client] = ((dot - n * square) / length if length else 0.0, length)

    def blend(self, update: Update, most: int) -> Update:
        """The update, blended with the others' direction if it goes against them, and further than `most` others do.

        One that goes against them by half its length or more is replaced by a change as long in their direction. One
        that goes against them by less is blended in proportion. So it never gets longer.
        """
        least = min(0.0, sorted(along for along, _ in self._along.values())[most])
        along, length = self._along.get(update.client, (0.0, 0.0))
        if along >= least or not length or update.values is None:
            return update
        total, values, size = self._sum(update), update.values.clone(), self.bounds.lengths[update.client]
        share = min(1.0, 2 * (least - along) / size)
        for span, change in _change(update):
            direction = (total[span] - update.n * change) * (size / length)
            values[span] += (share * (direction - change)).to(values.dtype)
        return replace(update, values=values)

    def _sum(self, update: Update) -> Tensor:
        """The sum of all changes where a client has weights, packed."""
        assert self._mask is not None
        assert update.mask is not None
        return repacked(self._total, self._mask, update.mask)


def _change(update: Update) -> Iterator[tuple[slice, Tensor]]:
    """How the weights of an update changed, in double precision: a part at a time, with its place."""
    values, start = update.values, update.start
    if values is None or start is None:
        return
    part = _PART if start.device.type == "cpu" else len(start)
    for at in range(0, len(start), part):
        span = slice(at, min(at + part, len(start)))
        yield span, (values[span] - start[span]).double()


def most_samples(counts: Collection[int]) -> int:
    """As how many samples a client may count at most in a cohort of these."""
    return int(SAMPLES * median_low(counts))


def _scaled(update: Update, name: str, factor: float) -> Update:
    """The update with an extra multiplied by `factor`, or the change of its weights if the name is empty."""
    if factor == 1:
        return update
    if name:
        extra = update.extra[name]
        return replace(update, extra={**update.extra, name: replace(extra, value=extra.value * factor)})
    assert update.start is not None
    assert update.values is not None
    values = update.values.clone()
    torch.lerp(update.start, values[: len(update.start)], factor, out=values[: len(update.start)])
    return replace(update, values=values)


def _write(row: Tensor, mask: Mask, values: Tensor) -> None:
    """Unpack the weights of an update; NaN where it holds none."""
    active, k = mask.active, mask.layout.prunable_size
    row[:k] = torch.nan
    row[mask.places] = values[:active]
    row[k:] = values[active : active + len(row) - k]


def _add_trimmed(sums: Sums, rows: Tensor, shares: Tensor, trim: float) -> None:
    """Replace the sums of weights by those of trimmed means.

    A sum is the mean times its holders' samples. So an average over holders (`wfa`) is the trimmed mean itself, and
    `fedavg` still counts clients that do not hold a weight as holding zero.
    """
    most = max(1, _STRETCH // len(rows))
    for at in range(0, rows.shape[1], most):
        values = rows[:, at : at + most]
        held = (~values.isnan() * shares[:, None]).sum(0)
        sums.flat()[0][at : at + values.shape[1]] = trimmed_mean(values, shares, trim) * held


def _bound_statistics(sums: Sums, told: Sequence[Told]) -> None:
    """Replace the sums of statistics by those of trimmed means: of all models, and of those of each density."""
    every = torch.stack([one.statistics for one in told])
    shares = _shares([one.n for one in told], every)
    ranked, kept = ranked_shares(every, shares, _cut(shares))
    low = torch.where(kept > 0, ranked, torch.inf).amin(0)
    high = torch.where(kept > 0, ranked, -torch.inf).amax(0)
    sums.flat()[0][sums.layout.trained_size :] = trimmed_mean(every, shares, _cut(shares)) * shares.sum()
    for active in sums.statistics:
        mine = torch.tensor([one.active == active for one in told], device=every.device)
        some, n = every[mine], shares[mine]
        mean = trimmed_mean(some.double().clamp(low, high) if len(some) < _FEW else some, n, _cut(n))
        sums.statistics[active] = torch.cat([mean * n.sum(), n.sum()[None]])


def _shares(counts: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(counts, dtype=torch.float64, device=like.device)


def _cut(shares: Tensor) -> float:
    """How much to trim at either end: enough to drop the client with the most samples; nothing of one or two."""
    return max(_TRIM, float(shares.max() / shares.sum())) if len(shares) >= _FEW else 0.0
