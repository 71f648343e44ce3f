"""Messages to clients and what becomes of their replies: orders to train, and models to evaluate."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from flwr.app import Message, Metadata, RecordDict

from .. import wire
from ..aggregate import add
from ..core.errors import FlashError, RunStopped
from ..core.exchange import Client, Evaluation, Order, Outcome, Sums, Traffic
from ..core.layout import Layout
from ..engine.robust import trimmed_sums
from ..engine.server import Inbox, ServerSide
from ..wire import WireError, decode, encode
from ..wire.trust import LARGEST_METRIC
from ..wire.values import Form
from . import records

log = logging.getLogger("flwr.flashfl")
SLACK = 1 << 16  # bytes a reply may have beyond the largest update: metrics, and the frames of extras


@dataclass
class Post:
    """A message on its way to a client."""

    client: Client
    order: Order
    metadata: Metadata  # its message id is known once Flower has taken the message
    limit: int  # bytes of the largest reply that fits the order
    sent: float = field(default_factory=time.monotonic)
    seconds: float | None = None  # how long a reply of the client took
    reminded: bool = False
    done: bool = False


class Exchange:
    """Sends messages to clients and takes their replies. The first good reply of each client counts.

    Each reply is compared to the message it answers. Any other reply is dropped, and the reason is logged.
    """

    kind: ClassVar[str]
    failures: dict[int, str]  # client -> why it was dropped

    def __init__(self, server: ServerSide, nodes: Mapping[int, int], timeout: float) -> None:
        self.server, self.nodes, self.timeout = server, nodes, timeout
        self.posts: list[Post] = []
        self.doubtful: set[int] = set()  # clients that may not be what they registered as

    def post(self, client: Client, order: Order) -> Message:
        """The message that carries an order to its client."""
        raise NotImplementedError

    def read(self, post: Post, content: RecordDict) -> Message | None:
        """Count a reply, or raise a FlashError that says what is wrong with it; a message that must follow it."""
        raise NotImplementedError

    def fail(self, post: Post, why: str) -> None:
        """Drop a client, for a reason that may quote it."""
        raise NotImplementedError

    def message(self, client: Client, order: Order, data: bytes) -> Message:
        content, group = records.blob("order", data), ".".join(map(str, order.tag))
        return Message(content, self.nodes[client.id], self.kind, ttl=self.timeout, group_id=group)

    @property
    def waiting(self) -> dict[str, Post]:
        """Unanswered posts by message id."""
        return {post.metadata.message_id: post for post in self.posts if not post.done}

    @property
    def reply_times(self) -> list[float]:
        """Seconds that each good reply took."""
        return [p.seconds for p in self.posts if p.seconds is not None and p.client.id not in self.failures]

    def take(self, reply: Message) -> Message | None:
        """Deal with a reply; the message that must follow it, if the client lacks a mask."""
        about = reply.metadata.reply_to_message_id
        post = next((p for p in self.posts if p.metadata.message_id == about), None)
        if post is None:
            log.warning("node %d sent a reply that nobody waits for: dropped", reply.metadata.src_node_id)
        elif post.done:
            log.warning("client %d replied twice: the second reply is dropped", post.client.id)
        elif reply.has_error():
            self.doubtful.add(post.client.id)
            self._drop(post, f"Flower reports error {reply.error.code}: {reply.error.reason}")
        elif reply.metadata.src_node_id != post.metadata.dst_node_id:
            log.warning("node %d replied in place of client %d: dropped", reply.metadata.src_node_id, post.client.id)
        else:
            return self._read(post, reply.content)
        return None

    def _read(self, post: Post, content: RecordDict) -> Message | None:
        try:
            if (why := records.failure(content)) is not None:
                self.doubtful.add(post.client.id)
                self._drop(post, why)
            elif (follow := self.read(post, content)) is not None:
                post.metadata, post.reminded = follow.metadata, True
                return follow
            else:
                post.done = True
        except FlashError as error:
            self._drop(post, f"{type(error).__name__}: {error}")
        post.seconds = time.monotonic() - post.sent
        return None

    def _drop(self, post: Post, why: str) -> None:
        post.done = True
        self.fail(post, why)

    def stop_waiting(self) -> list[Post]:
        """Drop the clients that have not replied."""
        silent = [post for post in self.posts if not post.done]
        for post in silent:
            self._drop(post, f"no reply within {time.monotonic() - post.sent:.0f} s")
        return silent


class Round(Exchange):
    """One round of training."""

    kind = "train"

    def __init__(self, server: ServerSide, nodes: Mapping[int, int], timeout: float, trim: float = 0.0) -> None:
        super().__init__(server, nodes, timeout)
        self.trim = trim
        self.inbox = Inbox(server)
        self.failures = self.inbox.failures

    def post(self, client: Client, order: Order) -> Message:
        message = self.server.message(client, order)
        encoded = self.server.encode(message)
        self.inbox.sent(message, encoded)
        sent = self.message(client, order, encoded.data)
        self.posts.append(Post(client, order, sent.metadata, largest_update(message, self.server.values)))
        return sent

    def read(self, post: Post, content: RecordDict) -> Message | None:
        kind, data = records.read_blob(content, "update", "lack", limit=post.limit)
        if kind == "lack":
            return self._remind(post, data)
        self.inbox.arrived(post.client.id, data)
        return None

    def _remind(self, post: Post, data: bytes) -> Message:
        """A client lacks a mask: send it the full one, once."""
        lack = decode(data, self.server.layout)
        if lack.kind != "lack" or lack.parts is None or lack.client != post.client.id or post.reminded:
            raise WireError("it says for no good reason that it lacks a mask")
        self.inbox.traffic += lack.parts.traffic("lack")
        message, encoded = self.server.remind(post.client, post.order)
        self.inbox.sent(message, encoded)
        return self.message(post.client, post.order, encoded.data)

    def fail(self, post: Post, why: str) -> None:
        self.inbox.failed(post.client.id, why)

    def close(self, layout: Layout) -> Outcome:
        """What the good updates add up to."""
        updates = self.inbox.updates()
        sums = trimmed_sums(layout, updates, self.trim) if self.trim else Sums(layout)
        for update in updates:  # trimming has used them up
            add(sums, update)
        self.inbox.spool.close()
        self.doubtful |= {c for c, why in self.failures.items() if why.startswith("WrongContent")}
        failures = {client: records.printable(why) for client, why in sorted(self.failures.items())}
        for client, why in failures.items():
            log.warning("client %d is dropped from this round: %s", client, why)
        return Outcome(sums, self.inbox.traffic, failures)


def largest_update(order: wire.Message, values: Form) -> int:
    """Bytes of the largest update that can answer an order: no mask takes more than a bit for each weight."""
    start, mask, layout = order.local.start if order.local else None, order.mask, order.layout
    active = max(sum(start.budgets) if start else 0, mask.active if mask else 0)
    plain = wire.size_with(replace(order, extra={}, fixed={}), active, layout.prunable_size // 8 + 2, values).total
    extras = max([layout.prunable_size, *(extra.value.numel() for extra in order.extra.values())])
    return plain + 4 * extras * len(order.extra) + SLACK


class ClientEvaluation(Exchange):
    """Sends a model to the clients that hold samples back, and adds up what they find."""

    kind = "evaluate"

    def __init__(
        self, server: ServerSide, nodes: Mapping[int, int], timeout: float, held: Mapping[int, int], share: bool = False
    ) -> None:
        """`held`: each client's number of samples. `share`: the metric is a share of samples, so it is at most 1."""
        super().__init__(server, nodes, timeout)
        self.held, self.share = held, share
        self.traffic = Traffic()
        self.failures = {}
        self._found: dict[int, tuple[int, float, float]] = {}  # samples, and sums of loss and metric over them

    def post(self, client: Client, order: Order) -> Message:
        sent = self._order(client, order)
        self.posts.append(Post(client, order, sent.metadata, SLACK))
        return sent

    def _order(self, client: Client, order: Order, full: bool = False) -> Message:
        message = self.server.message(client, order)
        # Evaluating does not change what clients hold, so a client that lacks a mask is just sent the full one.
        encoded = encode(message, (), self.server.values) if full else self.server.encode(message)
        self.traffic += encoded.parts.traffic("order")
        return self.message(client, order, encoded.data)

    def read(self, post: Post, content: RecordDict) -> Message | None:
        if "lack" in content and not post.reminded:
            return self._order(post.client, post.order, full=True)
        found, held = records.read_fields(content, "evaluated"), self.held[post.client.id]
        try:
            n, loss, metric = int(found["n"]), float(found["loss"]), float(found["metric"])
        except (KeyError, ValueError, OverflowError) as error:
            raise records.BadRecord(f"its evaluation cannot be read ({error!r})") from None
        possible = 0 <= metric <= n * (1 + 1e-5) if self.share else abs(metric) <= LARGEST_METRIC
        if n != held or not (abs(loss) <= LARGEST_METRIC and possible):
            raise records.BadRecord(f"loss {loss} and metric {metric} of {n} samples; it registered {held} samples")
        self._found[post.client.id] = (n, loss, metric)
        return None

    def fail(self, post: Post, why: str) -> None:
        self.doubtful.add(post.client.id)
        self.failures[post.client.id] = records.printable(why)

    def close(self) -> Evaluation:
        """The mean over all samples of the clients that replied."""
        for client, why in sorted(self.failures.items()):
            log.warning("client %d is dropped from this evaluation: %s", client, why)
        found = [self._found[c] for c in sorted(self._found)]
        total = sum(n for n, _, _ in found)
        if not total:
            raise RunStopped("no client could evaluate the model. The state before this round is kept.")
        return Evaluation(sum(f[1] for f in found) / total, sum(f[2] for f in found) / total, self.traffic.down)
