"""The server's side of a task: the model and how it is judged, without anybody's data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import DataError
from ..data.task import Task


class _Elsewhere:
    """Stands for samples that lie with the clients; an example shows what they look like."""

    def __init__(self, example: tuple[Tensor, ...] | None) -> None:
        self.example = example

    def __len__(self) -> int:
        return 2

    def fetch(self, index: Tensor, key: int | None = None, at: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
        if self.example is None:
            raise DataError("the samples lie with the clients; give server_task an example of one")
        return tuple(x[:1] for x in self.example), torch.zeros(1, dtype=torch.long)

    def to(self, device: torch.device | str) -> _Elsewhere:
        return self


def server_task(
    model: nn.Module | Callable[[], nn.Module], test: Any = None, *, example: Any = None, **settings: Any
) -> Task:
    """What a server knows of a task: its model and perhaps test samples; without them the clients judge the model.

    example: a batch of inputs, needed only to count FLOPs where there are no test samples.
    settings: loss, metric, prunable, fixed, name, as of `Task`; model and rules must be those the clients have. Where
    clients judge by accuracy, metric=flashfl.accuracy says so, and verdicts that are no shares are then refused.
    """
    inputs = example if isinstance(example, tuple) or example is None else (example,)
    task = Task(model, [_Elsewhere(inputs)], test, **settings)
    task.metric_known = test is not None or "metric" in settings  # else clients may have another
    return task
