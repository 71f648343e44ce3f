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
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ConfigError(f"device = {device!r}: expected auto, cpu, cuda or cuda:N") from None
    from .trust import Trust

    trust = Trust(factor=0, clip=config.clip, trim=config.trim)  # simulated clients are honest
    if kind == "cpu":
        from .cpu import CPUEngine

        return CPUEngine(task, config.workers, config.threads, config.values, config.dropout, trust, folder)
    if kind != "cuda":
        raise ConfigError(f"device = {device!r}: expected auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device = {device!r}: this machine has no CUDA device that torch {torch.__version__} can use"
        )
    from .gpu import GPUEngine

    return GPUEngine(
        task,
        device,
        config.precision,
        config.lanes,
        config.values,
        config.dropout,
        config.deterministic,
        folder,
        config.crew,
        config.compile,
        trust,
    )
