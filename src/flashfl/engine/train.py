"""One client's local training, and evaluation, on one replica of the model."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..core.client import Clients, Place
from ..core.errors import FlashError
from ..core.exchange import Extra, Local, Order, Update
from ..core.layout import Layer
from ..core.mask import Mask, Weights
from ..data.sources import Inputs, Source, classes_of, in_memory
from ..data.task import Task
from ..sparsity import move, starting_mask
from .pipeline import Finished, Notes, close_clients, open_clients
from .replica import EVALUATION_BATCH, Replica
from .sparse import SparseTraining
from .step import MaskedStep
from .work import Schedule

NOT_FINITE = "its weights or its loss are not finite after training: check its data, or lower lr"


def evaluation_batches(sources: Sequence[Source]) -> list[tuple[int, int, int]]:
    """In which batches samples are evaluated: which source, start and end. The same in every engine, for equal sums."""
    return [
        (which, start, min(start + EVALUATION_BATCH, len(data)))
        for which, data in enumerate(sources)
        for start in range(0, len(data), EVALUATION_BATCH)
    ]


class ClientFailed(FlashError):
    """A client's work cannot be used. The round goes on without it."""


class Trainer:
    """Plays one client at a time: a replica whose weights, gradients and statistics are views of flat vectors."""

    def __init__(self, task: Task, device: torch.device | str = "cpu") -> None:
        self.task, self.layout, self.device = task, task.layout, torch.device(device)
        self.vector = torch.zeros(self.layout.size, device=device)
        self.grad = torch.zeros(self.layout.trained_size, device=device)
        self.replica = Replica(task, self.device, lambda layer: _view(self.vector, layer))
        self.module, self.norms = self.replica.module, self.replica.norms
        for layer, p in zip(self.replica.layers, self.replica.params, strict=True):
            p.grad = _view(self.grad, layer)
        self._place = Place.logical(self.layout, self.device)
        self.sparse = False  # whether to compute active weights only, where that is possible
        self._native: SparseTraining | None = None
        self._takes_one: bool | None = None  # whether it can train on a batch of one sample; None: not tried yet

    def load(self, vector: Tensor) -> None:
        self.vector.copy_(vector)
        self.replica.reset_buffers()

    def train(
        self, order: Order, client: int, data: Source, remembered: Mask | None = None, notes: Notes | None = None
    ) -> Update:
        """A client's whole work in one round: train, perhaps move the mask, report.

        remembered, notes: the mask and what else the client kept. The update's weights lie in this replica: use them
        before it trains again.
        """
        local = order.local
        schedule = Schedule(local, order.key, len(data), self.batches(data, local))
        mask = remembered or starting_mask(order)
        tail = self.vector[self.layout.trained_size :]
        self.load(order.weights.vector)
        if mask is not order.weights.mask:
            self.vector[: self.layout.prunable_size].masked_fill_(~mask.bits, 0.0)
        statistics = tail.clone()
        if not local.statistics:  # they were not sent, and frozen norms use the model's own
            tail.copy_(self.replica.statistics)
        given = order.extra
        del order  # its weights are as large as the model, and no longer needed
        opened = None
        if local.parts:
            opened = self._open(schedule, data, mask, given, notes or {})
            self.vector.copy_(opened.vectors[0])
            if opened.masks.data_ptr() != mask.bits.data_ptr():
                mask = Mask(self.layout, opened.masks[0])
        with seeded(schedule.seed, self.device):
            if local.report == "statistics":
                loss = self._gather(schedule, data)
            else:
                mask, loss = self._epochs(schedule, data, mask, opened)
        if not local.statistics and local.report != "statistics":
            tail.copy_(statistics)
        extra: dict[str, Extra] = {}
        kept: dict[str, Extra] = {}
        if opened is not None:
            mask, finished = self._close(schedule, mask, opened)
            [extra], [kept] = finished.extras, finished.notes
        if not math.isfinite(loss) or not _all_finite(self.vector):
            raise ClientFailed(NOT_FINITE)
        weights = None if local.report == "counts" else Weights(mask, self.vector)
        update = Update.of(client, len(data), weights, mask.counts, {"loss": loss})
        return replace(update, extra=extra, notes=kept)

    def _open(self, schedule: Schedule, data: Source, mask: Mask, given: Notes, notes: Notes) -> Clients:
        """Run the parts of the client in this replica, before training."""
        local, model = schedule.local, Weights(mask, self.vector.clone())
        return open_clients(
            self.layout, local, [schedule.key], [schedule.steps], model.vector[None], mask.bits[None], [given], [notes],
            lambda row: self.validate(model, data, local.statistics), self.task.draw, lambda row: classes_of(data),
        )  # fmt: skip

    def validate(self, weights: Weights, data: Source, statistics: bool) -> float:
        """The metric of a model on the last fifth of a client's samples."""
        n = len(data)
        index = torch.arange(n - math.ceil(n / 5), n)
        return self.evaluate(weights, data, index, statistics)[1] / len(index)

    def _close(self, schedule: Schedule, mask: Mask, opened: Clients) -> tuple[Mask, Finished]:
        """Run its parts after training. What it reports is then in this replica."""
        opened.vectors, opened.masks = self.vector[None], mask.bits[None]
        finished = close_clients(schedule.local, opened)
        if opened.vectors.data_ptr() != self.vector.data_ptr():
            self.vector.copy_(opened.vectors[0])
        return mask if finished.counts is None else Mask(self.layout, opened.masks[0], finished.counts[0]), finished

    def _epochs(self, schedule: Schedule, data: Source, mask: Mask, opened: Clients | None) -> tuple[Mask, float]:
        """Every step of the client's work: its mask afterwards, and the mean loss."""
        local, moves = schedule.local, schedule.moves
        bits, counts = mask.bits.clone() if moves else mask.bits, mask.counts
        full = sum(counts) == self.layout.prunable_size  # then there is nothing to mask
        weights, k = self.vector[None, : self.layout.trained_size], self.layout.prunable_size
        step = MaskedStep(weights, k, None if full else bits[None], place=self._place)
        step.begin(local, opened.keys if opened else (), [schedule.steps], opened.state if opened else None)
        self.replica.inputs.use(local.parts)
        native = self._begin_native(schedule, mask)
        self.module.train()
        total, seen, done = torch.zeros((), device=self.device), 0, 0
        for epoch in range(local.epochs):
            order = schedule.shuffled(epoch)
            for b in range(schedule.batches):
                count = schedule.size(b)
                inputs, target = schedule.fetch(data, epoch, order, b * local.batch, count)
                total += (native.step(inputs, target) if native else self._step(step, inputs, target)) * count
                seen, done = seen + count, done + 1
                if local.adapt is not None and done in moves:
                    if native:
                        native.write(self.vector)
                    rows = (self.vector[None], bits[None], step.scores)
                    [counts] = move(local.adapt, self.layout, *rows, moves[done], [schedule.move_key(done)], [counts])
                    step.moved()
                    if native:
                        native.moved(Mask(self.layout, bits.clone(), counts), self.vector)
        if native:
            native.write(self.vector)
        if opened is not None:
            opened.state = step.state
        return Mask(self.layout, bits, counts) if moves else mask, float(total / max(1, seen))

    def _begin_native(self, schedule: Schedule, mask: Mask) -> SparseTraining | None:
        """The client on native kernels, if the run chose them and they can do this work."""
        if not self.sparse or not SparseTraining.can(schedule.local, mask):
            return None
        self._native = self._native or SparseTraining(self.task, mask, self.vector)
        self._native.begin(schedule, mask, self.vector)
        return self._native

    def _step(self, step: MaskedStep, inputs: Inputs, target: Tensor) -> Tensor:
        """One step on one batch. Returns its mean loss, still on the device."""
        self.grad.zero_()
        step.show()
        with torch.enable_grad():
            loss = self.task.loss(self.module(*inputs), target)
            loss.backward()  # type: ignore[no-untyped-call]
        step(self.grad[None, : step.prunable], self.grad[None, step.prunable :])
        return loss.detach().reshape(())

    def batches(self, data: Source, local: Local) -> int:
        """Batches per epoch. A last batch of one sample is dropped if BatchNorm cannot train on it.

        Raises ClientFailed if none is left.
        """
        n = len(data)
        count = local.batches(n)
        if n % local.batch == 1 and count == math.ceil(n / local.batch) and self.norms and not self._one(data):
            count -= 1
        if count == 0:
            raise ClientFailed(
                "it has only one sample, and BatchNorm cannot train on a batch of one: give it more samples"
            )
        return count

    def _one(self, data: Source) -> bool:
        """Whether the model can train on one sample. BatchNorm cannot if a channel has a single value."""
        if self._takes_one is None:
            kept = self.vector.clone()
            self.module.train()
            with torch.no_grad(), seeded(0, self.device):
                try:
                    self.module(*data.fetch(torch.zeros(1, dtype=torch.long))[0])
                    self._takes_one = True
                except ValueError:
                    self._takes_one = False
            self.load(kept)
        return self._takes_one

    def _gather(self, schedule: Schedule, data: Source) -> float:
        """BatchNorm statistics of this client's data under the given weights, and the mean loss."""
        batch, momenta = schedule.local.batch, [m.momentum for m in self.norms]
        self.module.train()
        gathered = {m for m in self.norms if m.training and m.track_running_stats}  # frozen ones stay as they are
        for layer in self.layout.of_kind("statistic"):
            if self.module.get_submodule(layer.name.rpartition(".")[0]) in gathered:
                _view(self.vector, layer).zero_()
        total, seen = 0.0, 0
        try:
            with torch.no_grad():
                for b in range(schedule.batches):
                    for m in self.norms:
                        m.momentum = 1 / (b + 1)  # a plain average over batches
                    count = schedule.size(b)
                    inputs, target = data.fetch(torch.arange(b * batch, b * batch + count))
                    total += float(self.task.loss(self.module(*inputs), target)) * count
                    seen += count
        finally:  # if a client fails, this replica goes on to the next
            for m, momentum in zip(self.norms, momenta, strict=True):
                m.momentum = momentum
        return total / seen

    @torch.no_grad()
    def outputs(self, weights: Weights, data: Source, index: Tensor, statistics: bool = True) -> Tensor:
        """What a model makes of some samples."""
        self.load(weights.vector)
        self.replica.evaluation_mode(statistics)
        output: Tensor = self.module(*(x.to(self.device) for x in data.fetch(index)[0]))
        return output

    def evaluate(self, weights: Weights, data: Source, index: Tensor, statistics: bool = True) -> tuple[float, float]:
        """Loss and metric of a model on some samples, times their number."""
        self.load(weights.vector)
        if not statistics:  # they may not have been sent
            self.vector[self.layout.trained_size :] = self.replica.statistics
        self.replica.evaluation_mode(statistics)
        drawn = not in_memory(data)  # a custom data set may draw; seeding takes longer than a small batch
        with torch.no_grad(), seeded(int(index[0]), self.device) if drawn else nullcontext():
            inputs, target = data.fetch(index)
            output = self.module(*inputs)
            n = len(index)
            return float(self.task.loss(output, target)) * n, float(self.task.metric(output, target)) * n

    def evaluate_all(self, weights: Weights, data: Source, statistics: bool = True) -> tuple[float, float]:
        """Loss and metric of a model on all samples, times their number."""
        loss = metric = 0.0
        for _, start, stop in evaluation_batches([data]):
            part = self.evaluate(weights, data, torch.arange(start, stop), statistics)
            loss, metric = loss + part[0], metric + part[1]
        return loss, metric


def _all_finite(values: Tensor) -> bool:
    """Found without a copy of the values."""
    return not values.numel() or all(math.isfinite(float(x)) for x in torch.aminmax(values))


def _view(flat: Tensor, layer: Layer) -> Tensor:
    return flat[layer.start : layer.stop].view(layer.shape)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, dropout and custom data sets draw the same, whatever was drawn before. Outside, nothing changes."""
    outside = random.getstate(), np.random.get_state()
    # On a CPU not torch.manual_seed, which looks at its whole stack for devices that are not there.
    seed_torch = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed_torch(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            yield
    finally:
        random.setstate(outside[0])
        np.random.set_state(outside[1])
