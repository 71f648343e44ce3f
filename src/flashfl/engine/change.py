"""How clients change the weights they were sent, and how far each goes along with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.client import reports_changes
from ..core.exchange import Local, Update
from ..core.layout import Layout
from ..core.mask import Mask, repack

_ROUNDING = 1e-12  # changes that cancel each other out up to this have no direction


@dataclass(frozen=True)
class Start:
    """The weights a client was sent, packed."""

    mask: Mask
    values: Tensor

    @staticmethod
    def of(update: Update, local: Local, mask: Mask, values: Tensor) -> Start | None:
        """Where an update's weights started from: 0 if they are changes already, None if it has none."""
        if local.report not in ("weights", "mask") or update.mask is None or update.values is None:
            return None
        if reports_changes(local.parts):
            return Start(update.mask, torch.zeros_like(update.values))
        if local.report == "mask":  # prunable weights are bits: the update has no values of them
            values = torch.cat([torch.zeros_like(values[: mask.active]), values[mask.active :]])
        return Start(mask, values)

    def change(self, update: Update) -> tuple[Tensor, Tensor]:
        """An update's weights before and after, packed, without statistics."""
        assert update.mask is not None
        assert update.values is not None
        before = repack(self.values, self.mask, update.mask)
        return before, update.values[: len(before)]


def agreeing(
    layout: Layout, starts: Mapping[int, Start], updates: Callable[[], Iterable[Update]], most: int
) -> Iterator[Update]:
    """The updates. Those that go against the others, further than `most` others do, are blended with them.

    How far a change goes along with the others is its length in the direction of their sum, below 0 if it goes against
    them. One that goes against them by half its length or more is replaced by a change as long in their direction. One
    that goes against them by less is blended in proportion. So it never gets longer.

    starts: what each client was sent. Updates of other clients stay as they are. `updates` is gone through three times.
    """
    total, k = torch.zeros(0), layout.prunable_size

    def change_of(update: Update) -> tuple[Tensor, Mask]:
        assert update.mask is not None
        before, after = starts[update.client].change(update)
        return (after - before).double(), update.mask

    for update in updates():
        if update.client in starts:
            change, mask = change_of(update)
            total = total if len(total) else change.new_zeros(layout.trained_size)
            total[:k].index_add_(0, mask.places, change[: mask.active], alpha=update.n)
            total[k:].add_(change[mask.active :], alpha=update.n)
    whole = float(total @ total)
    along: dict[int, tuple[float, float]] = {}  # client -> how far it goes along, length of the others' sum
    for update in updates():
        if update.client in starts:
            (change, mask), n = change_of(update), update.n
            dot, square = float(change @ torch.cat([total[mask.places], total[k:]])), float(change @ change)
            others = whole - 2 * n * dot + n * n * square  # the square of total - n * change
            length = others**0.5 if others > _ROUNDING * (whole + n * n * square) else 0.0
            along[update.client] = ((dot - n * square) / length if length else 0.0, length)
    least = min(0.0, sorted(far for far, _ in along.values())[most])
    for update in updates():
        far, length = along.get(update.client, (0.0, 0.0))
        if far < least and length and update.values is not None:
            change, mask = change_of(update)
            size = float(change.norm())
            share = min(1.0, 2 * (least - far) / size)
            direction = (torch.cat([total[mask.places], total[k:]]) - update.n * change) * (size / length)
            weights = update.values[: len(change)] + (share * (direction - change)).to(update.values.dtype)
            update = replace(update, values=torch.cat([weights, update.values[len(change) :]]))
        yield update
