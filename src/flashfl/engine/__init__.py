"""Where a method runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ..core.engine import Engine
from ..core.errors import ConfigError
from ..data.task import Task
from .settings import EngineSettings


def make_engine(task: Task, config: EngineSettings, folder: Path | None = None) -> Engine:
    """The engine a training configuration asks for; `auto` takes a GPU where there is one."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from .cpu import CPUEngine

        return CPUEngine(task, config, folder)
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise ConfigError(f"device = {device!r}: expected auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device = {device!r}: this machine has no CUDA device that torch {torch.__version__} can use. Choose auto "
            "or cpu"
        )
    from .gpu import GPUEngine

    return GPUEngine(task, config, device, folder)
