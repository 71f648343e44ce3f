"""The client's half of a round: read an order, train, write the update, remember what it was told to."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..core.errors import FlashError
from ..core.exchange import Extra, Order, Tag, Update
from ..core.layout import Layout
from ..core.mask import Mask
from ..data.sources import Source
from ..wire import ClientLedger, Message, UnknownMask, WireError, decode, encode
from ..wire.errors import WrongContent
from ..wire.values import Form
from .server import OWN
from .train import ClientFailed, Trainer

log = logging.getLogger("flashfl")
_TORCH = Path(torch.__file__).parent

# What a client remembers, as JSON: for each of its last rounds the tag and the hashes of the order's mask and its own.
Memory = list[tuple[Tag, str, str | None]]


@dataclass(frozen=True)
class Reply:
    """An answer in bytes and what the client remembers now; `lacks` if it needs the full mask first."""

    data: bytes
    memory: Memory
    lacks: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes the bytes travel as they lie in memory."""
        return Reply, (pickle.PickleBuffer(self.data), self.memory, self.lacks)


class ClientSide:
    """Plays one client at a time on one replica; masks it remembers lie in a store, by hash."""

    def __init__(self, trainer: Trainer, store: Any, values: Form | None = "fp32") -> None:
        """`values`: how weights travel; None: as they came."""
        self.trainer, self.layout, self.store, self.values = trainer, trainer.layout, store, values

    def work(self, client: int, data: Source, order_bytes: bytes, memory: Memory) -> Reply:
        """Carry out an order. Raises ClientFailed where there is nothing worth sending, whatever the training raised.

        The traceback of what it raised goes to the logger `flashfl`, at level debug.
        """
        ledger = self._recall(memory)
        try:
            message = decode(order_bytes, self.layout, known=ledger.known())
            extra = self._given_back(ledger, message)
            ledger.begin(message)
        except UnknownMask as error:
            return self._lack(client, order_bytes, error)
        except WireError as error:
            raise ClientFailed(f"it cannot read its order ({type(error).__name__}: {error})") from None
        local, coding = message.local, message.coding
        assert local is not None
        assert coding is not None
        # Order bytes, values and weights may each be as large as the model: all are let go of before training.
        orders = [Order(message.weights(), local, message.key, message.tag, extra)]
        message = replace(message, values=None)
        del order_bytes
        own = ledger.own(message.start) if "mask" in local.keep else None
        try:
            update = self.trainer.train(orders.pop(), client, data, own)
        except (FlashError, MemoryError):
            raise
        except Exception as error:  # of the user's model, loss or data, most likely: the others may still do
            log.debug("client %d failed", client, exc_info=True)
            raise ClientFailed(said(error)) from error
        answer = update_message(update, message, self.layout)
        encoded = encode(answer, ledger.bases(message), self.values or coding.values)
        keeps = "mask" in local.keep and update.weights is not None
        ledger.finish(message, own=update.weights.mask if keeps and update.weights else None)
        return Reply(encoded.data, self._keep(ledger))

    def _recall(self, memory: Memory) -> ClientLedger:
        ledger = ClientLedger(self.layout)
        for tag, order, own in memory:
            try:
                ledger.remember(tag, self.store[order], None if own is None else self.store[own])
            except (KeyError, FlashError):
                continue  # lost or damaged: as if it had never been; the server will be told
        return ledger

    def _given_back(self, ledger: ClientLedger, order: Message) -> dict[str, Extra]:
        """Take over our own mask where the server gives it back to us; the extras that are left."""
        extra = dict(order.extra)
        own = extra.pop(OWN, None)
        if own is not None and order.start is not None and order.mask is not None:
            if own.value.numel() != self.layout.prunable_size:
                raise WrongContent(f"a mask of {own.value.numel()} weights, expected {self.layout.prunable_size}")
            ledger.remember(order.start, order.mask, Mask(self.layout, own.value))
        return extra

    def _keep(self, ledger: ClientLedger) -> Memory:
        return [
            (tag, self.store.put(order), None if own is None else self.store.put(own))
            for tag, (order, own) in ledger.rounds().items()
        ]

    def _lack(self, client: int, order_bytes: bytes, error: UnknownMask) -> Reply:
        from ..wire.frame import read_frame

        tag = read_frame(memoryview(order_bytes), self.layout, len(order_bytes)).tag
        lack = encode(Message("lack", self.layout, tag, client, lacks=error.hash))
        return Reply(lack.data, [], lacks=True)


def said(error: Exception) -> str:
    """An error in one line, with the innermost line of code outside torch that it passed."""
    passed = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    file, line = next(place for place in reversed(passed) if _TORCH not in place[0].parents)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({file.name}, line {line})"


def update_message(update: Update, order: Order | Message, layout: Layout) -> Message:
    """An update as it will travel, in answer to an order or to the message that was one."""
    local = order.local
    assert local is not None
    weights = update.weights
    mask: Mask | None = weights.mask if weights is not None else None
    values = weights.packed() if weights is not None else None
    tail = layout.size - layout.trained_size
    carries: Any = "all" if local.statistics else "weights"
    metrics: Mapping[str, float] = dict(update.metrics)
    if local.report == "statistics":
        mask, carries = None, "statistics"
        values = values[len(values) - tail :] if values is not None else None
    elif values is not None and not local.statistics:
        values = values[: len(values) - tail]
    return Message(
        "update", layout, order.tag, update.client, n=update.n, key=order.key, mask=mask, values=values,
        carries=carries, counts=update.counts if mask is None and local.report == "counts" else None, metrics=metrics,
        extra=dict(update.extra),
    )  # fmt: skip
