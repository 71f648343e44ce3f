"""Flower as an engine: orders become messages to SuperNodes, everything else is as in a simulation.

`Exchange` sends the messages of one round to clients and reads their replies, `ClientEvaluation` models to evaluate.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

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
from .registry import Registry

if TYPE_CHECKING:
    from ..engine.private import PrivateRound

log = logging.getLogger("flwr.flashfl")
SLACK = 1 << 16  # bytes a reply may have beyond the largest update: metrics, and the frames of extras
_TOGETHER = 8  # messages pushed at a time
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
        this.ask(account.messages(orders))
        return this.settle()

    def _train_privately(self, vault: Vault, s: State, orders: list[tuple[Client, Order]]) -> Outcome:
        """Every step of a private round. A client that is silent in one is not waited for in the next."""
        from ..engine.private import PrivateRound  # only here, as it needs an extra
        from ..privacy.messages import MASKED

        present = [client.id for client in self.registry.present()]
        account = PrivateRound(vault, self.memory, s, orders, present)
        this = Exchange(account, self.registry, s.tag, "private", "answer")
        while True:
            this.ask(account.requests(), "train" if account.step == MASKED else "query")
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
        this.ask(account.messages((c, order) for c in present if this.entries[c.id].held), "evaluate")
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
        self, account: Encoding | PrivateRound, registry: Registry, tag: Tag, sends: str = "order",
        takes: str = "update",
    ) -> None:  # fmt: skip
        """sends, takes: the names of what messages carry, and of what replies carry."""
        self.account, self.registry, self.sends, self.takes = account, registry, sends, takes
        self.grid, self.options, self.attendance = registry.grid, registry.options, registry.attendance
        self.entries = registry.entries  # as of now: the registry replaces them when it looks again
        self.group = ".".join(map(str, tag))
        self.kind, self.posts = "", list[Post]()  # of the messages that are on their way
        self.silent: list[int] = []  # clients that gave no reply
        self.seconds = {"send": 0.0, "wait": 0.0}

    def ask(self, requests: Iterable[tuple[int, bytes]], kind: str = "train") -> None:
        """Send each client its bytes. Take replies until all are in, or as long as options and past rounds allow."""
        self.kind, self.posts = kind, []
        began = time.monotonic()
        self._push(self._post(client, data) for client, data in requests)
        sent = time.monotonic()
        self._wait(sent)
        self.seconds["send"] += sent - began
        self.seconds["wait"] += time.monotonic() - sent

    def _post(self, client: int, data: bytes) -> Message:
        message = self._message(client, data)
        self.posts.append(Post(client, message.metadata))
        return message

    def _message(self, client: int, data: bytes) -> Message:
        content = records.blob(self.sends, data)
        if self.account.memory.sparse:
            content.update(records.fields("compute", {"sparse": 1}))
        node = self.entries[client].node
        return Message(content, node, self.kind, ttl=self.options.timeout, group_id=self.group)

    def _push(self, messages: Iterable[Message]) -> None:
        """Send messages a few at a time: faster than one by one, and never all of them in memory."""
        rest = iter(messages)
        while some := list(itertools.islice(rest, _TOGETHER)):
            if not all(self.grid.push_messages(some)):
                log.warning("the SuperLink did not accept a message; its client will be dropped")

    def _wait(self, began: float) -> None:
        """Take replies until all are in or time is up, and drop the clients that did not reply.

        Flower's own loop looks every three seconds only.
        """
        pause, told = min(0.05, self.options.poll), False
        # Without an id, Flower never took the message.
        while waiting := {p.metadata.message_id: p for p in self.posts if p.metadata.message_id and not p.done}:
            missing = [post.client for post in waiting.values()]
            times = [p.seconds for p in self.posts if p.seconds is not None and p.client not in self.account.failures]
            allowed = self.attendance.time_allowed(self.kind, missing, times)
            waited, so_far = time.monotonic() - began, f"{len(times)} of {len(self.posts)} replies are in"
            if waited >= allowed:
                log.warning("waited %.0f s for %s; %s", waited, _names(missing), so_far)
                self.silent += missing
                self.attendance.late |= waiting
                break
            if not told and times and waited > max(times) + _PATIENT:
                told = True
                log.info("%s; waiting up to %.0f s for %s", so_far, allowed - waited, _names(missing))
            if not self._pull(list(waiting)):
                time.sleep(pause)
                pause = min(self.options.poll, 2 * pause)
        for post in self.posts:
            if not post.done:
                self._drop(post, f"no reply within {time.monotonic() - post.sent:.0f} s")

    def _pull(self, messages: list[str]) -> bool:
        """Take the replies to these messages that have arrived; whether there were any."""
        now, late = time.monotonic(), self.attendance.late
        late = self.attendance.late = {i: p for i, p in late.items() if now - p.sent < self.options.timeout}
        replies = list(self.grid.pull_messages([*messages, *late]))
        for reply in replies:
            post = late.pop(reply.metadata.reply_to_message_id, None)
            if post is None:
                self._take(reply)
            elif not reply.has_error():
                seconds = time.monotonic() - post.sent
                log.warning("client %d replied after %.0f s, too late: dropped", post.client, seconds)
                self.attendance.replied(post.metadata.message_type, post.client, seconds)
        return bool(replies)

    def _take(self, reply: Message) -> None:
        about, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        post = next((p for p in self.posts if p.metadata.message_id == about), None)
        if post is None:
            log.warning("node %d sent a reply, but no request to it is open; dropped", sender)
        elif post.done:
            log.warning("client %d replied twice: the second reply is dropped", post.client)
        elif reply.has_error():
            self._drop(post, f"Flower reports error {reply.error.code}: {reply.error.reason}")
        elif sender != post.metadata.dst_node_id:
            log.warning("node %d replied for client %d, which belongs to another node; dropped", sender, post.client)
        else:
            self._read(post, reply.content)

    def _read(self, post: Post, content: RecordDict) -> None:
        """Count a reply. If the client lacks a mask, it is sent another message."""
        try:
            if (why := records.failure(content)) is not None:
                self._drop(post, why)
            elif (data := self._count(post, content)) is not None:
                follow = self._message(post.client, data)
                post.metadata, post.reminded = follow.metadata, True
                return self._push([follow])
        except FlashError as error:
            self._drop(post, f"{type(error).__name__}: {error}")
        post.done, post.seconds = True, time.monotonic() - post.sent
        self.attendance.replied(self.kind, post.client, post.seconds)

    def _count(self, post: Post, content: RecordDict) -> bytes | None:
        """Count a reply, or raise a FlashError that says what is wrong with it; the order again if it lacks a mask."""
        client, account = post.client, self.account
        kind, data = records.read_blob(content, self.takes, "lack", limit=account.largest_update(client) + SLACK)
        if kind == "lack":
            return account.lacking(client, data)
        account.received(client, data)
        return None

    def _drop(self, post: Post, why: str) -> None:
        post.done = True
        self.account.failed(post.client, why)

    def settle(self) -> Outcome:
        """Close the account: the round is over. Clients that did not reply are passed over for a while."""
        began = time.monotonic()
        outcome = self.account.close()
        for client, what in sorted(self.account.cohort.notes.items()) if self.account.cohort else ():
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
    account: Encoding

    def __init__(self, account: Encoding, registry: Registry, tag: Tag, share: bool) -> None:
        """`share`: the metric is a share of samples, so it is at most 1."""
        super().__init__(account, registry, tag)
        self.share = share
        self._found: dict[int, tuple[int, float, float]] = {}  # samples, and sums of loss and metric over them

    def _count(self, post: Post, content: RecordDict) -> bytes | None:
        if "lack" in content and not post.reminded:
            # Evaluating does not change what clients hold, so a client that lacks a mask is just sent the full one.
            return self.account.in_full(post.client)
        found, held = records.read_fields(content, "evaluated"), self.entries[post.client].held
        try:
            n, loss, metric = int(found["n"]), float(found["loss"]), float(found["metric"])
        except (KeyError, ValueError, OverflowError) as error:
            raise records.BadRecord(f"its evaluation cannot be read ({error!r})") from None
        possible = 0 <= metric <= n * (1 + 1e-5) if self.share else abs(metric) <= LARGEST_METRIC
        if n != held or not (abs(loss) <= LARGEST_METRIC and possible):
            raise records.BadRecord(
                f"it reports {n} samples with a total loss of {loss} and a total metric of {metric}. Expected {held} "
                f"samples, a total loss of at most {LARGEST_METRIC:g}, and a total metric from "
                f"{0 if self.share else -LARGEST_METRIC:g} to {held if self.share else LARGEST_METRIC:g}."
            )
        self._found[post.client] = (n, loss, metric)
        return None

    def mean(self) -> Evaluation:
        """The mean over all samples of the clients that replied. Samples are bounded as in training."""
        self.attendance.missed(self.silent)
        self.registry.doubt(self._dropped())
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
