"""Sparse federated learning that is real: FLASH and its rivals, with bytes that are really saved."""

from __future__ import annotations

__version__ = "0.1.0"

from .core.errors import FlashError
from .core.method import Method
from .core.state import Client, Local, Mask, Order, Plan, State, Sums, Update, Weights
from .data import tasks
from .data.task import Task
from .methods import JMWST, METHODS, NST, PDST, SPDST, Dense, HeteroJMWST, HeteroSPDST
from .run.runner import Run, simulate
from .sparsity import PruneRegrow, mismatch

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
    "Update",
    "Weights",
    "mismatch",
    "simulate",
    "tasks",
]
