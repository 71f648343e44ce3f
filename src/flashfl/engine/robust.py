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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..aggregate import add
from ..core.client import reports_changes
from ..core.exchange import Local, Sums, Update
from ..core.layout import Layout
from ..core.mask import Mask, repack
from .settings import EngineSettings
from .trim import FEW, TRIM, Told, add_trimmed, bound_statistics, cut_of, trimmed_mean, weights_of, write

SAMPLES = 2  # a client counts as at most this many times the median of the cohort's samples
_CLIP = 2.0  # changes are at most this many times as long as the median
_SUSPICIOUS = 10.0  # changes longer than this many times the median are named
_ROUNDING = 1e-12  # changes that cancel each other out up to this have no direction


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

    @property
    def needs_cohort(self) -> bool:
        """Whether updates can be added only once the whole cohort is known."""
        return self != PLAIN


PLAIN = Robust()


@dataclass(frozen=True)
class _Seen:
    """What is remembered of an update until the cohort is known."""

    n: int
    start: tuple[Mask, Tensor] | None  # the weights that the client was sent, packed; None: it trained none
    norms: dict[str, float] = field(default_factory=dict)  # of the change of the weights (""), and of extras by name


@dataclass
class Cohort:
    """The updates of one round. `see` each of them, then `add` them all."""

    robust: Robust
    folder: Path | None = None  # where a temporary file would be
    notes: dict[int, str] = field(default_factory=dict)  # client -> what was bounded by much
    _seen: dict[int, _Seen] = field(default_factory=dict)

    def see(self, update: Update, local: Local, mask: Mask, values: Tensor) -> None:
        """An update that answers an order of this work, with these packed values under this mask."""
        seen = self._seen[update.client] = _Seen(update.n, _start(update, local, mask, values))
        if self.robust.clip:
            # Whole numbers too, as the sender chooses the type. Only bits need no bound.
            tensors = {name: e.value + 0.0 for name, e in update.extra.items() if e.value.dtype != torch.bool}
            if seen.start is not None:
                before, after = self._weights(update)
                tensors[""] = after - before
            for name, value in tensors.items():
                seen.norms[name] = float(torch.linalg.vector_norm(value, dtype=torch.float64))

    def _weights(self, update: Update) -> tuple[Tensor, Tensor]:
        """An update's weights before and after training, packed, without statistics."""
        start = self._seen[update.client].start
        assert start is not None
        assert update.mask is not None
        assert update.values is not None
        before = repack(start[1], start[0], update.mask)
        return before, update.values[: len(before)]

    def add(self, sums: Sums, updates: Iterable[Update]) -> None:
        """Bound and add the updates, in ascending client id. They are gone through up to three times."""
        layout, seen, told, rows = sums.layout, list[Update](), list[Told](), None
        for update in self._agreeing(layout, lambda: self._bounded(updates)):
            add(sums, update)
            seen.append(replace(update, mask=None, values=None))
            if update.mask is None or update.values is None:
                continue
            statistics = update.values[len(update.values) - (layout.size - layout.trained_size) :].clone()
            if self.robust.trim:
                rows = self._rows(layout.trained_size, statistics.device) if rows is None else rows
                write(rows[len(told)], update)
            told.append(Told(update.n, update.mask.active, statistics))
        if rows is not None:
            add_trimmed(sums, rows[: len(told)], weights_of([one.n for one in told], rows), self.robust.trim)
        if sums.statistics and (self.robust.bounded or self.robust.trim):
            bound_statistics(sums, told)
        if self.robust.bounded and seen:
            losses = torch.tensor([[update.metrics.get("loss", 0.0)] for update in seen], dtype=torch.float64)
            votes, shares = torch.tensor([u.counts for u in seen]), weights_of([u.n for u in seen], losses)
            each = torch.ones_like(shares)
            sums.loss = sums.n * float(trimmed_mean(losses, shares, cut_of(shares)))
            sums.counts = [round(vote) for vote in (trimmed_mean(votes, each, cut_of(each)) * len(each)).tolist()]

    def _bounded(self, updates: Iterable[Update]) -> Iterator[Update]:
        """The updates with bounded samples, changes and extras."""
        counts = {client: seen.n for client, seen in self._seen.items()}
        most = most_samples(counts.values()) if self.robust.bounded else max(counts.values(), default=0)
        shares = {client: min(n, most) for client, n in counts.items()}
        names = sorted({name for seen in self._seen.values() for name in seen.norms})
        factors = {name: self._factors(name, shares) for name in names}
        for update in updates:
            client = update.client
            if counts[client] > most:
                self.notes[client] = f"registered {counts[client]} samples and counts as {most}, twice the median"
            update = replace(update, n=shares[client])
            for name in self._seen[client].norms:
                update = self._scaled(update, name, factors[name][client])
            yield update

    def _scaled(self, update: Update, name: str, factor: float) -> Update:
        """The update with an extra multiplied by `factor`, or the change of its weights if the name is empty."""
        if factor == 1:
            return update
        if name or update.values is None:
            extra = update.extra[name]
            return replace(update, extra={**update.extra, name: replace(extra, value=extra.value * factor)})
        before, after = self._weights(update)
        return replace(update, values=torch.cat([before.lerp(after, factor), update.values[len(before) :]]))

    def _agreeing(self, layout: Layout, updates: Callable[[], Iterable[Update]]) -> Iterator[Update]:
        """The bounded updates. Those that go furthest against the others, a fifth at most, are blended with theirs.

        How far a change goes along with the others is its length in the direction of their sum, below 0 if it goes
        against them. One that goes against them by half its length or more is replaced by a change as long in their
        direction. One that goes against them by less is blended in proportion. So it never gets longer.
        """
        clients = {client for client, seen in self._seen.items() if seen.start is not None}
        if not (self.robust.bounded and self.robust.clip and len(clients) >= FEW):
            yield from updates()
            return
        total, k = torch.zeros(0), layout.prunable_size
        for update in updates():
            if update.client in clients and update.mask is not None:
                change, active = self._change(update), update.mask.active
                total = total if len(total) else change.new_zeros(layout.trained_size)
                total[:k].index_add_(0, update.mask.places, change[:active], alpha=update.n)
                total[k:].add_(change[active:], alpha=update.n)
        whole = float(total @ total)
        along: dict[int, tuple[float, float]] = {}  # client -> how far it goes along, length of the others' sum
        for update in updates():
            if update.client in clients:
                change, n = self._change(update), update.n
                dot, square = float(change @ _under(total, update)), float(change @ change)
                others = whole - 2 * n * dot + n * n * square  # the square of total - n * change
                length = others**0.5 if others > _ROUNDING * (whole + n * n * square) else 0.0
                along[update.client] = ((dot - n * square) / length if length else 0.0, length)
        most = max(1, int(TRIM * len(clients)))  # clients that go least along with the others
        least = min(0.0, sorted(far for far, _ in along.values())[most])
        for update in updates():
            far, length = along.get(update.client, (0.0, 0.0))
            if far < least and length and update.values is not None:
                change = self._change(update)
                size = float(change.norm())
                direction = (_under(total, update) - update.n * change) * (size / length)
                blended = min(1.0, 2 * (least - far) / size) * (direction - change)
                weights = update.values[: len(change)] + blended.to(update.values.dtype)
                update = replace(update, values=torch.cat([weights, update.values[len(change) :]]))
            yield update

    def _change(self, update: Update) -> Tensor:
        before, after = self._weights(update)
        return (after - before).double()

    def _factors(self, name: str, shares: Mapping[int, int]) -> dict[int, float]:
        """Client -> by what to multiply its change, or its extra of this name.

        Both the change and what it adds to the sum (the change times the samples) are shortened to `clip` times their
        median. Then all are lengthened by the share of the samples that this took away: so the average does not move
        less because clients are unlike, or because one of them lies.
        """
        norms = {client: seen.norms[name] for client, seen in self._seen.items() if name in seen.norms}
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
                    f"{norm / median:.3g} times as long as the cohort's median" if median else "not 0, as the median is"
                )
                self.notes[client] = f"{what} is {times}; it is shortened"
        again = sum(shares[client] for client in short) / sum(shares[client] * share for client, share in short.items())
        return {client: share * again for client, share in short.items()}

    def _rows(self, size: int, device: torch.device) -> Tensor:
        """Room for the weights of all clients: on a CPU in a file without a name."""
        if device.type != "cpu":
            return torch.empty((len(self._seen), size), device=device)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(len(self._seen), size)))


def _start(update: Update, local: Local, mask: Mask, values: Tensor) -> tuple[Mask, Tensor] | None:
    """Where an update's weights started from: 0 if they are changes already, None if it has none."""
    if local.report not in ("weights", "mask") or update.mask is None or update.values is None:
        return None
    if reports_changes(local.parts):
        return update.mask, torch.zeros_like(update.values)
    if local.report == "mask":  # prunable weights are bits: the update has no values of them
        values = torch.cat([torch.zeros_like(values[: mask.active]), values[mask.active :]])
    return mask, values


def _under(total: Tensor, update: Update) -> Tensor:
    """The sum of all changes where a client has weights, packed."""
    assert update.mask is not None
    return torch.cat([total[update.mask.places], total[update.mask.layout.prunable_size :]])


def most_samples(counts: Collection[int]) -> int:
    """As how many samples a client may count at most in a cohort of these."""
    return int(SAMPLES * _median(counts))


def _median(numbers: Collection[float]) -> float:
    """The lower median: of two numbers the smaller."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0.0
