"""The server's half of a round: orders into bytes, bytes into updates that can be believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from torch import Tensor

from ..core.exchange import Client, Extra, Local, Order, Traffic, Update
from ..core.layout import Layout
from ..core.mask import Mask, Weights
from ..sparsity import recipe_mask
from ..wire import Encoded, Limits, Message, ServerLedger, WireError, decode, encode
from ..wire.errors import WrongContent
from ..wire.trust import Seen, Trust, activations, change_norm, check_cohort, check_statistics, check_update, length
from ..wire.values import Form
from .spool import Spool

HISTORY_BYTES = 128 << 20
OWN = "own mask"  # the extra by which a client that lost its own mask is given it back


class ServerSide:
    """Knows which masks each client holds, sends what it lacks, and checks what comes back."""

    def __init__(self, layout: Layout, values: Form = "fp32", trust: Trust | None = None, clip: float = 0.0) -> None:
        self.layout, self.values, self.trust = layout, values, trust or Trust()
        self.clip = clip  # a change above this many times the cohort's median is shortened to that; 0: never
        self.ledger = ServerLedger(layout, bytes=HISTORY_BYTES)
        self._packed: tuple[Weights | None, Tensor | None] = (None, None)

    def message(self, client: Client, order: Order) -> Message:
        """An order for a client as it will travel."""
        own = self.ledger.own(client.id)
        return Message(
            "order", self.layout, order.tag, client.id, client.n, order.key, start=self.ledger.start(client.id),
            own=own.hash if own is not None else None, local=order.local, mask=order.weights.mask,
            values=self._pack(order), carries="all" if order.local.statistics else "weights", extra=order.extra,
        )  # fmt: skip

    def _pack(self, order: Order) -> Tensor:
        """Packed once for all the clients that get the same weights."""
        if self._packed[0] is not order.weights:
            self._packed = (order.weights, order.weights.packed().cpu())
        values = self._packed[1]
        assert values is not None
        return values if order.local.statistics else values[: len(values) - self._tail]

    @property
    def _tail(self) -> int:
        return self.layout.size - self.layout.trained_size

    def encode(self, message: Message) -> Encoded:
        return encode(message, self.ledger.bases(message.client), values=self.values)

    def remind(self, client: Client, order: Order) -> tuple[Message, Encoded]:
        """An order for a client that has lost what it held: the full mask, and its own if it is still known here."""
        own = self.ledger.own(client.id)
        if own is None:
            self.ledger.forget(client.id)
        message = self.message(client, order)
        if own is not None:
            message = replace(message, extra={**message.extra, OWN: Extra("bits", own.bits)})
        return message, encode(message, (), values=self.values)

    def decode(self, data: bytes, order: Message) -> Message:
        """An update that answers `order`, or the WireError that says why it does not."""
        order = replace(order, extra={name: extra for name, extra in order.extra.items() if name != OWN})
        known, limits = self.ledger.known(order.client, order.mask), _limits(order)
        update = decode(data, self.layout, known=known, limits=limits)
        check_update(update, order, _expected(order), self.trust.factor > 0, self._frozen(order))
        if update.n != order.n:  # an average weighted by it must not be at the mercy of what a client says today
            raise WrongContent(f"client {update.client} reports {update.n} samples and is known to have {order.n}")
        return update

    def _frozen(self, order: Message) -> Mask | None:
        """The mask a client must come back with, where nothing moves it."""
        local = order.local
        if local is None or local.adapt is not None:
            return None
        if "mask" in local.keep and order.start is not None:
            return self.ledger.own(order.client)  # None: it has one that is no longer known here
        if local.start is not None:
            return recipe_mask(self.layout, local.start)
        return order.mask

    def accept(self, order: Message, update: Message) -> None:
        keeps = order.local is not None and "mask" in order.local.keep
        assert order.mask is not None
        self.ledger.accept(order.client, order.tag, order.mask, own=update.mask if keeps else None)


class Inbox:
    """The updates of one round: checked as they come, spooled, and handed on in order once all are known.

    Whether a change is too large shows only against the whole cohort, so updates wait as bytes; a thousand of them
    take no more memory than ten.
    """

    def __init__(self, server: ServerSide, folder: Path | None = None) -> None:
        self.server = server
        self.spool = Spool(folder=folder)
        self.norms: dict[int, float] = {}
        self.paces: dict[int, float] = {}  # the change a step: a client with more data goes further
        self.reach: dict[int, float] = {}  # the whole change as a share of the weights' length
        self._length: tuple[Tensor | None, float] = (None, 0.0)  # of the weights last looked at: most get the same
        self.seen: dict[int, Seen] = {}
        self.failures: dict[int, str] = {}
        self.traffic = Traffic()
        self._orders: dict[int, Message] = {}

    def sent(self, order: Message, encoded: Encoded) -> None:
        self.traffic += encoded.parts.traffic("order")
        self._orders[order.client] = order

    def failed(self, client: int, why: str) -> None:
        self.failures[client] = why
        self._orders.pop(client, None)

    def arrived(self, client: int, data: bytes) -> None:
        """An answer: kept if it is a good one, else its client is left out with the reason."""
        order = self._orders[client]
        try:
            update = self.server.decode(data, order)
        except WireError as error:
            self.traffic += Traffic(up=len(data), overhead=len(data))
            self.failed(client, f"{type(error).__name__}: {error}")
            return
        assert update.parts is not None
        self.traffic += update.parts.traffic("update")
        judged = self.server.trust.factor > 0 or self.server.clip > 0
        if judged and update.carries != "statistics" and update.mask is not None:
            self.norms[client] = change_norm(update, order)
            local = order.local or Local()
            self.paces[client] = self.norms[client] / (local.epochs * local.batches(update.n))
            if self.server.trust.factor > 0:
                self.reach[client] = self.norms[client] / max(self._length_of(order), 1e-30)
        if self.server.trust.factor > 0 and (after := activations(update)):
            self.seen[client] = Seen(update.n, activations(order), after)
        self.spool.put(client, data)
        self._keep_base(client, order, update)
        if self.server.clip:
            return
        # The order's values are not needed again; a frozen statistic is.
        tail = order.values[-self.server._tail :] if order.values is not None and self.server._tail else None
        self._orders[client] = replace(order, values=tail)

    def _length_of(self, order: Message) -> float:
        if self._length[0] is not order.values:
            self._length = (order.values, length(order))
        return self._length[1]

    def updates(self) -> Iterator[Update]:
        """The good updates in ascending client id; each is accepted as it is handed on."""
        trust = self.server.trust
        odd = check_statistics(self.seen, trust) | check_cohort(self.paces, trust, self.reach)
        for client, why in odd.items():
            self.failed(client, f"{type(why).__name__}: {why}")
        most = self._longest()
        for client in sorted(self._orders):
            order = self._orders[client]
            update = decode(self.spool.get(client), self.server.layout, known=self._known(client, order))
            made = _update(update, order)
            yield _shortened(made, order, most / self.norms[client]) if self.norms.get(client, 0) > most else made
            self.server.accept(order, update)

    def _keep_base(self, client: int, order: Message, update: Message) -> None:
        """An update may lean on the client's own mask, which the ledger may drop while others are accepted."""
        base = update.coding.base if update.coding is not None else None
        if base is None or order.mask is None or base == order.mask.hash:
            return
        own = self.server.ledger.own(client)
        assert own is not None
        self.spool.put(_own(client), own.packed.tobytes())

    def _known(self, client: int, order: Message) -> dict[str, Mask]:
        """What the update of this client may lean on, as it was when it arrived."""
        masks = [] if order.mask is None else [order.mask]
        if _own(client) in self.spool:
            packed = np.frombuffer(self.spool.get(_own(client)), dtype=np.uint8)
            masks.append(Mask.unpack(self.server.layout, packed))
        return {mask.hash: mask for mask in masks}

    def close(self) -> None:
        self.spool.close()

    def _longest(self) -> float:
        """The longest change that counts in full."""
        norms = [norm for client, norm in self.norms.items() if client in self._orders]
        return self.server.clip * median(norms) if self.server.clip and norms else float("inf")


def _own(client: int) -> str:
    """Where the spool keeps a client's own mask."""
    return f"own {client}"


def _expected(order: Message) -> int | None:
    """How many active weights an answer must have: those of the mask the client starts from."""
    recipe = order.local.start if order.local is not None else None
    return sum(recipe.budgets) if recipe is not None else None


def _limits(order: Message) -> Limits:
    """No more extras than were asked for, none larger than those or a mask, and no recipe from whom none was given."""
    most = max([order.layout.prunable_size, *(extra.value.numel() for extra in order.extra.values())])
    local = order.local or Local()
    # One that the client kept may have been a recipe, and be unknown here by now.
    kept = "mask" in local.keep and order.start is not None and order.own is None
    return Limits(extras=len(order.extra), elements=most, recipes=local.start is not None or kept)


def _update(message: Message, order: Message) -> Update:
    """A decoded update as the aggregation wants it."""
    assert message.counts is not None or message.carries == "statistics"
    weights = None
    if message.carries == "statistics" and message.values is not None:
        weights = _statistics_only(message, order)
    elif message.mask is not None:
        weights = message.weights()
    counts = message.counts if message.counts is not None else (0,) * len(message.layout.prunable)
    return Update(message.client, message.n, weights, counts, dict(message.metrics), dict(message.extra))


def _shortened(update: Update, order: Message, share: float) -> Update:
    """An update whose trained weights went only this share of their way; its statistics are as they were."""
    assert update.weights is not None
    start = order.weights().restrict(update.weights.mask).vector
    vector, trained = update.weights.vector.clone(), update.weights.layout.trained_size
    vector[:trained] = start[:trained] + (vector[:trained] - start[:trained]) * share
    return replace(update, weights=Weights(update.weights.mask, vector))


def _statistics_only(message: Message, order: Message) -> Weights:
    """Statistics in a vector that is zero elsewhere: sums over it are sums over statistics."""
    assert message.values is not None
    assert order.mask is not None
    vector = message.values.new_zeros(message.layout.size)
    vector[message.layout.trained_size :] = message.values
    return Weights(order.mask, vector)
