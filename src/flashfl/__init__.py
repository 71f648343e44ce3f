"""Sparse federated learning that is real: FLASH and its rivals, with bytes that are really saved."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from .aggregate import fedavg, wfa
    from .core.errors import FlashError
    from .core.exchange import Client, Local, Order, Sums, Update
    from .core.mask import Mask, Weights
    from .core.method import Method
    from .core.record import RoundRecord
    from .core.state import Phase, Plan, State
    from .data import tasks
    from .data.task import Task, accuracy
    from .methods import METHODS
    from .methods.dense import Dense
    from .methods.flashplus import FlashPlus
    from .methods.hetero import HeteroJMWST, HeteroSPDST
    from .methods.jmwst import JMWST
    from .methods.nst import NST
    from .methods.pdst import PDST
    from .methods.spdst import SPDST
    from .run.config import TrainConfig
    from .run.run import Run
    from .run.simulate import simulate
    from .sparsity import PruneRegrow, allocate, calibrate, mismatch, nested, random_mask, top_mask

# Names are loaded when they are first used: a Flower process that only passes messages on does not wait for torch.
_HOMES = {
    ".aggregate": ("fedavg", "wfa"),
    ".core.errors": ("FlashError",),
    ".core.exchange": ("Client", "Local", "Order", "Sums", "Update"),
    ".core.mask": ("Mask", "Weights"),
    ".core.method": ("Method",),
    ".core.record": ("RoundRecord",),
    ".core.state": ("Phase", "Plan", "State"),
    ".data.tasks": ("tasks",),
    ".data.task": ("Task", "accuracy"),
    ".methods": ("JMWST", "METHODS", "NST", "PDST", "SPDST", "Dense", "FlashPlus", "HeteroJMWST", "HeteroSPDST"),
    ".run.config": ("TrainConfig",),
    ".run.run": ("Run",),
    ".run.simulate": ("simulate",),
    ".sparsity": ("PruneRegrow", "allocate", "calibrate", "mismatch", "nested", "random_mask", "top_mask"),
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
    "FlashPlus",
    "HeteroJMWST",
    "HeteroSPDST",
    "Local",
    "Mask",
    "Method",
    "Order",
    "Phase",
    "Plan",
    "PruneRegrow",
    "RoundRecord",
    "Run",
    "State",
    "Sums",
    "Task",
    "TrainConfig",
    "Update",
    "Weights",
    "accuracy",
    "allocate",
    "calibrate",
    "fedavg",
    "mismatch",
    "nested",
    "random_mask",
    "simulate",
    "tasks",
    "top_mask",
    "wfa",
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
