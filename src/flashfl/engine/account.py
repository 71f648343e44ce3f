"""What one round costs and what its updates add up to."""

from __future__ import annotations

from ..core.exchange import Outcome, Sums, Tag, Traffic
from ..core.mask import Mask
from .memory import ClientMemory, Kept
from .robust import Cohort, Robust


class Account:
    """The account of one round, from the first order to the sums of the accepted updates.

    An engine reports each order by `sent`, each answer by `received` and each client that gives none by `failed`. Then
    `close` settles the round. `Encoding` makes real bytes; `Counting` works out on the device what they would take.
    """

    def __init__(self, memory: ClientMemory, robust: Robust) -> None:
        memory.begin()
        self.memory, self.layout = memory, memory.layout
        self.cohort = Cohort(robust, memory.store.folder) if robust.needs_cohort else None
        self.traffic = Traffic()
        self.failures: dict[int, str] = {}
        self.sums = Sums(self.layout, counts=[0] * len(self.layout.prunable))
        self._accepted: dict[int, tuple[Tag, Kept, Kept | None]] = {}

    def accepted(self, client: int, tag: Tag, order: Mask, own: Mask | None) -> None:
        """A client's update is good, unless it fails later. `own`: the mask that the client keeps, if any."""
        kept = None if own is None else self.memory.keep(own, own=True)
        self._accepted[client] = (tag, self.memory.keep(order), kept)

    def failed(self, client: int, why: str) -> None:
        """A client is dropped from this round."""
        self.failures[client] = why
        self._accepted.pop(client, None)

    def close(self) -> Outcome:
        """What the round came to. Only now clients are known to hold what this round gave them."""
        for client, (tag, order, own) in sorted(self._accepted.items()):
            self.memory.accept(client, tag, order, own)
        return Outcome(self.sums, self.traffic, dict(sorted(self.failures.items())))
