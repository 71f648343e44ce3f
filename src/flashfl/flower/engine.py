"""Flower as an engine: orders become messages to SuperNodes, everything else is as in a simulation."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from flwr.app import Message

from ..core.engine import JSON
from ..core.exchange import Client, Evaluation, Local, Order, Outcome, Tag
from ..core.mask import Weights
from ..core.record import Score
from ..core.state import State
from ..data.task import Task, accuracy
from ..engine.encoding import Encoding
from ..engine.memory import ClientMemory
from ..engine.robust import Robust
from ..engine.sparse import choose
from ..engine.store import MaskStore
from ..engine.train import Trainer
from ..run.config import TrainConfig
from .registry import Registry
from .round import ClientEvaluation, Exchange, Post

if TYPE_CHECKING:
    from ..engine.vault import Vault

log = logging.getLogger("flwr.flashfl")
_TOGETHER = 8  # messages pushed at a time
_PATIENT = 10.0  # seconds of waiting for the last clients after which the log says so


class FlowerEngine:
    """Sends orders to Flower nodes and reads their updates. It tracks which masks each client has stored."""

    device = torch.device("cpu")

    def __init__(self, task: Task, registry: Registry, train: TrainConfig, folder: Path | None = None) -> None:
        """`train` says how values travel and how updates are clipped and trimmed; `folder` is for masks."""
        self.task, self.registry, self.grid, self.options = task, registry, registry.grid, registry.options
        self.memory = ClientMemory(MaskStore.in_folder(task.layout, folder), simulated=False)
        self.down, self.robust = train.down, Robust.of(train)
        self.vault = None
        if train.private:
            from ..engine.vault import open_vault  # only here, as it needs an extra

            self.vault = open_vault(train, registry.size, folder)
        self._tag: Tag = (0, 0, 0)
        self._trainer: Trainer | None = None
        self._may_be_sparse = train.sparse_compute
        self._late: dict[str, Post] = {}  # messages whose replies are no longer waited for

    def prepare(self, s: State) -> dict[str, JSON]:
        """The server measures whether native kernels are faster. Clients without native kernels train dense."""
        return choose(self.task, s, self.memory, threads=1) if self._may_be_sparse else {}

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        """Send every order to its client and wait for replies, as long as the options and past rounds allow."""
        began, self._tag = time.perf_counter(), s.tag
        if self.vault is not None:
            return self._train_privately(self.vault, s, list(orders))
        account = Encoding(self.memory, self.down, self.robust)
        this = Exchange(account, self.registry)
        self._push(this.post(client, order, account.sent(client, order)) for client, order in orders)
        sent = time.perf_counter()
        silent = self._wait(this)
        waited = time.perf_counter()
        outcome = account.close()
        for client, what in sorted(account.cohort.notes.items()) if account.cohort else ():
            log.warning("client %d: %s", client, what)
        seconds = {"send": sent - began, "wait": waited - sent, "check": time.perf_counter() - waited}
        return replace(self._over(this, outcome, silent), seconds=seconds)

    def _train_privately(self, vault: Vault, s: State, orders: list[tuple[Client, Order]]) -> Outcome:
        """Every step of a private round. A client that is silent in one is not waited for in the next."""
        from ..engine.private import PrivateRound
        from ..privacy.messages import MASKED

        present = [client.id for client in self.registry.present()]
        account, silent = PrivateRound(vault, self.memory, s, orders, present), list[int]()
        while True:
            kind = "train" if account.step == MASKED else "query"
            this = Exchange(account, self.registry, kind, "private", "answer")
            self._push(this.post(*account.orders[client], request) for client, request in account.requests())
            silent += self._wait(this)
            if not account.advance():
                return self._over(this, account.close(), silent)

    def _over(self, this: Exchange, outcome: Outcome, silent: list[int]) -> Outcome:
        """A round has ended, and these clients gave no reply in it."""
        self.registry.attendance.round_over(silent)
        self.registry.doubt(outcome.failures)
        self.registry.stale = True
        return replace(outcome, failures=this.dropped())

    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over the server's test samples, or over those that clients hold back."""
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
        this = ClientEvaluation(account, self.registry, share)
        asked = (client for client in present if this.entries[client.id].held)
        self._push(this.post(client, order, account.sent(client, order)) for client in asked)
        self.registry.attendance.missed(self._wait(this))
        self.registry.doubt(account.failures)
        return this.close()

    def _push(self, messages: Iterable[Message]) -> None:
        """Send messages a few at a time: faster than one by one, and never all of them in memory."""
        rest = iter(messages)
        while some := list(itertools.islice(rest, _TOGETHER)):
            if not all(self.grid.push_messages(some)):
                log.warning("the SuperLink did not take a message: its client will be dropped")

    def _wait(self, this: Exchange) -> list[int]:
        """Take replies until all are in or time is up; the clients that did not reply.

        Flower's own loop looks every three seconds only.
        """
        attendance, began = self.registry.attendance, time.monotonic()
        pause, told = min(0.05, self.options.poll), False
        while waiting := this.waiting:
            missing, times = [post.client.id for post in waiting.values()], this.reply_times
            allowed = attendance.time_allowed(this.kind, missing, times)
            waited = time.monotonic() - began
            if waited >= allowed:
                break
            if not told and times and waited > max(times) + _PATIENT:
                told = True
                log.info("%s; waiting up to %.0f s for %s", _so_far(this), allowed - waited, _names(missing))
            if not self._pull(this, list(waiting)):
                time.sleep(pause)
                pause = min(self.options.poll, 2 * pause)
        for post in this.posts:
            if post.seconds is not None:
                attendance.replied(this.kind, post.client.id, post.seconds)
        missing = [post.client.id for post in waiting.values()]
        if missing:
            log.warning("waited %.0f s for %s; %s", time.monotonic() - began, _names(missing), _so_far(this))
        self._late |= waiting
        this.stop_waiting()
        return missing

    def _pull(self, this: Exchange, messages: list[str]) -> bool:
        """Take the replies to these messages that have arrived; whether there were any."""
        now = time.monotonic()
        self._late = {i: post for i, post in self._late.items() if now - post.sent < self.options.timeout}
        replies = list(self.grid.pull_messages([*messages, *self._late]))
        for reply in replies:
            late = self._late.pop(reply.metadata.reply_to_message_id, None)
            if late is None:
                if (follow := this.take(reply)) is not None:
                    self._push([follow])
            elif not reply.has_error():
                seconds = time.monotonic() - late.sent
                log.warning("client %d replied after %.0f s, too late: dropped", late.client.id, seconds)
                self.registry.attendance.replied(late.metadata.message_type, late.client.id, seconds)
        return bool(replies)

    def evaluate_personal(self, weights: Weights, clients: Sequence[tuple[Client, Local]]) -> Score | None:
        """Always None: the server has neither the clients' masks nor their labels."""
        return None

    def close(self) -> None:
        pass


def _names(clients: list[int]) -> str:
    return ("client " if len(clients) == 1 else "clients ") + ", ".join(map(str, sorted(clients)))


def _so_far(this: Exchange) -> str:
    return f"{len(this.reply_times)} of {len(this.posts)} replies are in"
