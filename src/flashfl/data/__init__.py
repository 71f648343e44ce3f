"""Data sets, who holds which samples, and the tasks made of them."""

from .dataset import DataSet, Info, Options
from .registry import DATASETS, load
from .sources import Arrays, Lazy, Source, Subset
from .task import Task
from .tasks import TaskConfig, build_task, load_data

__all__ = [
    "DATASETS",
    "Arrays",
    "DataSet",
    "Info",
    "Lazy",
    "Options",
    "Source",
    "Subset",
    "Task",
    "TaskConfig",
    "build_task",
    "load",
    "load_data",
]
