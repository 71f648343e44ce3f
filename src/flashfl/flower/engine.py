"""Flower as an engine: orders become messages to SuperNodes, everything else is as in a simulation.

`Exchange` sends the messages of one round to clients and reads their replies, `ClientEvaluation` models to evaluate.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from flwr.app import Message, RecordDict

from ..core.engine import JSON
from ..core.errors import FlashError, RunStopped
from ..core.exchange import Client, Evaluation, Local, Order, Outcome, Tag
from ..core.mask import Weights
from ..core.record import Score
from ..core.state import State
from ..data.task import Task, accuracy
from ..engine.encoding import Encoding
from ..engine.memory import ClientMemory
from ..engine.robust import Robust, most_samples
from ..engine.sparse import choose
from ..engine.store import MaskStore
from ..engine.train import Trainer
from ..engine.trust import LARGEST_METRIC
from ..engine.vault import Vault, open_vault
from ..run.config import TrainConfig
from . import records
from .attendance import Post
from .records import log
from .registry import Registry

SLACK = 1 << 16  # bytes a reply may have beyond the largest update: metrics, and the frames of extras
_TOGETHER = 8  # messages pushed at a time
_NOT_ACCEPTED = (
    "the SuperLink did not accept the message to it: it is too large, or the node is gone. The log of the SuperLink "
    "says more. If it is too large, lower the density, or send values in fewer bits (not in private runs)"
)
_PATIENT = 10.0  # seconds of waiting for the last clients after which the log says so


class FlowerEngine:
    """Sends orders to Flower nodes and reads their updates. It tracks which masks each client has stored."""

    device = torch.device("cpu")

    def __init__(self, task: Task, registry: Registry, train: TrainConfig, folder: Path | None = None) -> None:
        """`train` says how values travel and how updates are clipped and trimmed; `folder` is for masks."""
        self.task, self.registry = task, registry
        self.memory = ClientMemory(MaskStore.in_folder(task.layout, folder), simulated=False)
        self.down, self.robust = train.down, Robust.of(train)
        self.vault = open_vault(train, registry.size, folder)
        self._tag: Tag = (0, 0, 0)
        self._trainer: Trainer | None = None
        self._may_be_sparse = train.sparse_compute

    def prepare(self, s: State) -> dict[str, JSON]:
        """Measure on the server whether native kernels are faster. The choice holds for all clients."""
        return choose(self.task, s, self.memory, threads=1) if self._may_be_sparse else {}

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        """Send every order to its client and wait for replies."""
        self._tag = s.tag
        if self.vault is not None:
            return self._train_privately(self.vault, s, list(orders))
        account = Encoding(self.memory, self.down, self.robust)
        this = Exchange(account, self.registry, s.tag)
        this.ask((client.id, account.sent(client, order)) for client, order in orders)
        return this.settle()

    def _train_privately(self, vault: Vault, s: State, orders: list[tuple[Client, Order]]) -> Outcome:
        """Every step of a private round. A client that is silent in one is not waited for in the next."""
        from ..engine.private import PrivateRound  # only here, as it needs an extra
        from ..privacy.messages import Step

        present = [client.id for client in self.registry.present()]
        account = PrivateRound(vault, self.memory, s, orders, present)
        this = Exchange(account, self.registry, s.tag, "private", "answer")
        while True:
            this.ask(account.requests(), "train" if account.step == Step.MASKED else "query")
            if not account.advance():
                return this.settle()

    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over the server's test samples. Without them, over those that clients hold back."""
        if self.task.test is None:
            return self._ask_clients(weights, statistics)
        self._trainer = self._trainer or Trainer(self.task)
        loss, metric = self._trainer.evaluate_all(weights, self.task.test, statistics)
        return Evaluation(loss / len(self.task.test), metric / len(self.task.test))

    def _ask_clients(self, weights: Weights, statistics: bool) -> Evaluation:
        order = Order(weights, Local(statistics=statistics), 0, self._tag)
        share = self.task.metric is accuracy and self.task.metric_known
        present = self.registry.present()  # before anything else: it may find other clients than the last look
        account = Encoding(self.memory, self.down, self.robust)
        this = ClientEvaluation(account, self.registry, self._tag, share)
        this.ask(((c.id, account.sent(c, order)) for c in present if this.entries[c.id].held), "evaluate")
        return this.mean()

    def evaluate_personal(self, weights: Weights, clients: Sequence[tuple[Client, Local]]) -> Score | None:
        """Always None: the server has neither the clients' masks nor their labels."""
        return None

    def close(self) -> None:
        pass


class Exchange:
    """Sends messages to clients and hands their replies to the account of a round. Each client's first good one counts.

    Each reply is compared to the message it answers. Any other reply is dropped, and the reason is logged.
    """

    name: ClassVar[str] = "round"  # in the log

    def __init__(
        self, account: Encoding, registry: Registry, tag: Tag, sends: str = "order", takes: str = "update"
    ) -> None:
        """sends, takes: the names of what messages carry, and of what replies carry."""
        self.account, self.registry, self.sends, self.takes = account, registry, sends, takes
        self.grid, self.options, self.attendance = registry.grid, registry.options, registry.attendance
        self.entries = registry.entries  # as of now
        self.group = ".".join(map(str, tag))
        self.posts: dict[str, Post] = {}  # those whose replies are waited for, by message id
        self.times: dict[int, float] = {}  # how long a client took to reply to the last one
        self.silent: list[int] = []  # clients that gave no reply
        self.seconds = {"send": 0.0, "wait": 0.0}

    def ask(self, requests: Iterable[tuple[int, bytes]], kind: str = "train") -> None:
        """Send each client its bytes. Take replies until all are in, or as long as options and past rounds allow."""
        self.posts, self.times = {}, {}
        began = time.monotonic()
        rest = ((Post(client, kind), data) for client, data in requests)
        while some := list(itertools.islice(rest, _TOGETHER)):  # never all messages in memory
            self._send(some)
        sent = time.monotonic()
        self._wait(kind)
        self.seconds["send"] += sent - began
        self.seconds["wait"] += time.monotonic() - sent

    def _send(self, posts: list[tuple[Post, bytes]]) -> None:
        """Send messages together, which is faster than one by one."""
        messages = [self._message(post, data) for post, data in posts]
        # Flower returns no ids at all if the messages are too large for the SuperLink.
        for (post, _), message_id in itertools.zip_longest(posts, self.grid.push_messages(messages)):
            if message_id:
                self.posts[message_id] = post
            else:
                self.account.failed(post.client, _NOT_ACCEPTED)

    def _message(self, post: Post, data: bytes) -> Message:
        content = records.blob(self.sends, data)
        if self.account.memory.sparse:
            content.update(records.fields("compute", {"sparse": 1}))
        node = self.entries[post.client].node
        return Message(content, node, post.kind, ttl=self.options.timeout, group_id=self.group)

    def _wait(self, kind: str) -> None:
        """Take replies until all are in or time is up, and drop the clients that did not reply.

        Flower's own loop looks every three seconds only.
        """
        began, asked = time.monotonic(), len(self.posts)
        pause, told = min(0.05, self.options.poll), False
        while self.posts:
            missing = [post.client for post in self.posts.values()]
            times = [seconds for client, seconds in self.times.items() if client not in self.account.failures]
            allowed = self.attendance.time_allowed(kind, missing, times)
            waited, so_far = time.monotonic() - began, f"{len(times)} of {asked} replies are in"
            if waited >= allowed:
                log.warning("waited %.0f s for %s; %s", waited, _names(missing), so_far)
                self.silent += missing
                self.attendance.late |= self.posts
                for post in self.posts.values():
                    self.account.failed(post.client, f"no reply within {time.monotonic() - post.sent:.0f} s")
                return
            if not told and times and waited > max(times) + _PATIENT:
                told = True
                log.info("%s; waiting up to %.0f s for %s", so_far, allowed - waited, _names(missing))
            if not self._pull():
                time.sleep(pause)
                pause = min(self.options.poll, 2 * pause)

    def _pull(self) -> bool:
        """Take the replies that have arrived; whether there were any."""
        now, late = time.monotonic(), self.attendance.late
        late = self.attendance.late = {i: p for i, p in late.items() if now - p.sent < self.options.timeout}
        replies = list(self.grid.pull_messages([*self.posts, *late]))
        for reply in replies:
            post = late.pop(reply.metadata.reply_to_message_id, None)
            if post is None:
                self._take(reply)
            elif not reply.has_error():
                seconds = time.monotonic() - post.sent
                log.warning("client %d replied after %.0f s, too late: dropped", post.client, seconds)
                self.attendance.replied(post.kind, post.client, seconds)
        return bool(replies)

    def _take(self, reply: Message) -> None:
        about, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        post = self.posts.get(about)
        if post is None:
            log.warning("node %d sent a reply that this %s does not wait for; ignored", sender, self.name)
        elif reply.has_error():
            del self.posts[about]
            why = (
                f"Flower reports error {reply.error.code}: {reply.error.reason}. The log of its SuperNode may say more"
            )
            self.account.failed(post.client, why)
        elif sender != self.entries[post.client].node:
            log.warning("node %d replied for client %d, which belongs to another node; dropped", sender, post.client)
        else:
            del self.posts[about]
            self._read(post, reply.content)

    def _read(self, post: Post, content: RecordDict) -> None:
        """Count a reply. If the client lacks a mask, it is sent another message."""
        try:
            if (why := records.failure(content)) is not None:
                self.account.failed(post.client, why)
            elif (data := self._count(post, content)) is not None:
                post.again = True
                return self._send([(post, data)])
        except FlashError as error:
            self.account.failed(post.client, f"{type(error).__name__}: {error}")
        self.times[post.client] = time.monotonic() - post.sent
        self.attendance.replied(post.kind, post.client, self.times[post.client])

    def _count(self, post: Post, content: RecordDict) -> bytes | None:
        """Count a reply, or raise a FlashError that says what is wrong with it; the order again if it lacks a mask."""
        client, account = post.client, self.account
        kind, data = records.read_blob(content, self.takes, "lack", limit=account.largest_update(client) + SLACK)
        if kind == "lack":
            return account.lacking(client, data)
        account.received(client, data)
        return None

    def settle(self) -> Outcome:
        """Close the account: the round is over. Clients that did not reply are passed over for a while."""
        began = time.monotonic()
        outcome = self.account.close()
        for client, what in sorted(self.account.notes.items()):
            log.warning("client %d: %s", client, what)
        self.attendance.round_over(self.silent)
        self.registry.doubt(outcome.failures)
        self.registry.stale = True
        seconds = {**self.seconds, "check": time.monotonic() - began}
        return replace(outcome, failures=self._dropped(), seconds=seconds)

    def _dropped(self) -> dict[int, str]:
        """Why clients were dropped, in words that are safe to print and store. The log is told too."""
        reasons = {client: records.printable(why) for client, why in sorted(self.account.failures.items())}
        for client, why in reasons.items():
            log.warning("client %d is dropped from this %s: %s", client, self.name, why)
        return reasons


def _names(clients: list[int]) -> str:
    return ("client " if len(clients) == 1 else "clients ") + ", ".join(map(str, sorted(clients)))


class ClientEvaluation(Exchange):
    """Sends a model to the clients that hold samples back, and adds up what they find."""

    name = "evaluation"

    def __init__(self, account: Encoding, registry: Registry, tag: Tag, share: bool) -> None:
        """`share`: the metric is a share of samples, so it is at most 1."""
        super().__init__(account, registry, tag)
        self.share = share
        self._found: dict[int, tuple[int, float, float]] = {}  # samples, and sums of loss and metric over them

    def _count(self, post: Post, content: RecordDict) -> bytes | None:
        if "lack" in content and not post.again:
            # Evaluating does not change what clients hold, so a client that lacks a mask is just sent the full one.
            return self.account.in_full(post.client)
        found, held = records.read_fields(content, "evaluated"), self.entries[post.client].held
        n, *sums = (found.get(name) for name in ("n", "loss", "metric"))
        loss, metric = (value if isinstance(value, float) else math.nan for value in sums)
        least, most = (0.0, held * (1 + 1e-5)) if self.share else (-LARGEST_METRIC, LARGEST_METRIC)
        if not (n == held and abs(loss) <= LARGEST_METRIC and least <= metric <= most):
            raise records.BadRecord(
                f"it reports {n} samples with a total loss of {loss} and a total metric of {metric}. Expected {held} "
                f"samples, a total loss of at most {LARGEST_METRIC:g}, and a total metric from {least:g} to {most:g}."
            )
        self._found[post.client] = (held, loss, metric)
        return None

    def mean(self) -> Evaluation:
        """The mean over all samples of the clients that replied. Samples are bounded as in training."""
        self.attendance.missed(self.silent)
        dropped = self._dropped()
        self.registry.doubt(dropped)
        if not self._found:
            why = "; ".join(f"client {client}: {reason}" for client, reason in list(dropped.items())[:3])
            raise RunStopped(
                f"no client could evaluate the model{why and f' ({why})'}. The state before this round is kept. "
                "Correct what the reasons say, or start clients with held-back samples. Then resume the run."
            )
        found = [self._found[c] for c in sorted(self._found)]
        if self.account.robust.bounded:
            most = most_samples([n for n, _, _ in found])
            found = [
                (min(n, most), loss * min(1.0, most / n), metric * min(1.0, most / n)) for n, loss, metric in found
            ]
        total = sum(n for n, _, _ in found)
        return Evaluation(sum(f[1] for f in found) / total, sum(f[2] for f in found) / total, self.account.traffic.down)
