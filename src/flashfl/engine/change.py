"""How clients change the weights they were sent, and how far each goes along with the others."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..core.client import reports_changes
from ..core.exchange import Local, Update
from ..core.layout import Layout
from ..core.mask import Mask, repacked

_ROUNDING = 1e-12  # changes that cancel each other out up to this have no direction


def start_of(update: Update, local: Local, mask: Mask, values: Tensor) -> Tensor | None:
    """`Update.start` for an update whose order has these packed values under `mask`; None if it has no weights."""
    if local.report not in ("weights", "mask") or update.mask is None or update.values is None:
        return None
    layout = update.mask.layout
    if reports_changes(local.parts):
        start = torch.zeros_like(update.values)
    else:
        start = values
        if local.report == "mask":  # prunable weights are bits: the update has no values of them
            start = torch.cat([torch.zeros_like(start[: mask.active]), start[mask.active :]])
        start = repacked(start, mask, update.mask)
    return start[: len(start) - (layout.size - layout.trained_size)]


class Others:
    """For each client, the sum of the others' changes. `add` all updates, then `compare` them all, then `blend` them.

    How far a change goes along with the others is its length in the direction of their sum, below 0 if it goes against
    them. Changes are counted `factor` times; `blend` takes updates whose change has been multiplied by it.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._mask: Mask | None = None  # of the sum: that of all updates if they have one mask, else the full mask
        self._total = torch.zeros(0)  # packed
        self._square: float | None = None  # of the sum, once all changes are in it
        self._along: dict[int, tuple[float, float]] = {}  # client -> how far it goes along, length of the others' sum

    def add(self, update: Update, n: int, factor: float) -> None:
        """Add a change to the sum, `n` times."""
        change, mask, k = update.change, update.mask, self.layout.prunable_size
        if change is None or mask is None:
            return
        if self._mask is None:
            self._mask, self._total = mask, torch.zeros_like(change, dtype=torch.float64)
        if self._mask.equal(mask):
            self._total.add_(change, alpha=n * factor)
            return
        full = Mask.full(self.layout, change.device)
        self._mask, self._total = full, repacked(self._total, self._mask, full)
        self._total.index_add_(0, mask.places, change[: mask.active].double(), alpha=n * factor)
        self._total[k:].add_(change[mask.active :], alpha=n * factor)

    def compare(self, update: Update, n: int, factor: float) -> None:
        """Find how far a change goes along with the others."""
        if (change := update.change) is None:
            return
        change, weight = change.double(), n * factor
        dot, square = float(change @ self._sum(update)), float(change @ change)
        whole = self._square = float(self._total @ self._total) if self._square is None else self._square
        others = whole - 2 * weight * dot + weight**2 * square  # the square of total - weight * change
        length = others**0.5 if others > _ROUNDING * (whole + weight**2 * square) else 0.0
        self._along[update.client] = (factor * (dot - weight * square) / length if length else 0.0, length)

    def blend(self, update: Update, most: int) -> Update:
        """The update, blended with the others' direction if it goes against them, and further than `most` others do.

        One that goes against them by half its length or more is replaced by a change as long in their direction. One
        that goes against them by less is blended in proportion. So it never gets longer.
        """
        least = min(0.0, sorted(along for along, _ in self._along.values())[most])
        along, length = self._along.get(update.client, (0.0, 0.0))
        if along >= least or not length or update.values is None or (change := update.change) is None:
            return update
        change = change.double()
        size = float(change.norm())
        share = min(1.0, 2 * (least - along) / size)
        direction = (self._sum(update) - update.n * change) * (size / length)
        weights = update.values[: len(change)] + (share * (direction - change)).to(update.values.dtype)
        return replace(update, values=torch.cat([weights, update.values[len(change) :]]))

    def _sum(self, update: Update) -> Tensor:
        """The sum of all changes where a client has weights, packed."""
        assert self._mask is not None
        assert update.mask is not None
        return repacked(self._total, self._mask, update.mask)
