"""What an engine that plays all clients keeps for them between rounds, and how a checkpoint names it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..core.errors import FlashError
from ..core.mask import Mask
from ..wire import ServerLedger
from .client import Memory
from .store import MaskStore


class HasLedger(Protocol):
    ledger: ServerLedger


class Memories:
    """Each client's last rounds, as hashes of masks that lie in a store."""

    def __init__(self, store: MaskStore, owner: HasLedger) -> None:
        self.store, self.owner = store, owner
        self.clients: dict[int, Memory] = {}
        self._marked: tuple[ServerLedger, dict[int, Memory]] | None = None
        self._before: tuple[ServerLedger, dict[int, Memory]] | None = None
        self._pinned: set[str] = set()
        self._rounds = 0

    def update(self, new: Mapping[int, Memory]) -> None:
        """A round is over; now and then what nobody needs any more is dropped."""
        self.clients.update(new)
        self._rounds += 1
        if self._rounds % 10 == 0:
            self.store.keep_only(self._pinned | self.held())

    def snapshot(self) -> None:
        """The run's state is now as far as these memories: `save` gives them as they are now, until the next one.

        A run that is interrupted in the middle of a round is saved as it was before it.
        """
        self._marked = (self.owner.ledger.snapshot(), dict(self.clients))

    def begin(self) -> None:
        """A round begins that may have to be undone."""
        self._before = (self.owner.ledger.snapshot(), dict(self.clients))

    def rollback(self) -> None:
        """As if the last round had never been."""
        assert self._before is not None
        ledger, clients = self._before
        self.clients, self.owner.ledger = dict(clients), ledger.snapshot()

    def held(self) -> set[str]:
        return _hashes(self.clients) | _hashes(self._marked[1] if self._marked else {})

    def save(self, clients: Mapping[int, Memory] | None = None) -> dict[str, Any]:
        """What a checkpoint must hold beside the state: JSON that names masks in the store."""
        ledger, marked = self._marked or (self.owner.ledger, self.clients)
        clients = marked if clients is None else clients
        record, tensors = ledger.state()
        # One mask at a time: all of them together, at a byte a weight, may not fit.
        history = {name: self.store.put(Mask.unpack(self.store.layout, t.numpy())) for name, t in tensors.items()}
        masks = sorted({*history.values(), *_hashes(clients)})
        self.store.flush(masks)
        return {
            "clients": {str(c): m for c, m in clients.items()},
            "ledger": record,
            "history": history,
            "masks": masks,
        }

    def load(self, memory: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        """Take over what `save` gave; if a mask is lost, real clients are sent full ones again."""
        self._marked = None
        self.clients = {
            int(c): [(tuple(tag), order, own) for tag, order, own in rounds] for c, rounds in memory["clients"].items()
        }
        try:
            tensors = {name: torch.from_numpy(self.store[h].packed.copy()) for name, h in memory["history"].items()}
        except (KeyError, FlashError) as error:
            warnings.warn(f"what clients hold is lost ({error}); they are sent full masks again", RuntimeWarning)
            return
        self.owner.ledger.restore((dict(memory["ledger"]), tensors), device)

    def keep_only(self, pinned: set[str]) -> None:
        """Masks in `pinned` are needed by checkpoints; all others that no client holds may go."""
        self._pinned = pinned
        self.store.keep_only(pinned | self.held())


def _hashes(clients: Mapping[int, Memory]) -> set[str]:
    """The masks that clients remember."""
    return {h for rounds in clients.values() for _, *hashes in rounds for h in hashes if h is not None}
