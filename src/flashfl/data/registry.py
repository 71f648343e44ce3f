"""Data sets by name."""

from __future__ import annotations

from pathlib import Path

from ..core.errors import unknown
from .dataset import DataSet, Info, Options
from .loaders import cifar, digits, femnist, folder, hub, idx, sst2, tinyimagenet

_KNOWN = (
    digits.DIGITS,
    idx.MNIST,
    idx.MNIST_WRITERS,
    idx.FASHION_MNIST,
    cifar.CIFAR10,
    cifar.CIFAR100,
    tinyimagenet.TINYIMAGENET,
    femnist.FEMNIST,
    sst2.SST2,
)
DATASETS: dict[str, Info] = {info.name: info for info in _KNOWN}


def info(name: str) -> Info:
    """What is known of a data set before it is read."""
    kind, _, rest = name.partition(":")
    if name in DATASETS:
        return DATASETS[name]
    if kind == "hub" and rest:
        return hub.hub(name, rest)
    if kind == "folder" and rest:
        return folder.folder(name, Path(rest).expanduser())
    raise unknown("data set", name, [*DATASETS, "hub:NAME", "folder:PATH"])


def load(name: str, root: Path, options: Options = Options()) -> DataSet:  # noqa: B008 - frozen
    """The data set `name`."""
    return info(name).load(root, options)
