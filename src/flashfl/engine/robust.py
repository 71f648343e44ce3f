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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..aggregate import add
from ..core.exchange import Sums, Update
from ..core.layout import Layout
from .change import Others
from .settings import EngineSettings

SAMPLES = 2  # a client counts as at most this many times the median of the cohort's samples
_CLIP = 2.0  # changes are at most this many times as long as the median
_TRIM = 0.2  # share of the samples whose statistics, counts and losses are dropped at either end
_FEW = 3  # fewer values than this cannot be trimmed
_SUSPICIOUS = 10.0  # changes longer than this many times the median are named
_STRETCH = 32 << 20  # numbers that are ranked at a time, over all clients


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


@dataclass
class Cohort:
    """The updates of one round. `see` each of them, then `add` them all."""

    robust: Robust
    folder: Path | None = None  # where a temporary file would be
    notes: dict[int, str] = field(default_factory=dict)  # client -> what was bounded by much
    _counts: dict[int, int] = field(default_factory=dict)  # client -> its samples
    # Name -> client -> a length: that of its extra of this name, or of the change of its weights if the name is empty.
    _norms: dict[str, dict[int, float]] = field(default_factory=dict)

    def see(self, update: Update) -> None:
        """An update, with its `start`."""
        self._counts[update.client] = update.n
        if self.robust.clip:
            # Whole numbers too, as the sender chooses the type. Only bits need no bound.
            tensors = {name: e.value + 0.0 for name, e in update.extra.items() if e.value.dtype != torch.bool}
            if (change := update.change) is not None:
                tensors[""] = change
            for name, x in tensors.items():
                norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
                self._norms.setdefault(name, {})[update.client] = norm

    def add(self, sums: Sums, updates: Iterable[Update]) -> None:
        """Bound and add the updates, in ascending client id. They are gone through up to three times."""
        layout, seen, told, rows = sums.layout, list[Update](), list[Told](), None
        for update in self._bounded(layout, updates):
            add(sums, update)
            seen.append(replace(update, mask=None, values=None))
            if update.mask is None or update.values is None:
                continue
            statistics = update.values[len(update.values) - (layout.size - layout.trained_size) :].clone()
            if self.robust.trim:
                rows = self._rows(layout.trained_size, statistics.device) if rows is None else rows
                _write(rows[len(told)], update)
            told.append(Told(update.n, update.mask.active, statistics))
        if rows is not None:
            _add_trimmed(sums, rows[: len(told)], _shares([one.n for one in told], rows), self.robust.trim)
        if sums.statistics and (self.robust.bounded or self.robust.trim):
            _bound_statistics(sums, told)
        if self.robust.bounded and seen:
            losses = torch.tensor([[update.metrics.get("loss", 0.0)] for update in seen], dtype=torch.float64)
            votes, shares = torch.tensor([u.counts for u in seen]), _shares([u.n for u in seen], losses)
            each = torch.ones_like(shares)
            sums.loss = sums.n * float(trimmed_mean(losses, shares, _cut(shares)))
            sums.counts = [round(vote) for vote in (trimmed_mean(votes, each, _cut(each)) * len(each)).tolist()]

    def _bounded(self, layout: Layout, updates: Iterable[Update]) -> Iterator[Update]:
        """The updates with bounded samples, changes and extras. Those that go against the others most are blended."""
        (shares, factors), others = self._bounds(), Others(layout)
        changes = factors.get("", {})
        blended = self.robust.bounded and len(changes) >= _FEW
        for look in (others.add, others.compare) if blended else ():
            for update in updates:
                look(update, shares[update.client], changes.get(update.client, 1.0))
        for update in updates:
            found = replace(update, n=shares[update.client])
            for name, mine in factors.items():
                found = _scaled(found, name, mine.get(update.client, 1.0))
            yield others.blend(found, max(1, int(_TRIM * len(changes)))) if blended else found

    def _bounds(self) -> tuple[dict[int, int], dict[str, dict[int, float]]]:
        """As how many samples each client counts, and by what its change ("") and its extras are multiplied."""
        counts = self._counts
        most = most_samples(counts.values()) if self.robust.bounded else max(counts.values(), default=0)
        shares = {client: min(n, most) for client, n in counts.items()}
        factors = {name: self._factors(name, shares) for name in sorted(self._norms)}
        for client, n in counts.items():
            if n > most:
                self.notes[client] = f"registered {n} samples, but counts as {most} (twice the median)"
        return shares, factors

    def _factors(self, name: str, shares: Mapping[int, int]) -> dict[int, float]:
        """Client -> by what to multiply its change, or its extra of this name.

        Both the change and what it adds to the sum (the change times the samples) are shortened to `clip` times their
        median. Then all are lengthened by the share of the samples that this took away: so the average does not move
        less because clients are unlike, or because one of them lies.
        """
        norms = self._norms[name]
        added = {client: shares[client] * norm for client, norm in norms.items()}
        median, clip = _median(norms.values()), self.robust.clip
        most, most_added = clip * median, clip * _median(added.values())
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
        again = sum(shares[client] for client in short) / sum(shares[client] * share for client, share in short.items())
        return {client: share * again for client, share in short.items()}

    def _rows(self, size: int, device: torch.device) -> Tensor:
        """Room for the weights of all clients: on a CPU in a file without a name."""
        if device.type != "cpu":
            return torch.empty((len(self._counts), size), device=device)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(len(self._counts), size)))


def most_samples(counts: Collection[int]) -> int:
    """As how many samples a client may count at most in a cohort of these."""
    return int(SAMPLES * _median(counts))


def _median(numbers: Collection[float]) -> float:
    """The lower median: of two numbers the smaller."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0.0


def _scaled(update: Update, name: str, factor: float) -> Update:
    """The update with an extra multiplied by `factor`, or the change of its weights if the name is empty."""
    if factor == 1:
        return update
    if name:
        extra = update.extra[name]
        return replace(update, extra={**update.extra, name: replace(extra, value=extra.value * factor)})
    assert update.start is not None
    assert update.values is not None
    weights, rest = update.values[: len(update.start)], update.values[len(update.start) :]
    return replace(update, values=torch.cat([update.start.lerp(weights, factor), rest]))


def _write(row: Tensor, update: Update) -> None:
    """Unpack the weights of an update; NaN where it holds none."""
    assert update.mask is not None
    assert update.values is not None
    active, k = update.mask.active, update.mask.layout.prunable_size
    row[:k] = torch.nan
    row[update.mask.places] = update.values[:active]
    row[k:] = update.values[active : active + len(row) - k]


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
    ranked, kept = _ranked(every, shares, _cut(shares))
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


def trimmed_mean(values: Tensor, shares: Tensor, trim: float) -> Tensor:
    """The weighted mean of each column without NaN, and without the share `trim` of the weight at either end."""
    ranked, kept = _ranked(values, shares, trim)
    total = kept.sum(0)
    return torch.where(total > 0, (ranked * kept).sum(0) / total, 0.0)


def _ranked(values: Tensor, shares: Tensor, trim: float) -> tuple[Tensor, Tensor]:
    """Each column in ascending order, NaN as 0, and the weight that trimming leaves to each of its values."""
    ranked, order = values.double().sort(0)  # NaN comes last
    weight = ~ranked.isnan() * shares.double()[:, None].expand_as(ranked).gather(0, order)
    below = weight.cumsum(0)
    # A little more than asked for: a rounding error times a huge number would be a large one. Half or more: the median.
    cut = min(trim + 1e-9 if trim else 0.0, 0.5 - 1e-6) * below[-1]
    kept = torch.minimum(below, below[-1] - cut) - torch.maximum(below - weight, cut)
    return ranked.nan_to_num(0.0), kept.clamp(min=0)
