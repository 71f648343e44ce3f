"""What one round costs and what its updates add up to."""

from __future__ import annotations

from dataclasses import replace

from ..core.exchange import Client, Order, Outcome, Sums, Tag, Traffic
from ..core.mask import Mask
from ..core.precision import EXACT, Precision
from ..sparsity import recipe_mask
from .memory import ClientMemory, Kept
from .robust import PLAIN, Cohort, Robust


class Account:
    """The account of one round, from the first order to the sums of the accepted updates.

    An engine reports each order by `sent`, each answer by `received` and each client that gives none by `failed`. Then
    `close` settles the round. `Encoding` makes real bytes; `Counting` works out on the device what they would take.
    """

    def __init__(self, memory: ClientMemory, values: Precision = EXACT, robust: Robust = PLAIN) -> None:
        """values: how the values of orders travel."""
        self.memory, self.layout, self.values, self.robust = memory, memory.layout, values, robust
        # Without a cohort, updates are added as they come.
        self.cohort = Cohort(robust, memory.store.folder) if robust != PLAIN else None
        self.traffic = Traffic()
        self.failures: dict[int, str] = {}
        self.sums = Sums(self.layout, counts=[0] * len(self.layout.prunable))
        self._accepted: dict[int, tuple[Tag, Kept, Kept | None, Kept | None]] = {}

    def personal(self, client: Client, order: Order) -> Order:
        """The order as it is sent. A personal one has only the weights that the client's own mask covers.

        A client whose mask is no longer known here is sent the whole model, and covers it itself.
        """
        if not order.local.personal:
            return order
        own, start = self.memory.own(client.id), order.local.start
        fresh = "mask" not in order.local.keep or self.memory.start(client.id) is None
        if own is None and start is not None and fresh:
            own = recipe_mask(self.layout, start, order.weights.vector.device)
        return order if own is None else replace(order, weights=order.weights.restrict(own))

    def accepted(self, client: int, tag: Tag, order: Mask, own: Mask | None, notes: Kept | None = None) -> None:
        """A client's update is good, unless it fails later. own, notes: what the client keeps, if anything."""
        kept = None if own is None else self.memory.keep(own, own=True)
        self._accepted[client] = (tag, self.memory.keep(order), kept, notes)

    def failed(self, client: int, why: str) -> None:
        """A client is dropped from this round."""
        self.failures[client] = why
        self._accepted.pop(client, None)

    def close(self) -> Outcome:
        """What the round came to. Only now clients are known to hold what this round gave them."""
        for client, held in sorted(self._accepted.items()):
            self.memory.accept(client, *held)
        return Outcome(self.sums, self.traffic, dict(sorted(self.failures.items())))
