"""One round's messages to clients and what becomes of their replies, whoever carries them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message

from ..core.exchange import Client, Order, Outcome
from ..engine.encoding import Server
from ..wire import WireError
from . import records

log = logging.getLogger("flwr.flashfl")


@dataclass
class Post:
    """An order on its way: to whom, in which message, and whether it has been answered."""

    client: Client
    order: Order
    metadata: Any  # of the Flower message; its id is known once it is pushed
    done: bool = False


class Round:
    """Orders go out by `post`, replies come in by `take`; `close` says what they add up to.

    Every reply is held against the message it answers: the first good one counts, anything else is left out, and why
    is logged and recorded.
    """

    def __init__(self, server: Server, nodes: Mapping[int, int] | Any, timeout: float) -> None:
        self.nodes, self.timeout = nodes, timeout
        self.account = server.open()
        self.posts: list[Post] = []
        self.doubtful: set[int] = set()  # clients that may not be what they said they are

    def post(self, client: Client, order: Order) -> Message:
        """The message that carries an order to its client."""
        sent = self._message(client, order, self.account.sent(client, order))
        self.posts.append(Post(client, order, sent.metadata))
        return sent

    def _message(self, client: Client, order: Order, data: bytes) -> Message:
        stage, number, attempt = order.tag
        group = f"{stage}.{number}.{attempt}"
        content = records.blob("order", data)
        return Message(content, self.nodes[client.id], "train", ttl=self.timeout, group_id=group)

    @property
    def waiting(self) -> dict[str, Post]:
        """Unanswered posts by message id."""
        return {post.metadata.message_id: post for post in self.posts if not post.done}

    def take(self, reply: Message) -> Message | None:
        """Deal with a reply; the message that must follow it, if the client lacks a mask."""
        about = reply.metadata.reply_to_message_id
        post = next((p for p in self.posts if p.metadata.message_id == about), None)
        if post is None:
            log.warning("a reply that is not of this round is left out (node %d)", reply.metadata.src_node_id)
            return None
        if post.done:
            log.warning("client %d replied twice: the second reply is left out", post.client.id)
            return None
        if reply.has_error():
            self.doubtful.add(post.client.id)
            self._fail(post, f"Flower reports error {reply.error.code}: {str(reply.error.reason)[:300]}")
            return None
        if reply.metadata.src_node_id != post.metadata.dst_node_id:
            log.warning("node %d replied in place of client %d: left out", reply.metadata.src_node_id, post.client.id)
            return None
        return self._read(post, reply)

    def _read(self, post: Post, reply: Message) -> Message | None:
        if (why := records.failure(reply.content)) is not None:
            self.doubtful.add(post.client.id)
            self._fail(post, why)
            return None
        try:
            kind, data = records.read_blob(reply.content, "update", "lack")
        except records.BadRecord as error:
            self._fail(post, f"BadRecord: {error}")
            return None
        if kind == "lack":
            return self._remind(post, data)
        post.done = True
        self.account.received(post.client.id, data)
        return None

    def _remind(self, post: Post, data: bytes) -> Message | None:
        """A client lacks a mask: it is sent the full one, once."""
        try:
            full = self.account.lacking(post.client.id, data)
        except WireError as error:
            self._fail(post, f"{type(error).__name__}: {error}")
            return None
        sent = self._message(post.client, post.order, full)
        post.metadata = sent.metadata
        return sent

    def _fail(self, post: Post, why: str) -> None:
        post.done = True
        self.account.failed(post.client.id, why)

    def close(self) -> Outcome:
        """What the good updates add up to; whoever has not answered by now is left out."""
        for post in self.posts:
            if not post.done:
                self._fail(post, f"no reply within {self.timeout:g} s")
        outcome = self.account.close()
        self.doubtful |= {c for c, why in outcome.failures.items() if why.startswith("WrongContent")}
        for client, why in outcome.failures.items():
            log.warning("client %d is left out of this round: %s", client, why)
        return outcome
