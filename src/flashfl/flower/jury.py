"""Clients that judge a model on samples of their own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flwr.app import Message

from ..core.errors import RunStopped
from ..core.exchange import Client, Evaluation, Order, Traffic
from ..engine.encoding import Server
from ..engine.trust import LARGEST_METRIC
from ..wire import encode
from . import records
from .roster import Entry

log = logging.getLogger("flwr.flashfl")


class Jury:
    """Sends a model to those who hold samples back and adds up what they find."""

    def __init__(
        self, server: Server, order: Order, entries: Mapping[int, Entry], timeout: float, share: bool = False
    ) -> None:
        """`share`: the metric is a share of samples, as accuracy is, so nobody's is above 1."""
        self.server, self.order, self.entries, self.timeout, self.share = server, order, entries, timeout, share
        self.traffic = Traffic()
        self._posts: list[tuple[Client, Any]] = []
        self._votes: dict[int, tuple[int, float, float]] = {}
        self.out: dict[int, str] = {}
        self._reminded: set[int] = set()

    def post(self, client: Client, full: bool = False) -> Message:
        message = self.server.message(client, self.order)
        # Judging leaves what clients hold as it is, so a client that lacks a mask is sent it whole and that is all.
        encoded = encode(message, (), self.server.values) if full else self.server.encode(message)
        self.traffic += encoded.parts.traffic("order")
        content = records.blob("order", encoded.data)
        sent = Message(content, self.entries[client.id].node, "evaluate", ttl=self.timeout)
        self._posts.append((client, sent.metadata))
        return sent

    @property
    def waiting(self) -> dict[str, Client]:
        done = {*self._votes, *self.out}
        return {meta.message_id: client for client, meta in self._posts if client.id not in done}

    def take(self, reply: Message) -> Message | None:
        client = self.waiting.get(reply.metadata.reply_to_message_id)
        if client is None:
            return None
        if reply.has_error():
            self.out[client.id] = str(reply.error.reason)[:300]
        elif "lack" in reply.content and client.id not in self._reminded:
            self._reminded.add(client.id)
            return self.post(client, full=True)
        else:
            self._count(client, records.failure(reply.content), records.read_fields(reply.content, "judged"))
        return None

    def _count(self, client: Client, why: str | None, found: Mapping[str, Any]) -> None:
        held = self.entries[client.id].held
        try:
            n, loss, metric = int(found["n"]), float(found["loss"]), float(found["metric"])
            known = 0 <= metric <= n * (1 + 1e-5) if self.share else abs(metric) <= LARGEST_METRIC
            if n != held or not (abs(loss) <= LARGEST_METRIC and known):
                raise ValueError(f"loss {loss} and metric {metric} of {n} samples, expected {held} samples")
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            self.out[client.id] = why or f"its verdict cannot be read ({error})"
            return
        self._votes[client.id] = (n, loss, metric)

    def verdict(self) -> Evaluation:
        """Mean over all samples that were judged; whoever gave no good answer is left out."""
        for client in self.waiting.values():
            self.out[client.id] = "no reply in time"
        for client_id, why in sorted(self.out.items()):
            log.warning("client %d is left out of this evaluation: %s", client_id, why)
        total = sum(n for n, _, _ in self._votes.values())
        if not total:
            raise RunStopped("no client could judge the model; the state before this round is kept")
        votes = [self._votes[c] for c in sorted(self._votes)]
        return Evaluation(sum(v[1] for v in votes) / total, sum(v[2] for v in votes) / total, self.traffic.down)
