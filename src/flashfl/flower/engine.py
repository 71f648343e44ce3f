"""Flower as an engine: orders become messages to SuperNodes, everything else is as in a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

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
from ..engine.vault import Vault, open_vault
from ..run.config import TrainConfig
from .registry import Registry
from .round import ClientEvaluation, Exchange


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
        asked = (client for client in present if this.entries[client.id].held)
        this.ask(((client.id, account.sent(client, order)) for client in asked), "evaluate")
        return this.mean()

    def evaluate_personal(self, weights: Weights, clients: Sequence[tuple[Client, Local]]) -> Score | None:
        """Always None: the server has neither the clients' masks nor their labels."""
        return None

    def close(self) -> None:
        pass
