"""Where a method runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..core.errors import ConfigError
from ..data.task import Task


def make_engine(task: Task, config: Any, folder: Path | None = None) -> Any:
    """The engine a training configuration asks for; `auto` takes a GPU where there is one."""
    device = config.device
    if device == "auto":
        device = "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ConfigError(f"device = {device!r}: expected auto, cpu or cuda") from None
    if kind != "cpu":
        raise ConfigError(f"device = {device!r}: only cpu is supported yet")
    from .cpu import CPUEngine

    return CPUEngine(task, config.workers, config.threads, config.values, config.dropout, None, folder)
