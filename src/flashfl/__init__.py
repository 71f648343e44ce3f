"""Sparse federated learning that is real: FLASH and its rivals, with bytes that are really saved."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .core.errors import FlashError
    from .core.method import Method
    from .core.state import Client, Local, Mask, Order, Plan, State, Sums, Update, Weights
    from .data import tasks
    from .data.task import Task, accuracy
    from .methods import JMWST, METHODS, NST, PDST, SPDST, Dense, HeteroJMWST, HeteroSPDST
    from .run.config import TrainConfig
    from .run.runner import Run, simulate
    from .sparsity import PruneRegrow, mismatch

# Names are loaded when they are asked for: a Flower process that only passes messages on must not wait for torch.
_HOMES = {
    ".core.errors": ("FlashError",),
    ".core.method": ("Method",),
    ".core.state": (
        "Client",
        "Local",
        "Mask",
        "Order",
        "Plan",
        "State",
        "Sums",
        "Update",
        "Weights",
    ),
    ".data.tasks": ("tasks",),
    ".data.task": ("Task", "accuracy"),
    ".methods": (
        "JMWST",
        "METHODS",
        "NST",
        "PDST",
        "SPDST",
        "Dense",
        "HeteroJMWST",
        "HeteroSPDST",
    ),
    ".run.config": ("TrainConfig",),
    ".run.runner": (
        "Run",
        "simulate",
    ),
    ".sparsity": (
        "PruneRegrow",
        "mismatch",
    ),
}

__all__ = [
    "JMWST",
    "METHODS",
    "NST",
    "PDST",
    "SPDST",
    "Client",
    "Dense",
    "FlashError",
    "HeteroJMWST",
    "HeteroSPDST",
    "Local",
    "Mask",
    "Method",
    "Order",
    "Plan",
    "PruneRegrow",
    "Run",
    "State",
    "Sums",
    "Task",
    "TrainConfig",
    "Update",
    "Weights",
    "accuracy",
    "mismatch",
    "simulate",
    "tasks",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            module = import_module(home, __name__)
            value = globals()[name] = module if home == ".data.tasks" else getattr(module, name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
