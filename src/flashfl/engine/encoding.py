"""The account of a round with real bytes: orders are encoded, updates are decoded once and checked."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..aggregate import add
from ..core.client import active_range, moves_mask
from ..core.exchange import Client, Extra, Order, Outcome, Traffic
from ..core.mask import Mask, Weights
from ..core.precision import EXACT, Precision
from ..sparsity import recipe_mask
from ..wire import Encoded, Message, WireError, decode, encode, size_with
from .account import Account
from .change import start_of
from .held import Held
from .memory import ClientMemory, Kept
from .robust import PLAIN, Robust
from .trust import as_update, limits_of, read_update

OWN = "own mask"  # the extra that gives a client back the mask it kept and lost


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
        message = self.message(client, self.personal(client, order))
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
        """Bytes of the largest update that can answer an order: no mask takes more than a bit for each weight."""
        order = self._orders[client]
        local, k = order.work, self.layout.prunable_size
        active = max(sum(local.start.budgets) if local.start else 0, order.mask.active if order.mask else 0)
        active = max(active, active_range(local.parts, self.layout, active)[1])
        values, limits = local.sends(self.values), limits_of(order)
        plain = size_with(replace(order, extra={}), active, k // 8 + 2, values).total
        return plain + (300 + 8 * limits.elements) * limits.extras

    def again(self, client: int) -> bytes:
        """The bytes of an order once more. Nothing is counted: it does not travel again."""
        return self.encode(self._orders[client]).data

    def lacking(self, client: int, data: bytes) -> bytes:
        """A client says that it lacks a mask: the order with the full mask, and with its own if it is known here.

        Raises a WireError if this is not what the client says, or if it says so a second time.
        """
        lack, order = decode(data, self.layout), self._orders.get(client)
        asks = lack.kind == "lack" and lack.client == client and client not in self._reminded
        if not asks or order is None or lack.parts is None:  # in most steps of a private round there is no order
            raise WireError(
                "the client's request for a mask is not valid, or it asked again after it got the full mask"
            )
        self._reminded.add(client)
        self.traffic += lack.parts.traffic("lack")
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
        self.traffic += encoded.parts.traffic("order")
        return encoded.data

    def failed(self, client: int, why: str) -> None:
        super().failed(client, why)
        self._orders.pop(client, None)
        self._add_ready()

    def received(self, client: int, data: bytes, notes: str | None = None) -> None:
        """An answer. If it is not a good one, its client is dropped. notes: the hash of what a simulated one keeps."""
        order = self._orders[client]
        try:
            update = self.decode(data, order)
        except WireError as error:
            self.traffic += Traffic(up=len(data), overhead=len(data))
            self.failed(client, f"{type(error).__name__}: {error}")
            return
        assert update.parts is not None
        assert order.mask is not None
        assert order.values is not None
        self.traffic += update.parts.traffic("update")
        keeps = "mask" in order.work.keep
        kept = None if notes is None else Kept(notes)
        self.accepted(client, order.tag, order.mask, update.mask if keeps else None, kept)
        del self._orders[client]
        found = as_update(update, order)
        if self.cohort is not None:
            found = replace(found, start=start_of(found, order.work, order.mask, order.values))
            self.cohort.see(found)
        self._held.put(found, order.mask)
        self._add_ready()

    def decode(self, data: bytes, order: Message) -> Message:
        """The update that answers `order`, or the WireError that says why this is none."""
        own = self.memory.own(order.client) if order.own is not None else None
        return read_update(data, order, own, self._frozen(order))

    def _frozen(self, order: Message) -> Mask | None:
        """The mask that the client must return; None if it may move its mask, or if its own is unknown here."""
        local = order.work
        if local.adapt is not None or moves_mask(local.parts):
            return None
        if "mask" in local.keep and order.start is not None:
            return self.memory.own(order.client)
        if local.start is not None:
            return recipe_mask(self.layout, local.start)
        return order.mask

    def _add_ready(self) -> None:
        """Add the updates of all clients before the first one that has not answered."""
        if self.cohort is None:
            for update in self._held.take(before=next(iter(self._orders), None)):
                add(self.sums, update)

    def close(self) -> Outcome:
        for client in list(self._orders):
            self.failed(client, "no answer")
        if self.cohort is not None:
            self.cohort.add(self.sums, self._held)
        return super().close()
