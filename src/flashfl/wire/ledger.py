"""Which masks the other side holds, kept on both sides by one rule.

Once the server has accepted a client's update, the client holds the mask of the order it answered and, if it was asked
to keep its own, the mask it reported. The next order names that round as its `start`; until then the client keeps what
it held before as well, so an update that gets lost leaves both sides agreeing.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.exchange import Tag
from ..core.layout import Layout
from ..core.mask import Mask
from .errors import UnknownMask
from .message import Message

Saved = tuple[dict[str, Any], dict[str, Tensor]]  # plain JSON, and tensors by name


class _Kept:
    """A mask in the history. A client's own is stored at one bit a weight, unless it lies on a device: the engine
    there holds it anyway."""

    def __init__(self, mask: Mask, own: bool) -> None:
        self.layout, self.own = mask.layout, own
        self.counts = mask.known_counts if mask.bits.is_cuda else mask.counts
        packs = own and not mask.bits.is_cuda
        self.packed: np.ndarray[Any, Any] | None = mask.packed if packs else None
        self._mask = None if packs else mask

    def mask(self) -> Mask:
        if self._mask is not None:
            return self._mask
        assert self.packed is not None
        return Mask(self.layout, Mask.unpack(self.layout, self.packed).bits, self.counts)

    def bits(self) -> np.ndarray[Any, Any]:
        return self.packed if self.packed is not None else self.mask().packed


@dataclass(frozen=True)
class _Entry:
    """The last accepted round of a client; the numbers name masks in the history."""

    tag: Tag
    order: int
    own: int | None


class ServerLedger:
    """What each client holds, and the masks themselves: at most `masks` of them and `bytes` at one bit a weight.

    Masks no client holds are dropped at once. Beyond the bounds the one acknowledged longest ago goes first, and the
    clients that held it are sent the full mask next time.
    """

    def __init__(self, layout: Layout, masks: int = 1024, bytes: int = 1 << 30) -> None:
        self.layout, self.masks, self.bytes = layout, masks, bytes
        self._clients: dict[int, _Entry] = {}
        self._history: dict[int, _Kept] = {}  # oldest acknowledgement first
        self._uses: dict[int, int] = {}  # how many clients hold each mask
        self._latest = -1  # the mask of an order that was acknowledged last
        self._next = 0

    def start(self, client: int) -> Tag | None:
        """The last round accepted from this client: where its next work starts from."""
        entry = self._clients.get(client)
        return entry.tag if entry else None

    def base(self, client: int) -> Mask | None:
        """The mask of the last order this client acknowledged, if still in the history."""
        entry = self._clients.get(client)
        return self._mask(entry.order) if entry else None

    def own(self, client: int) -> Mask | None:
        """The client's own mask after its last accepted round, if it keeps one and it is still in the history."""
        entry = self._clients.get(client)
        return self._mask(entry.own) if entry else None

    def bases(self, client: int) -> tuple[Mask, ...]:
        """What an order to this client may lean on."""
        base = self.base(client)
        return () if base is None else (base,)

    def known(self, client: int, order: Mask | None) -> dict[str, Mask]:
        """What this client's update may lean on, by hash, given the mask of its order."""
        held = [mask for mask in (order, self.own(client)) if mask is not None]
        return {mask.hash: mask for mask in held}

    def held(self, client: int) -> dict[str, Mask]:
        """What the client holds by the rule, by hash: for engines that play the clients too."""
        held = [mask for mask in (self.base(client), self.own(client)) if mask is not None]
        return {mask.hash: mask for mask in held}

    def accept(self, client: int, tag: Tag, order: Mask, own: Mask | None = None) -> None:
        """Record an accepted update: `order` was its order's mask, `own` the mask the client keeps, if any."""
        number = self._acknowledge(order)
        mine = None if own is None else self._add(_Kept(own, True))
        self._set(client, _Entry(tag, number, mine))

    def forget(self, client: int) -> None:
        """The client holds nothing (it said so, or it is new): it will be sent full masks and start afresh."""
        self._set(client, None)

    def snapshot(self) -> ServerLedger:
        """This ledger as it is now, whatever is recorded in it later; the masks themselves are shared."""
        other = copy.copy(self)
        other._clients, other._history, other._uses = dict(self._clients), dict(self._history), dict(self._uses)
        return other

    def state(self) -> Saved:
        """All of it as JSON and tensors, which are ours: not to be written to. Masks by position, oldest first."""
        place = {number: index for index, number in enumerate(self._history)}
        kept = list(self._history.values())
        clients = [
            [client, list(entry.tag), place.get(entry.order), None if entry.own is None else place.get(entry.own)]
            for client, entry in sorted(self._clients.items())
        ]
        tensors = {f"mask.{index}": torch.from_numpy(each.bits()) for index, each in enumerate(kept)}
        return {"clients": clients, "own": [each.own for each in kept]}, tensors

    def restore(self, saved: Saved, device: torch.device | str = "cpu") -> None:
        """Take over what `state` gave: every later choice is the one the undisturbed ledger would make."""
        record, tensors = saved
        self._clients, self._history, self._uses, self._latest, self._next = {}, {}, {}, -1, 0
        try:
            for index, own in enumerate(record["own"]):
                found = Mask.unpack(self.layout, tensors[f"mask.{index}"].numpy())
                mask = Mask(self.layout, found.bits, found.counts)
                self._add(_Kept(mask.to(device), bool(own)))
            lost = self._next  # a number that is in no history: a mask that had been dropped
            for client, (stage, round, attempt), order, own in record["clients"]:
                number = lost if order is None else order
                self._set(client, _Entry((stage, round, attempt), number, own))
            self._next += 1
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"the ledger of masks in the checkpoint is damaged: {error!r}") from None

    def _mask(self, number: int | None) -> Mask | None:
        kept = self._history.get(number) if number is not None else None
        return kept.mask() if kept is not None else None

    def _add(self, kept: _Kept) -> int:
        self._next += 1
        self._history[self._next - 1] = kept
        return self._next - 1

    def _acknowledge(self, order: Mask) -> int:
        """The number of the order's mask, now the one acknowledged last; equal masks of orders are one."""
        number = self._find(order)
        if number is None:
            number = self._add(_Kept(order, False))
        else:
            self._history[number] = self._history.pop(number)
        self._latest = number
        return number

    def _find(self, order: Mask) -> int | None:
        # The very same object is the common case, most often the one before, and on a device the only one that costs
        # no wait.
        if self._mask(self._latest) is order:
            return self._latest
        shared = [(number, kept.mask()) for number, kept in reversed(self._history.items()) if not kept.own]
        tests: tuple[Callable[[Mask, Mask], bool], ...] = (operator.is_, Mask.equal)
        return next((number for test in tests for number, mask in shared if test(mask, order)), None)

    def _set(self, client: int, new: _Entry | None) -> None:
        """What a client holds from now on; masks that nobody holds any more go, and the oldest beyond the bounds."""
        old = self._clients.pop(client, None)
        if new is not None:
            self._clients[client] = new
        for entry, step in ((new, 1), (old, -1)):  # what stays is counted before it is let go of
            for number in () if entry is None else (entry.order, entry.own):
                if number is not None:
                    self._uses[number] = self._uses.get(number, 0) + step
                    if not self._uses[number]:
                        del self._uses[number]
                        self._history.pop(number, None)
        each = (self.layout.prunable_size + 7) // 8
        most = max(1, min(self.masks, self.bytes // max(1, each)))
        while len(self._history) > most:
            del self._history[next(iter(self._history))]


@dataclass(frozen=True)
class _Worked:
    """One round of a client's work: the mask it was sent and the one it keeps."""

    order: Mask
    own: Mask | None


class ClientLedger:
    """The masks one client holds: those of the round its orders start from, and of the round it worked on last."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._rounds: dict[Tag, _Worked] = {}

    def known(self) -> dict[str, Mask]:
        """What an order may lean on, by hash."""
        held = [mask for work in self._rounds.values() for mask in (work.order, work.own) if mask is not None]
        return {mask.hash: mask for mask in held}

    def own(self, start: Tag | None) -> Mask | None:
        """The mask kept from the round `start`."""
        work = self._rounds.get(start) if start is not None else None
        return work.own if work else None

    def begin(self, order: Message) -> None:
        """An order has come: of all rounds only the one it starts from counts. Raises UnknownMask if that is lost."""
        mine = self.own(order.start)
        if order.own is not None and (mine is None or mine.hash != order.own):
            raise UnknownMask(order.own)
        self._rounds = {tag: work for tag, work in self._rounds.items() if tag == order.start}

    def bases(self, order: Message) -> tuple[Mask, ...]:
        """What the update to this order may lean on: the order's mask and, if the server says it holds it, our own."""
        mine = self.own(order.start) if order.own is not None else None
        return tuple(mask for mask in (order.mask, mine) if mask is not None)

    def finish(self, order: Message, own: Mask | None = None) -> None:
        """The update has been sent; `own` is the mask we were asked to keep, if any."""
        if order.mask is not None:
            self._rounds[order.tag] = _Worked(order.mask, own)

    def rounds(self) -> dict[Tag, tuple[Mask, Mask | None]]:
        """The rounds remembered: each with its order's mask and the client's own."""
        return {tag: (work.order, work.own) for tag, work in self._rounds.items()}

    def remember(self, tag: Tag, order: Mask, own: Mask | None) -> None:
        """Take over a round that `rounds` told of."""
        self._rounds[tag] = _Worked(order, own)

    def state(self) -> Saved:
        """As JSON and tensors; a mask that two rounds share is saved with each."""
        tensors: dict[str, Tensor] = {}
        for index, work in enumerate(self._rounds.values()):
            tensors[f"order.{index}"] = torch.from_numpy(work.order.packed.copy())
            if work.own is not None:
                tensors[f"own.{index}"] = torch.from_numpy(work.own.packed.copy())
        return {"rounds": [list(tag) for tag in self._rounds]}, tensors

    def restore(self, saved: Saved) -> None:
        record, tensors = saved
        self._rounds = {}
        try:
            for index, (stage, round, attempt) in enumerate(record["rounds"]):
                own = tensors.get(f"own.{index}")
                order = Mask.unpack(self.layout, tensors[f"order.{index}"].numpy())
                mine = None if own is None else Mask.unpack(self.layout, own.numpy())
                self._rounds[(stage, round, attempt)] = _Worked(order, mine)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"the client's masks in the checkpoint are damaged: {error!r}") from None
