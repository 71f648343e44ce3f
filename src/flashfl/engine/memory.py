"""What an engine knows about its clients between rounds: for each the last accepted round and what it holds.

Once the server has accepted an update, its client holds the mask of the order it answered and, if it was told to keep
it, the mask it reported. The next messages describe masks by their difference to these. In a simulation this is also
everything that a simulated client remembers, with the notes of its parts. Real clients keep their notes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.engine import JSON
from ..core.errors import CheckpointError, FlashError, warn
from ..core.exchange import Tag
from ..core.mask import Mask
from ..wire.frame import TAG
from .pipeline import Notes
from .store import Kept, MaskStore

HISTORY_MASKS = 1024
HISTORY_BYTES = 128 << 20  # at one bit a weight

# What a client remembers, as JSON: for each of its last rounds the tag and three hashes: of the order's mask, of its
# own mask, and of the notes of its parts.
Rounds = list[tuple[Tag, str | None, str | None, str | None]]


@dataclass(frozen=True)
class _Round:
    """The last accepted round of a client, if there was one."""

    tag: Tag | None = None
    order: Kept | None = None
    own: Kept | None = None
    notes: Kept | None = None


_NOTHING = _Round()

# What all clients hold, and the masks that the server still knows: oldest acknowledgement first, with how many clients
# hold each.
_Table = tuple[dict[int, _Round], dict[Kept, int]]


class ClientMemory:
    """The last accepted round of every client, and a bounded history of masks that both sides know.

    The history holds at most `masks` masks and HISTORY_BYTES bytes. Masks that no client holds leave it at once. Beyond
    the bounds the mask acknowledged longest ago goes first, and clients that held it are sent a full mask next time.
    `simulated`: the clients live here, so their own masks are kept for them beyond these bounds.
    """

    def __init__(
        self, store: MaskStore, device: torch.device | str = "cpu", simulated: bool = True, masks: int = HISTORY_MASKS
    ) -> None:
        self.store, self.layout, self.device, self.simulated = store, store.layout, torch.device(device), simulated
        self.most = max(1, min(masks, HISTORY_BYTES // max(1, (self.layout.prunable_size + 7) // 8)))
        self._clients: dict[int, _Round] = {}
        self._history: dict[Kept, int] = {}
        self._saved: _Table = ({}, {})
        self._pinned: set[str] = set()
        self.heard: dict[int, _Round] = {}  # what clients will hold that have answered in the round that is going on
        self.sparse = False  # whether the run computes active weights only; chosen once, so checkpoints keep it

    # -- what clients hold ---------------------------------------------------------------------------------------

    def _held(self, client: int) -> _Round:
        return self._clients.get(client, _NOTHING)

    def _known(self, kept: Kept | None) -> Kept | None:
        return kept if kept in self._history else None

    def _mask(self, kept: Kept | None) -> Mask | None:
        return None if kept is None else kept.loaded or self.store.find(kept.digest)

    def start(self, client: int) -> Tag | None:
        """The last round accepted from this client: its next work starts from there."""
        return self._held(client).tag

    def base(self, client: int) -> Mask | None:
        """The mask of the last order this client acknowledged. If it is lost here, the client is sent a full one."""
        return self._mask(self._known(self._held(client).order))

    def own(self, client: int) -> Mask | None:
        """The mask this client keeps, if the server still knows it."""
        return self._mask(self._known(self._held(client).own))

    def own_hash(self, client: int) -> str | None:
        """The hash of `own`, without reading the mask."""
        own = self._known(self._held(client).own)
        return own.digest if own is not None and own.digest in self.store else None

    def remembered(self, client: int) -> Mask | None:
        """The mask that a simulated client kept, whether or not the server knows it."""
        kept = self._held(client).own
        return None if kept is None else kept.loaded or self.store[kept.digest]

    def rounds(self, client: int) -> Rounds:
        """What a simulated client remembers, as hashes of masks in the store."""
        held = self._held(client)
        if held.tag is None:
            return []
        kept = (self._known(held.order), held.own, held.notes)
        order, own, notes = (None if one is None else one.digest for one in kept)
        if any(digest is not None and digest not in self.store for digest in (own, notes)):
            raise self.lost(client)
        return [(held.tag, order, own, notes)]

    def lost(self, client: int) -> CheckpointError:
        """What a simulated client remembers is gone or damaged."""
        return CheckpointError(
            f"client {client} needs a file from its last round, and it is missing or damaged in {self.store.folder}. "
            "If you have a copy of this folder, put its missing files back first. Then resume the run: it goes on from "
            "the last checkpoint that does not need a missing file. If no checkpoint can be used, start the run again."
        )

    def notes(self, client: int) -> Notes:
        """What the parts of a simulated client remember."""
        kept = self._held(client).notes
        if kept is None:
            return {}
        if kept.notes is None:
            kept.notes = self.store.notes(kept.digest)
        return kept.notes

    # -- what happens to them ------------------------------------------------------------------------------------

    def hear(self, client: int, tag: Tag, order: Kept, own: Kept | None = None, notes: Kept | None = None) -> None:
        """A client's update is good, unless it fails later. order: the mask it was sent. own, notes: what it keeps."""
        self.heard[client] = _Round(tag, order, own, notes)

    def accept(self) -> None:
        """The round is closed: the clients that were heard hold what it gave them."""
        history = self._history
        for client, new in sorted(self.heard.items()):
            assert new.order is not None
            order = self._find(new.order) or new.order
            history[order] = history.pop(order, 0)  # acknowledged last
            if new.own is not None:
                history[new.own] = 0
            self._set(client, replace(new, order=order))
        self.heard = {}

    def forget(self, client: int) -> None:
        """The client holds nothing: it is sent full masks and starts afresh."""
        self._set(client, _NOTHING)

    def _find(self, order: Kept) -> Kept | None:
        """The order's mask in the history that equals this one: equal masks of orders count once."""
        masks, mask = [kept for kept in reversed(self._history) if not kept.own], order.loaded
        if mask is None:
            return next((kept for kept in masks if kept.digest == order.digest), None)
        # The very same object is the common case, and the only one that does not wait for the GPU.
        same = next((kept for kept in masks if kept.loaded is mask), None)
        return same or next((kept for kept in masks if kept.loaded is not None and kept.loaded.equal(mask)), None)

    def _set(self, client: int, new: _Round) -> None:
        history, old = self._history, self._clients.pop(client, _NOTHING)
        if new is not _NOTHING:
            self._clients[client] = new
        _count(history, new, 1)  # what stays is counted before it is released
        _count(history, old, -1)
        while len(history) > self.most:
            del history[next(iter(history))]

    # -- rounds and checkpoints ----------------------------------------------------------------------------------

    def rollback(self) -> None:
        clients, history = self._saved
        self._clients, self._history = dict(clients), dict(history)

    def snapshot(self) -> None:
        """A round is over: `rollback` returns to this moment, and `save` describes it until the next is over."""
        self._saved = (dict(self._clients), dict(self._history))
        self._clean()

    def keep_only(self, pinned: set[str]) -> None:
        self._pinned = pinned
        self._clean()

    def _clean(self) -> None:
        """Delete what neither a client, nor the last snapshot, nor a checkpoint needs."""
        needed = [*_kept(self._clients, self._history), *_kept(*self._saved)]
        self.store.keep_only(self._pinned | {kept.digest for kept in needed})

    def save(self) -> dict[str, JSON]:
        """Masks by place in a list: first the history in its order, then what simulated clients keep, then notes.

        What has not changed since the last checkpoint is in the store already, and is not written again.
        """
        clients, history = self._saved
        kept = _kept(clients, history) if self.simulated else list(history)
        for one in kept:  # on a GPU: only now it goes to the store
            if one.loaded is not None:
                one.digest = self.store.put(one.loaded)
            elif one.notes is not None and not one.digest:
                one.digest = self.store.put_notes(one.notes)
        place: dict[Kept | None, int] = {one: index for index, one in enumerate(kept)}
        masks = [one.digest for one in kept]
        self.store.sync(masks)
        return {
            **({"sparse": True} if self.sparse else {}),
            "clients": {
                str(client): [list(held.tag or ()), place.get(held.order), place.get(held.own), place.get(held.notes)]
                for client, held in clients.items()
            },
            "masks": masks,
            "known": len(history),
            "simulated": self.simulated,
        }

    def load(self, saved: Mapping[str, JSON]) -> None:
        """Restore what `save` gave. If masks of real clients are lost, those are sent full ones again."""
        clients, history = _read(saved)
        notes = {held.notes for held in clients.values()}
        try:
            for kept in _kept(clients, history):
                if kept in notes:
                    self.store.notes(kept.digest)
                    continue
                mask = self.store[kept.digest]
                if self.device.type != "cpu":
                    kept.loaded = mask.to(self.device)
        except (KeyError, FlashError) as error:
            missing = f"{self.store.folder or 'memory'}/{kept.digest}.mask is missing"
            why = missing if isinstance(error, KeyError) else str(error)
            if self.simulated:
                raise CheckpointError(f"the stored mask of a client cannot be read: {why}") from None
            warn(f"the server's list of clients' masks is lost ({why}). The run continues and sends full masks again.")
            clients, history = {}, {}
        self._saved = (clients, history)
        self.rollback()
        self.sparse = bool(saved.get("sparse", False))


def _count(history: dict[Kept, int], held: _Round, step: int) -> None:
    """A client holds the masks of this round from now on, or no longer (-1)."""
    for kept in (held.order, held.own):
        if kept is not None and kept in history:
            history[kept] += step
            if not history[kept]:
                del history[kept]


def _kept(clients: Mapping[int, _Round], history: Mapping[Kept, int]) -> list[Kept]:
    """The masks in the history, then those that only clients keep, then what their parts remember."""
    own = [held.own for held in clients.values() if held.own is not None and held.own not in history]
    return [*history, *own, *(held.notes for held in clients.values() if held.notes is not None)]


def _read(saved: Mapping[str, Any]) -> _Table:
    """What `save` gave as a table. Raises errors of many kinds if it is no such thing."""
    kept = [Kept(digest) for digest in saved["masks"]]
    clients, history = dict[int, _Round](), dict.fromkeys(kept[: saved["known"]], 0)
    for client, (tag, *places) in saved["clients"].items():
        TAG.pack(*tag)  # an error unless it fits into a message
        order, own, notes = (None if at is None else kept[at] for at in places)
        held = clients[int(client)] = _Round(tuple(tag), order, own, notes)
        if own is not None:
            own.own = True
        _count(history, held, 1)
    return clients, history
