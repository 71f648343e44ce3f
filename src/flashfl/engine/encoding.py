"""What one round costs and what its updates add up to; and the account that does it with real bytes."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..aggregate import add
from ..core.exchange import Client, Extra, Order, Outcome, Sums, Traffic, Update
from ..core.layout import Layout
from ..core.mask import Mask, Weights
from ..core.precision import EXACT, Precision
from ..sparsity import recipe_mask
from ..wire import Encoded, Message, WireError, decode, encode
from .memory import ClientMemory
from .robust import PLAIN, Robust, add_bounded
from .store import Kept
from .trust import largest_answer, read_update

OWN = "own mask"  # the extra that gives a client back the mask it kept and lost
_ROOM = 1 << 30  # bytes of memory for updates that wait


class Account:
    """The account of one round, from the first order to the sums of the accepted updates.

    An engine reports each order by `sent`, each answer by `received` and each client that gives none by `failed`. Then
    `close` settles the round. `Encoding` makes real bytes; `Counting` works out on the device what they would take.
    """

    def __init__(self, memory: ClientMemory, values: Precision = EXACT, robust: Robust = PLAIN) -> None:
        """values: how the values of orders travel."""
        self.memory, self.layout, self.values, self.robust = memory, memory.layout, values, robust
        self.waits = robust != PLAIN  # updates are added when the whole cohort is known, not as they come
        self.notes: dict[int, str] = {}  # client -> what was bounded by much
        memory.heard = {}  # a round that was interrupted is forgotten
        self.traffic = Traffic()
        self.failures: dict[int, str] = {}
        self.sums = Sums(self.layout, counts=[0] * len(self.layout.prunable))

    def personal(self, client: Client, order: Order) -> Order:
        """A personal order as it is sent: with the weights that the client's own mask covers.

        A client whose mask is no longer known here is sent the whole model, and covers it itself.
        """
        own, start = self.memory.own(client.id), order.local.start
        fresh = "mask" not in order.local.keep or self.memory.start(client.id) is None
        if own is None and start is not None and fresh:
            own = recipe_mask(self.layout, start, order.weights.vector.device)
        return order if own is None else replace(order, weights=order.weights.restrict(own))

    def failed(self, client: int, why: str) -> None:
        """A client is dropped from this round."""
        self.failures[client] = why
        self.memory.heard.pop(client, None)

    def settle(self) -> Iterable[Update]:
        """Every client has answered or will not: the updates that wait for the whole cohort."""
        raise NotImplementedError

    def close(self) -> Outcome:
        """What the round came to. Only now clients are known to hold what this round gave them."""
        waiting = self.settle()
        if self.waits:
            self.notes = add_bounded(self.sums, waiting, self.robust, self.memory.store.folder)
        self.memory.accept()
        return Outcome(self.sums, self.traffic, dict(sorted(self.failures.items())))


class Encoding(Account):
    """The account of a round whose messages are real bytes.

    Each update is decoded once, when it arrives, and then added in ascending client id: as soon as all clients before
    it have answered or failed, or at the end if the whole cohort must be known first. Until then it waits in `Held`.
    Orders must be sent in ascending client id.
    """

    def __init__(self, memory: ClientMemory, values: Precision = EXACT, robust: Robust = PLAIN) -> None:
        super().__init__(memory, values, robust)
        self._orders: dict[int, Message] = {}  # of clients that have not answered yet, in ascending id
        self._reminded: set[int] = set()  # clients that were sent a mask which they had lost
        self._packed: tuple[Weights, Tensor] | None = None
        self._held = Held(self.layout, memory.store.folder)

    def sent(self, client: Client, order: Order) -> bytes:
        """The bytes of an order that is sent now."""
        message = self.message(client, self.personal(client, order) if order.local.personal else order)
        self._orders[client.id] = message
        return self._count(self.encode(message))

    def message(self, client: Client, order: Order) -> Message:
        """An order for a client as it will travel."""
        return Message(
            "order", self.layout, order.tag, client.id, client.n, order.key, start=self.memory.start(client.id),
            own=self.memory.own_hash(client.id), local=order.local, mask=order.weights.mask,
            values=self._pack(order), carries=order.local.order_carries, extra=order.extra,
        )  # fmt: skip

    def _pack(self, order: Order) -> Tensor:
        """Packed once for all clients that get the same weights."""
        if self._packed is None or self._packed[0] is not order.weights:
            self._packed = (order.weights, order.weights.packed().cpu())
        values, tail = self._packed[1], self.layout.size - self.layout.trained_size
        return values if order.local.statistics else values[: len(values) - tail]

    def encode(self, message: Message) -> Encoded:
        """An order as bytes; its mask leans on the one that the client acknowledged last."""
        base = self.memory.base(message.client)
        return encode(message, () if base is None else (base,), values=self.values)

    def largest_update(self, client: int) -> int:
        """Bytes of the largest update that can answer an order."""
        return largest_answer(self._orders[client], self.values)

    def again(self, client: int) -> bytes:
        """The bytes of an order once more. Nothing is counted: it does not travel again."""
        return self.encode(self._orders[client]).data

    def lacking(self, client: int, data: bytes) -> bytes:
        """A client says that it lacks a mask: the order with the full mask, and with its own if it is known here.

        Raises a WireError if this is not what the client says, or if it says so a second time.
        """
        lack, order = decode(data, self.layout), self._orders.get(client)
        asks = lack.kind == "lack" and lack.client == client and client not in self._reminded
        if not asks or order is None:  # in most steps of a private round there is no order
            raise WireError(
                "the client asked for a mask in a wrong way: it had just been sent the full mask, or its message is "
                "not valid. Its stored state may be damaged: restart its SuperNode."
            )
        self._reminded.add(client)
        self.traffic += lack.traffic
        own = self.memory.own(client)
        if own is None:
            self.memory.forget(client)
        order = replace(order, start=self.memory.start(client), own=None if own is None else own.hash)
        self._orders[client] = order
        if own is not None:
            order = replace(order, extra={**order.extra, OWN: Extra("bits", own.bits)})
        return self.in_full(client, order)

    def in_full(self, client: int, order: Message | None = None) -> bytes:
        """The bytes of an order with its full mask."""
        return self._count(encode(order or self._orders[client], (), values=self.values))

    def _count(self, encoded: Encoded) -> bytes:
        self.traffic += encoded.traffic
        return encoded.data

    def failed(self, client: int, why: str) -> None:
        super().failed(client, why)
        self._orders.pop(client, None)
        self._add_ready()

    def received(self, client: int, data: bytes, notes: str | None = None) -> None:
        """An answer. If it is not a good one, its client is dropped. notes: the hash of what a simulated one keeps."""
        order = self._orders[client]
        try:
            known = self.memory.own(client) if order.own is not None else None
            update, traffic = read_update(data, order, known, compared=self.waits)
        except WireError as error:
            self.traffic += Traffic(up=len(data), overhead=len(data))
            self.failed(client, f"{type(error).__name__}: {error}")
            return
        assert order.mask is not None
        self.traffic += traffic
        store = self.memory.store
        own = store.keep(update.mask, own=True) if update.mask is not None and "mask" in order.work.keep else None
        kept = None if notes is None else Kept(notes)
        self.memory.hear(client, order.tag, store.keep(order.mask), own, kept)
        del self._orders[client]
        self._held.put(update, order.mask)
        self._add_ready()

    def _add_ready(self) -> None:
        """Add the updates of all clients before the first one that has not answered."""
        if not self.waits:
            for update in self._held.take(before=next(iter(self._orders), None)):
                add(self.sums, update)

    def settle(self) -> Iterable[Update]:
        for client in list(self._orders):
            self.failed(client, "no answer")
        return self._held


class _Waiting(NamedTuple):
    """An update that waits. If it has a place in the file, its tensors are there, except for those of its order."""

    update: Update
    room: int  # bytes of memory that it takes
    place: int | None = None


class Held:
    """Decoded updates by client. The file has no name, so nothing is left behind."""

    def __init__(self, layout: Layout, folder: Path | None = None, room: int = _ROOM) -> None:
        """folder: where the file would be. The system's temporary folder may be in memory."""
        self.layout, self.room = layout, room
        self._waiting: dict[int, _Waiting] = {}
        self._file = tempfile.SpooledTemporaryFile(1, dir=None if folder is None else str(folder))  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def __iter__(self) -> Iterator[Update]:
        """The updates, in ascending client id."""
        return map(self._read, sorted(self._waiting))

    def put(self, update: Update, order: Mask | None) -> None:
        """Hold an update; `order` is its order's mask."""
        mask, own = update.mask, update.mask is not None and update.mask is not order
        tensors = [update.values, update.start if own else None, *(extra.value for extra in update.extra.values())]
        need = sum(x.nbytes for x in tensors if x is not None) + 2 * self.layout.prunable_size * own  # mask and places
        if need <= self.room:
            self.room -= need
            self._waiting[update.client] = _Waiting(update, need)
            return
        rest = replace(update, values=None, extra={})
        if own:
            rest = replace(rest, mask=None, start=None)
        self._waiting[update.client] = _Waiting(rest, 0, self._file.seek(0, 2))
        values, began = (None if x is None else x.numpy() for x in tensors[:2])
        bits = mask.packed if own and mask is not None else None
        pickle.dump((values, dict(update.extra), bits, began), self._file, protocol=5)

    def take(self, before: int | None) -> Iterator[Update]:
        """The updates of all clients before this one, in ascending client id. They are held no longer. None: all."""
        for client in sorted(self._waiting):
            if before is not None and client > before:
                return
            update = self._read(client)
            _, room, place = self._waiting.pop(client)
            self.room += room
            if place is not None and all(other.place is None for other in self._waiting.values()):
                self._file.truncate(0)
            yield update

    def _read(self, client: int) -> Update:
        update, _, place = self._waiting[client]
        if place is None:
            return update
        self._file.seek(place)
        values, extra, bits, began = pickle.load(self._file)
        update = replace(update, values=None if values is None else torch.from_numpy(values), extra=extra)
        if bits is None:
            return update
        mask = Mask(self.layout, Mask.unpack(self.layout, bits).bits, update.counts)
        return replace(update, mask=mask, start=None if began is None else torch.from_numpy(began))
