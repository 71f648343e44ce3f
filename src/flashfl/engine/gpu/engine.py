"""The GPU engine: clients train side by side on one device; bytes are counted exactly instead of being made."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from ...core.client import Clients
from ...core.engine import JSON
from ...core.errors import warn
from ...core.exchange import DROPPED, Client, Evaluation, Local, Order, Outcome
from ...core.kernel import kernel
from ...core.mask import Mask, Weights, count_rows, stacked
from ...core.record import Score
from ...core.state import State, drops
from ...data.sources import classes_of, on_device
from ...data.task import Task
from ...sparsity import move, starting_mask
from ..counting import Counting
from ..memory import ClientMemory
from ..personal import personal_score
from ..pipeline import close_clients, open_clients
from ..robust import Robust
from ..settings import EngineSettings
from ..store import MaskStore
from ..train import ClientFailed
from ..vault import open_vault
from ..work import Work
from .batched import Batched
from .crew import Crew, choose_crew, make_stack, why_one_by_one
from .evaluate import Evaluator
from .rounded import decode, receive
from .stack import Stack


class GPUEngine:
    """Trains any task with any method on one device. On a CPU it does the same without CUDA graphs."""

    def __init__(
        self, task: Task, config: EngineSettings, device: torch.device | str = "cuda", folder: Path | None = None
    ) -> None:
        """folder: where masks are stored."""
        self.task, self.layout, self.config, self.device = task, task.layout, config, torch.device(device)
        self.cuda = self.device.type == "cuda"
        if self.cuda and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.half = config.precision == "bf16" or (config.precision == "auto" and self.cuda)
        self.train_data = on_device(task.train, self.device)
        self.capacity = min(max(len(d) for d in task.train), 1 << 16)
        self.memory = ClientMemory(MaskStore.in_folder(self.layout, folder), self.device)
        self.down, self.robust = config.down, Robust.of(config)
        self.vault = open_vault(config, len(task.train), folder)
        self.crew: Crew | None = None
        self.stack: Stack | None = None
        self.evaluator = Evaluator(task, self.device, self.half)
        self.trainer = self.evaluator.trainer
        self._before = ExitStack()  # puts torch's global settings back
        if self.cuda:
            if kernel("step", "masked_step") is None:
                warn("Triton is not installed, so training steps are slower: pip install triton")
            self._set_up_torch(config.deterministic)
        if config.secure:
            warn(
                "secure = true is only simulated on a GPU: rounding, clipping, noise and byte counts are those of "
                "secure aggregation, but nothing is encrypted. device = 'cpu' runs the real protocol"
            )

    def _set_up_torch(self, deterministic: bool) -> None:
        """Change torch's global settings until `close`."""
        self._before.callback(torch.cuda.set_device, torch.cuda.current_device())
        torch.cuda.set_device(self.device)  # kernels are launched on the current one
        cudnn, tf32 = torch.backends.cudnn, self.config.precision != "fp32"
        for owner, name, value in (
            (torch.backends.cuda.matmul, "allow_tf32", tf32),
            (cudnn, "allow_tf32", tf32),
            (cudnn, "benchmark", not deterministic),
            (cudnn, "deterministic", deterministic),
        ):
            self._before.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    def prepare(self, s: State) -> dict[str, JSON]:
        return {}

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        account = Counting(self.memory, self.down, self.robust)
        if self.vault is not None:
            from ..private_counting import PrivateCounting

            orders = list(orders)
            everyone = range(len(self.task.train))
            account = PrivateCounting(self.memory, self.vault, s, orders, self.config.dropout, everyone)
        # A client's first mask is made by now: those that differ in nothing else train together.
        alike = itertools.groupby(self._works(s, orders, account), key=_same_work)
        for local, works in alike:
            if local.report == "statistics":
                self._gather(works, account)
            else:
                if self.stack is None:
                    shared = (self.task, self.train_data, self.trainer.module, self.config, self.device)
                    self.stack = make_stack(*shared, s.plan.per_round, self.capacity, self.half)
                while chunk := list(itertools.islice(works, len(self.stack))):
                    self._train(chunk, self.stack, account)
        return account.close()

    def _works(self, s: State, orders: Iterable[tuple[Client, Order]], account: Counting) -> Iterator[Work]:
        """What each client that can take part has to do."""
        for client, order in orders:
            order = account.sent(client, order)
            data = self.train_data[client.id]
            if self.vault is None and drops(s, client.id, self.config.dropout):
                account.failed(client.id, DROPPED)
            if not account.trains(client.id):
                continue
            try:
                batches = self.trainer.batches(data, order.local)
            except ClientFailed as error:
                account.failed(client.id, str(error))
                continue
            own = self.memory.remembered(client.id) if "mask" in order.local.keep else None
            mask = own or starting_mask(order)
            yield Work(order.local, order.key, len(data), batches, client, order, mask, mask.counts, order.weights)

    def _train(self, works: list[Work], stack: Stack, account: Counting) -> None:
        """Train a few clients side by side and add up their updates."""
        rows, local = len(works), works[0].local
        if not self.down.exact:
            receive(works, self.down)
        starts = stacked([work.order.weights.vector for work in works])
        masks = stacked([work.mask.bits for work in works])
        opened = None
        if local.parts:
            opened = self._open(stack, works, starts, masks)
            starts, masks = opened.vectors, opened.masks
        if self.crew is None or (isinstance(self.crew, Batched) and why_one_by_one(works[0])):  # in a later phase
            shared = (self.task, self.train_data, self.trainer.module, self.config)
            self.crew = choose_crew(*shared, stack, self.capacity, works, opened)
        crew = self.crew
        crew.prepare(works, opened)
        stack.load(starts, masks, rows)
        crew.begin(works, opened)
        self._run_steps(crew, stack, works)
        values = stack.logical(stack.values[:rows])
        if not local.statistics:
            values[:, self.layout.trained_size :] = starts[:, self.layout.trained_size :]
        if local.adapt is not None:
            bits = stack.logical(stack.masks[:rows])
            for row, work in enumerate(works):
                mine = bits[row].clone() if "mask" in local.keep else bits[row]  # a view would keep them all alive
                work.mask = Mask(self.layout, mine, work.counts)
        if opened is not None:
            opened.state = {name: stack.logical(value) for name, value in crew.state(rows).items()}
            values = self._close(works, opened, values)
        saved = None
        if local.report == "mask":  # as the server decodes it: the values of active weights did not travel
            values[:, : self.layout.prunable_size] = 0.0
        if local.report in ("weights", "mask") and not (how := local.sends(self.down)).exact:
            values, saved = decode(works, values, how)
        account.received(works, values, crew.losses(rows), saved)

    def _run_steps(self, crew: Crew, stack: Stack, works: Sequence[Work]) -> None:
        """All steps of all clients, with a stop wherever masks move."""
        moves = [list(work.moves.items()) for work in works]
        done = [0] * len(works)
        for j in range(max(map(len, moves))):
            steps = [own[j][0] if j < len(own) else at for own, at in zip(moves, done, strict=True)]
            crew.advance(works, done, steps)
            by_rate: dict[Fraction, list[int]] = {}
            for row, own in enumerate(moves):
                if j < len(own):
                    by_rate.setdefault(own[j][1], []).append(row)
            for rate, rows in by_rate.items():
                self._move(crew, stack, works, rows, rate, steps)
            done = steps
        crew.advance(works, done, [work.steps for work in works])

    def _move(
        self, crew: Crew, stack: Stack, works: Sequence[Work], rows: Sequence[int], rate: Fraction, steps: Sequence[int]
    ) -> None:
        """Move the masks of some rows at once."""
        rule, every = works[0].local.adapt, len(works)
        assert rule is not None  # else there are no moves
        values, masks = stack.logical(stack.values[:every]), stack.logical(stack.masks[:every])
        scores = stack.logical(crew.scores(every)) if rule.dense_gradient else None
        keys, counts = [works[row].move_key(steps[row]) for row in rows], [works[row].counts for row in rows]
        some = slice(None) if len(rows) == every else torch.tensor(rows).to(stack.device, non_blocking=True)
        vectors, bits = values[some], masks[some]
        found = move(rule, stack.layout, vectors, bits, None if scores is None else scores[some], rate, keys, counts)
        values[some], masks[some] = vectors, bits
        stack.load(values, masks, every)
        crew.moved(every)
        for row, new in zip(rows, found, strict=True):
            works[row].counts = new

    def _open(self, stack: Stack, works: Sequence[Work], starts: Tensor, masks: Tensor) -> Clients:
        """Run the parts of some clients before training. What they carry through the steps lies as in the stack."""
        vectors = starts.expand(len(works), -1).clone()
        vectors[:, : self.layout.prunable_size].masked_fill_(~masks, 0.0)
        keys, steps = [work.key for work in works], [work.steps for work in works]
        given, notes = [work.order.extra for work in works], [self.memory.notes(work.client.id) for work in works]

        def validate(row: int) -> float:
            data = self.train_data[works[row].client.id]
            return self.trainer.validate(Weights(works[row].mask, vectors[row]), data, works[row].local.statistics)

        asked = (validate, self.task.draw, lambda row: classes_of(self.train_data[works[row].client.id]))
        opened = open_clients(self.layout, works[0].local, keys, steps, vectors, masks, given, notes, *asked)
        if opened.vectors is not vectors:
            for row, (work, counts) in enumerate(zip(works, count_rows(self.layout, opened.masks), strict=True)):
                work.mask, work.counts = Mask(self.layout, opened.masks[row].clone(), counts), counts
        opened.state = {name: stack.columns(value) for name, value in opened.state.items()}
        return opened

    def _close(self, works: Sequence[Work], opened: Clients, values: Tensor) -> Tensor:
        """Run the parts of some clients after training: the models that they report."""
        opened.vectors, opened.masks = values, torch.stack([work.mask.bits for work in works])
        finished = close_clients(works[0].local, opened)
        for row, work in enumerate(works):
            if finished.counts is not None:
                work.counts = finished.counts[row]
                work.mask = Mask(self.layout, opened.masks[row], work.counts)
            work.extra, work.notes = finished.extras[row], finished.notes[row]
        return opened.vectors

    def _gather(self, works: Iterable[Work], account: Counting) -> None:
        """BatchNorm statistics of every client, one after another."""
        for work in works:
            if not self.down.exact:
                receive([work], self.down)
            client = work.client.id
            try:
                update = self.trainer.train(work.order, client, self.train_data[client], work.mask)
            except ClientFailed as error:
                account.failed(client, str(error))
                continue
            assert update.weights is not None
            loss = torch.tensor([update.metrics["loss"] * update.n], device=self.device)
            account.received([work], update.weights.vector[None], loss)

    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over all evaluation samples."""
        return self.evaluator.evaluate(weights, statistics)

    def evaluate_personal(self, weights: Weights, clients: Sequence[tuple[Client, Local]]) -> Score | None:
        return personal_score(self.trainer, self.memory, weights, clients)

    def close(self) -> None:
        """Free the device's memory and put torch's global settings back."""
        self.crew = self.stack = None
        self._before.close()


def _same_work(work: Work) -> Local:
    return work.local if work.local.start is None else replace(work.local, start=None)
