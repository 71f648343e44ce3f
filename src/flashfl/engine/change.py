"""How clients change the weights they were sent, and how far each goes along with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.client import reports_changes
from ..core.exchange import Local, Update
from ..core.layout import Layout
from ..core.mask import Mask

_ROUNDING = 1e-12  # changes that cancel each other out up to this have no direction


@dataclass(frozen=True)
class Start:
    """The weights a client was sent, packed."""

    mask: Mask
    values: Tensor

    @staticmethod
    def of(update: Update, local: Local, mask: Mask, packed: Callable[[], Tensor]) -> Start | None:
        """Where an update's weights started from: 0 if they are changes already, None if it has none."""
        if local.report not in ("weights", "mask") or update.mask is None or update.values is None:
            return None
        if reports_changes(local.parts):
            return Start(update.mask, torch.zeros_like(update.values))
        values = packed()
        if local.report == "mask":  # prunable weights are bits: the update has no values of them
            values = torch.cat([torch.zeros_like(values[: mask.active]), values[mask.active :]])
        return Start(mask, values)

    def change(self, update: Update) -> tuple[Tensor, Tensor]:
        """An update's weights before and after, packed, without statistics."""
        assert update.mask is not None
        assert update.values is not None
        before = self.under(update.mask)
        return before, update.values[: len(before)]

    def under(self, mask: Mask) -> Tensor:
        """The same weights packed under another mask, without statistics; a weight that was not sent is 0."""
        layout, a, b = mask.layout, mask.active, self.mask.active
        old = self.values[: b + layout.trained_size - layout.prunable_size]
        if mask.equal(self.mask):
            return old
        out = old.new_zeros(a + len(old) - b)
        out[:a][self.mask.bits[mask.places]] = old[:b][mask.bits[self.mask.places]]
        out[a:] = old[b:]
        return out


class Others:
    """For each client, the sum of the others' changes. `add` all updates, then `compare` them all, then `blend` them.

    How far a change goes along with the others is its length in the direction of their sum, below 0 if it goes against
    them.
    """

    def __init__(self, layout: Layout, starts: Mapping[int, Start]) -> None:
        """starts: what each client was sent. Updates of other clients stay as they are."""
        self.layout, self.starts = layout, starts
        self._total = torch.zeros(0)
        self._square: float | None = None  # of the sum, once all changes are in it
        self._along: dict[int, tuple[float, float]] = {}  # client -> how far it goes along, length of the others' sum

    def add(self, update: Update) -> None:
        """Add a change to the sum."""
        if update.client not in self.starts or update.mask is None:
            return
        change, active, k = self._change(update), update.mask.active, self.layout.prunable_size
        if not len(self._total):
            self._total = change.new_zeros(self.layout.trained_size)
        self._total[:k].index_add_(0, update.mask.places, change[:active], alpha=update.n)
        self._total[k:].add_(change[active:], alpha=update.n)

    def compare(self, update: Update) -> None:
        """Find how far a change goes along with the others."""
        if update.client not in self.starts:
            return
        change, total, n = self._change(update), self._sum(update), update.n
        dot, square = float(change @ total), float(change @ change)
        whole = self._square = float(self._total @ self._total) if self._square is None else self._square
        others = whole - 2 * n * dot + n * n * square  # the square of total - n * change
        length = others**0.5 if others > _ROUNDING * (whole + n * n * square) else 0.0
        self._along[update.client] = ((dot - n * square) / length if length else 0.0, length)

    def blend(self, update: Update, most: int) -> Update:
        """The update, blended with the others' direction if it goes against them, and further than `most` others do.

        One that goes against them by half its length or more is replaced by a change as long in their direction. One
        that goes against them by less is blended in proportion. So it never gets longer.
        """
        least = min(0.0, sorted(along for along, _ in self._along.values())[most])
        along, length = self._along.get(update.client, (0.0, 0.0))
        if along >= least or not length or update.values is None:
            return update
        change = self._change(update)
        size = float(change.norm())
        share = min(1.0, 2 * (least - along) / size)
        direction = (self._sum(update) - update.n * change) * (size / length)
        weights = update.values[: len(change)] + (share * (direction - change)).to(update.values.dtype)
        return replace(update, values=torch.cat([weights, update.values[len(change) :]]))

    def _change(self, update: Update) -> Tensor:
        before, after = self.starts[update.client].change(update)
        return (after - before).double()

    def _sum(self, update: Update) -> Tensor:
        """The sum of all changes where a client has weights, packed."""
        assert update.mask is not None
        return torch.cat([self._total[update.mask.places], self._total[self.layout.prunable_size :]])
