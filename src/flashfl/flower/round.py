"""Messages to clients and what becomes of their replies: orders to train, and models to evaluate."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from flwr.app import Message, Metadata, RecordDict

from ..core.errors import FlashError, RunStopped
from ..core.exchange import Client, Evaluation, Order
from ..engine.encoding import Encoding
from ..engine.robust import most_samples
from ..engine.trust import LARGEST_METRIC
from . import records
from .registry import Registry

if TYPE_CHECKING:
    from ..engine.private import PrivateRound

log = logging.getLogger("flwr.flashfl")
SLACK = 1 << 16  # bytes a reply may have beyond the largest update: metrics, and the frames of extras


@dataclass
class Post:
    """A message on its way to a client."""

    client: Client
    order: Order
    metadata: Metadata  # its message id is known once Flower has taken the message
    sent: float = field(default_factory=time.monotonic)
    seconds: float | None = None  # how long a reply of the client took
    reminded: bool = False
    done: bool = False


class Exchange:
    """Sends messages to clients and hands their replies to the account of a round. Each client's first good one counts.

    Each reply is compared to the message it answers. Any other reply is dropped, and the reason is logged.
    """

    name: ClassVar[str] = "round"  # in the log

    def __init__(
        self,
        account: Encoding | PrivateRound,
        registry: Registry,
        kind: str = "train",
        sends: str = "order",
        takes: str = "update",
    ) -> None:
        """kind: of its messages. sends, takes: the names of what they carry, and of what replies carry."""
        self.account, self.kind, self.sends, self.takes = account, kind, sends, takes
        self.timeout = registry.options.timeout
        self.entries = registry.entries  # as of now: the registry replaces them when it looks again
        self.posts: list[Post] = []

    def post(self, client: Client, order: Order, data: bytes) -> Message:
        """The message that carries the bytes of an order to its client."""
        message = self._message(client, order, data)
        self.posts.append(Post(client, order, message.metadata))
        return message

    def _message(self, client: Client, order: Order, data: bytes) -> Message:
        content, group = records.blob(self.sends, data), ".".join(map(str, order.tag))
        if self.account.memory.sparse:
            content.update(records.fields("compute", {"sparse": 1}))
        return Message(content, self.entries[client.id].node, self.kind, ttl=self.timeout, group_id=group)

    @property
    def waiting(self) -> dict[str, Post]:
        """Unanswered posts by message id. Without an id, Flower never took the message."""
        return {p.metadata.message_id: p for p in self.posts if p.metadata.message_id and not p.done}

    @property
    def reply_times(self) -> list[float]:
        """Seconds that each good reply took."""
        return [p.seconds for p in self.posts if p.seconds is not None and p.client.id not in self.account.failures]

    def take(self, reply: Message) -> Message | None:
        """Deal with a reply; the message that must follow it, if the client lacks a mask."""
        about = reply.metadata.reply_to_message_id
        post = next((p for p in self.posts if p.metadata.message_id == about), None)
        if post is None:
            log.warning("node %d sent a reply that nobody waits for: dropped", reply.metadata.src_node_id)
        elif post.done:
            log.warning("client %d replied twice: the second reply is dropped", post.client.id)
        elif reply.has_error():
            self._drop(post, f"Flower reports error {reply.error.code}: {reply.error.reason}")
        elif reply.metadata.src_node_id != post.metadata.dst_node_id:
            log.warning("node %d replied in place of client %d: dropped", reply.metadata.src_node_id, post.client.id)
        else:
            return self._read(post, reply.content)
        return None

    def _read(self, post: Post, content: RecordDict) -> Message | None:
        try:
            if (why := records.failure(content)) is not None:
                self._drop(post, why)
            elif (data := self.read(post, content)) is not None:
                follow = self._message(post.client, post.order, data)
                post.metadata, post.reminded = follow.metadata, True
                return follow
        except FlashError as error:
            self._drop(post, f"{type(error).__name__}: {error}")
        post.done, post.seconds = True, time.monotonic() - post.sent
        return None

    def read(self, post: Post, content: RecordDict) -> bytes | None:
        """Count a reply, or raise a FlashError that says what is wrong with it; the order again if it lacks a mask."""
        client, account = post.client.id, self.account
        kind, data = records.read_blob(content, self.takes, "lack", limit=account.largest_update(client) + SLACK)
        if kind == "lack":
            return account.lacking(client, data)
        account.received(client, data)
        return None

    def _drop(self, post: Post, why: str) -> None:
        post.done = True
        self.account.failed(post.client.id, why)

    def stop_waiting(self) -> None:
        """Drop the clients that have not replied."""
        for post in self.posts:
            if not post.done:
                self._drop(post, f"no reply within {time.monotonic() - post.sent:.0f} s")

    def dropped(self) -> dict[int, str]:
        """Why clients were dropped, in words that are safe to print and store. The log is told too."""
        reasons = {client: records.printable(why) for client, why in sorted(self.account.failures.items())}
        for client, why in reasons.items():
            log.warning("client %d is dropped from this %s: %s", client, self.name, why)
        return reasons


class ClientEvaluation(Exchange):
    """Sends a model to the clients that hold samples back, and adds up what they find."""

    name = "evaluation"
    account: Encoding

    def __init__(self, account: Encoding, registry: Registry, share: bool) -> None:
        """`share`: the metric is a share of samples, so it is at most 1."""
        super().__init__(account, registry, "evaluate")
        self.share = share
        self._found: dict[int, tuple[int, float, float]] = {}  # samples, and sums of loss and metric over them

    def read(self, post: Post, content: RecordDict) -> bytes | None:
        if "lack" in content and not post.reminded:
            # Evaluating does not change what clients hold, so a client that lacks a mask is just sent the full one.
            return self.account.in_full(post.client.id)
        found, held = records.read_fields(content, "evaluated"), self.entries[post.client.id].held
        try:
            n, loss, metric = int(found["n"]), float(found["loss"]), float(found["metric"])
        except (KeyError, ValueError, OverflowError) as error:
            raise records.BadRecord(f"its evaluation cannot be read ({error!r})") from None
        possible = 0 <= metric <= n * (1 + 1e-5) if self.share else abs(metric) <= LARGEST_METRIC
        if n != held or not (abs(loss) <= LARGEST_METRIC and possible):
            raise records.BadRecord(
                f"it reports loss {loss} and metric {metric}, summed over {n} samples. Expected: sums in the valid "
                f"range, over the {held} held-back samples that it registered."
            )
        self._found[post.client.id] = (n, loss, metric)
        return None

    def close(self) -> Evaluation:
        """The mean over all samples of the clients that replied. Samples are bounded as in training."""
        self.dropped()
        found = [self._found[c] for c in sorted(self._found)]
        if self.account.robust.bounded and found:
            most = most_samples([n for n, _, _ in found])
            found = [
                (min(n, most), loss * min(1.0, most / n), metric * min(1.0, most / n)) for n, loss, metric in found
            ]
        total = sum(n for n, _, _ in found)
        if not total:
            raise RunStopped(
                "no client could evaluate the model. The state before this round is kept: resume the run when clients "
                "with held-back samples are present."
            )
        return Evaluation(sum(f[1] for f in found) / total, sum(f[2] for f in found) / total, self.account.traffic.down)
