"""Evaluation on a device: batches are captured once and replayed, and read back once."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..core.exchange import Evaluation
from ..core.mask import Weights
from ..data.sources import Source, on_device
from ..data.task import Task
from .train import Trainer, judged_batches
from .wide import captured

_MOST = 32  # graphs; with more (every client's own samples, say) they would cost more than they save


class Judge:
    """Judges models on a task's test samples, which it holds on its device."""

    def __init__(self, task: Task, device: torch.device, precision: str) -> None:
        self.task, self.device, self.half = task, device, precision == "bf16"
        self.trainer = Trainer(task, device)
        self.data = on_device(task.evaluation, device)
        self.total = torch.zeros(2, dtype=torch.float64, device=device)
        self.at = torch.zeros((), dtype=torch.int64, device=device)
        self.capture = device.type == "cuda"
        self.graphs: dict[tuple[int, int, bool], Any] = {}

    @torch.no_grad()
    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over all samples."""
        self._set(weights, statistics)
        batches = [
            (which, start, stop - start)
            for which, data in enumerate(self.data)
            for start, stop in judged_batches(len(data))
        ]
        kinds = {(which, count) for which, _, count in batches}
        if self.capture and len(kinds) <= _MOST:
            for which, count in kinds:
                if self.capture and (which, count, statistics) not in self.graphs:
                    self._capture(which, count, statistics)
            self._set(weights, statistics)  # trying out what is captured may have touched statistics
        for which, start, count in batches:
            self.at.fill_(start)
            graph = self.graphs.get((which, count, statistics))
            if graph is not None:
                graph.replay()
            else:
                self._batch(self.data[which], count)
        loss, metric = (self.total / sum(len(data) for data in self.data)).tolist()
        return Evaluation(loss, metric)

    def _set(self, weights: Weights, statistics: bool) -> None:
        self.trainer.load(weights.vector)
        self.trainer.judging(statistics)
        self.total.zero_()

    def _batch(self, data: Source, count: int) -> None:
        """Add the next `count` samples' loss and metric to the total."""
        inputs, target = data.fetch(self.at + torch.arange(count, device=self.device))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            output = self.trainer.module(*map(self._channels_last, inputs))
            found = [self.task.loss(output, target), self.task.metric(output, target)]
        self.total += torch.stack([torch.as_tensor(f, device=self.device).double() for f in found]) * count

    def _channels_last(self, x: Tensor) -> Tensor:
        """Images as convolutions on a GPU like them."""
        image = self.device.type == "cuda" and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if image else x

    def _capture(self, which: int, count: int, statistics: bool) -> None:
        try:
            self.at.zero_()
            graph = captured(lambda: self._batch(self.data[which], count), self.device)
        except Exception as error:  # a model, a loss or a metric that waits for the device
            self.capture = False
            self.graphs.clear()
            torch.cuda.synchronize(self.device)
            warnings.warn(
                f"evaluation cannot be captured as a CUDA graph ({str(error).splitlines()[0]}); it runs eagerly",
                RuntimeWarning,
            )
            return
        self.graphs[which, count, statistics] = graph
