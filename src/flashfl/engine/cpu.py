"""The CPU engine: clients are trained in parallel processes, every message is really encoded and decoded."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..core.engine import JSON
from ..core.errors import FlashError, warn
from ..core.exchange import DROPPED, Client, Evaluation, Local, Order, Outcome
from ..core.files import shared_file
from ..core.mask import Weights
from ..core.record import Score
from ..core.state import State, dropout_step, drops
from ..data.task import Task
from .client import Job, Reply, Result, Worker, shared_model
from .encoding import Encoding
from .memory import ClientMemory
from .personal import personal_score
from .pool import Died, InProcess, Pool
from .robust import Robust
from .settings import EngineSettings
from .sparse import choose
from .store import MaskStore
from .train import ClientFailed, Trainer, evaluation_batches
from .vault import Vault, open_vault

if TYPE_CHECKING:
    from .private import PrivateRound


class CPUEngine:
    """Server and clients on one machine, joined by bytes alone."""

    device = torch.device("cpu")

    def __init__(self, task: Task, config: EngineSettings, folder: Path | None = None) -> None:
        """folder: where masks are stored."""
        self.task, self.config, threads = task, config, config.threads
        self.memory = ClientMemory(MaskStore.in_folder(task.layout, folder))
        self.down, self.robust = config.down, Robust.of(config)
        # The model being evaluated, where every worker sees it. Not in shared memory, which is often too small for a
        # large model: Docker's /dev/shm has 64 MB. Zeros are written first, so that a full disk is noticed now.
        self._file, path = shared_file()
        weakref.finalize(self, self._file.close)  # of an engine that nobody closes
        try:
            self._file.write(bytes(4 * task.layout.size))
            self._file.flush()
        except OSError as error:
            raise FlashError(
                f"the folder for temporary files, {tempfile.gettempdir()}, has no room for a copy of the model "
                f"({error.strerror}). Make room there, or set TMPDIR to another folder"
            ) from None
        self._model = shared_model(task, path)
        count = config.workers or max(1, (os.cpu_count() or 1) // threads)
        if multiprocessing.current_process().daemon:  # a worker of somebody's own pool may not start processes
            count = 1
        self.vault, simulated = open_vault(config, len(task.train), folder), None
        if self.vault is not None:
            from .party import Simulated  # only here, as it needs an extra

            simulated = Simulated(len(task.train), config.policy, self.vault.folder, config.secure)
        make = partial(Worker, task, self.memory.store, path, simulated)
        self.pool: Pool[Job, Result] | InProcess[Job, Result]
        self.pool = Pool(make, count, threads) if count > 1 else InProcess(make, threads)

    def prepare(self, s: State) -> dict[str, JSON]:
        return choose(self.task, s, self.memory, self.config.threads) if self.config.sparse_compute else {}

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        if self.vault is not None:
            return self._train_privately(self.vault, s, list(orders))
        account = Encoding(self.memory, self.down, self.robust)

        def again(client: int) -> Job:  # no real client died with its worker, so nothing is counted twice
            return self._training(client, account.again(client))

        for client, result in self._each(self._jobs(account, s, orders), again):
            self._take(account, client, result)
        return account.close()

    def _each(
        self, jobs: Iterable[tuple[int, Job]], again: Callable[[int], Job]
    ) -> Iterator[tuple[int, Result | Died]]:
        """Results as they come. A worker may die for lack of memory: its job is tried again after the others."""
        died: list[int] = []
        for number, result in self.pool.each(jobs):
            if isinstance(result, Died):
                died.append(number)
            else:
                yield number, result
        yield from self.pool.each((number, again(number)) for number in died)

    def _train_privately(self, vault: Vault, s: State, orders: list[tuple[Client, Order]]) -> Outcome:
        """Every step of a private round. A client whose process dies is dropped, as a real one would be."""
        from .private import PrivateRound  # only here, as it needs an extra

        account = PrivateRound(vault, self.memory, s, orders, range(len(self.task.train)))
        while True:
            for client, result in self.pool.each(self._requests(account, s)):
                self._take(account, client, result)
            if not account.advance():
                return account.close()

    def _requests(self, account: PrivateRound, s: State) -> Iterator[tuple[int, Job]]:
        for client, request in account.requests():
            if drops(s, client, self.config.dropout) and account.step >= dropout_step(s, client):
                account.failed(client, DROPPED)
            else:
                memory = self.memory.rounds(client)
                yield client, partial(Worker.answer, client=client, request=request, memory=memory)

    def _jobs(self, account: Encoding, s: State, orders: Iterable[tuple[Client, Order]]) -> Iterator[tuple[int, Job]]:
        for client, order in orders:
            data = account.sent(client, order)
            if drops(s, client.id, self.config.dropout):
                account.failed(client.id, DROPPED)
            else:
                yield client.id, self._training(client.id, data)

    def _training(self, client: int, order: bytes) -> Job:
        memory, sparse = self.memory.rounds(client), self.memory.sparse
        return partial(Worker.train, client=client, order=order, memory=memory, sparse=sparse)

    def _take(self, account: Encoding | PrivateRound, client: int, result: Result | Died) -> None:
        """Hand a client's answer, or the lack of one, to the account of the round."""
        if isinstance(result, ClientFailed | Died):
            account.failed(client, str(result))
            return
        assert isinstance(result, Reply)
        if result.lacks:
            raise self.memory.lost(client)
        account.received(client, result.data, result.memory[-1][3] if result.memory else None)

    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over all evaluation samples."""
        self._model.vector.copy_(weights.vector)
        spans = evaluation_batches(self.task.evaluation)
        jobs: list[Job] = [
            partial(Worker.evaluate, which=which, start=start, stop=stop, statistics=statistics)
            for which, start, stop in spans
        ]
        results = dict(self._each(enumerate(jobs), jobs.__getitem__))
        failed = {spans[i][0]: str(found) for i, found in results.items() if isinstance(found, ClientFailed | Died)}
        self._report(failed)
        total, n = [0.0, 0.0], sum(len(data) for which, data in enumerate(self.task.evaluation) if which not in failed)
        for number, (which, _, _) in enumerate(spans):  # in this order, as sums depend on it
            found = results[number]
            if which not in failed and isinstance(found, tuple):
                total = [total[0] + found[0], total[1] + found[1]]
        return Evaluation(total[0] / n, total[1] / n)

    def evaluate_personal(self, weights: Weights, clients: Sequence[tuple[Client, Local]]) -> Score | None:
        return personal_score(Trainer(self.task), self.memory, weights, clients)

    def _report(self, failed: Mapping[int, str]) -> None:
        """Warn about clients that could not evaluate the model. Without any other client that is an error."""
        if failed and (self.task.test is not None or len(failed) == len(self.task.evaluation)):
            raise FlashError(f"evaluation failed: {next(iter(failed.values()))}")
        for which, why in sorted(failed.items()):
            client = self.task.evaluators[which]
            warn(f"client {client} is dropped from this evaluation: {why}")

    def close(self) -> None:
        self.pool.close()
        self._file.close()
