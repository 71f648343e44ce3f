"""The server's side of a task: the model and how it is judged, without anybody's data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import DataError
from ..data.task import Task


class _Elsewhere:
    """Stands for samples that lie with the clients."""

    def __len__(self) -> int:
        return 2

    def fetch(self, index: Tensor, key: int | None = None, at: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
        raise DataError("the server has no clients' samples: they lie with the clients")

    def to(self, device: torch.device | str) -> _Elsewhere:
        return self


def server_task(model: nn.Module | Callable[[], nn.Module], test: Any = None, **settings: Any) -> Task:
    """What a server knows of a task: its model and perhaps test samples; without them the clients judge the model.

    settings: loss, metric, prunable, fixed, name, as of `Task`; model and rules must be those the clients have.
    """
    return Task(model, [_Elsewhere()], test, **settings)
