"""Evaluation on a device: batches are captured once and replayed, and results are read back once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...core.exchange import Evaluation
from ...core.mask import Weights
from ...data.sources import Source, on_device
from ...data.task import Task
from ..train import Trainer, evaluation_batches
from .graphs import Graphs

_MOST = 32  # graphs; more of them (one for each client's own samples, say) cost more than they save


class Evaluator:
    """Evaluates models on a task's test samples, which it holds on its device."""

    def __init__(self, task: Task, device: torch.device, half: bool) -> None:
        self.task, self.device, self.half = task, device, half
        self.trainer = Trainer(task, device)
        self.data = on_device(task.evaluation, device)
        self.total = torch.zeros(2, dtype=torch.float64, device=device)
        self.at = torch.zeros((), dtype=torch.int64, device=device)
        self.graphs = Graphs("evaluation", device)

    @torch.no_grad()
    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over all samples."""
        batches = [(which, start, stop - start) for which, start, stop in evaluation_batches(self.data)]
        kinds = {(which, count) for which, _, count in batches}
        self._load(weights, statistics)
        if self.graphs.active and len(kinds) <= _MOST:
            self.at.zero_()
            for which, count in kinds:
                batch = functools.partial(self._batch, self.data[which], count)
                self.graphs.capture((which, count, statistics), batch)
            self._load(weights, statistics)  # warming up may have changed statistics
        for which, start, count in batches:
            self.at.fill_(start)
            if not self.graphs.replay((which, count, statistics)):
                self._batch(self.data[which], count)
        loss, metric = (self.total / sum(len(data) for data in self.data)).tolist()
        return Evaluation(loss, metric)

    def _load(self, weights: Weights, statistics: bool) -> None:
        self.trainer.load(weights.vector)
        self.trainer.replica.evaluation_mode(statistics)
        self.total.zero_()

    def _batch(self, data: Source, count: int) -> None:
        """Add the loss and metric of the next `count` samples to the total."""
        inputs, target = data.fetch(self.at + torch.arange(count, device=self.device))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            output = self.trainer.module(*map(self._channels_last, inputs))
            found = [self.task.loss(output, target), self.task.metric(output, target)]
        self.total += torch.stack([torch.as_tensor(f, device=self.device).double() for f in found]) * count

    def _channels_last(self, x: Tensor) -> Tensor:
        """Images in the memory order in which convolutions are fast on a GPU."""
        image = self.device.type == "cuda" and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if image else x
