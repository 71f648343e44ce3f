"""Data sets by name."""

from __future__ import annotations

from pathlib import Path

from ..core.errors import unknown
from .dataset import Files, Info
from .loaders import folder, hub
from .loaders.cifar import CIFAR10, CIFAR100
from .loaders.digits import DIGITS
from .loaders.femnist import FEMNIST
from .loaders.idx import FASHION, MNIST, WRITERS
from .loaders.sst2 import SST2
from .loaders.tinyimagenet import TINYIMAGENET

_KNOWN = (  # name, what it is, samples to train on and to test on, classes, shape, model, megabytes, files
    Info("digits", "8x8 digits, part of flashfl", 1437, 360, 10, (1, 8, 8), "digits", 0, DIGITS),
    Info("mnist", "handwritten digits", 60_000, 10_000, 10, (1, 28, 28), "mnistnet", 12, MNIST),
    Info("mnist-writers", "MNIST with writers, from QMNIST", 60_000, 10_000, 10, (1, 28, 28), "mnistnet", 13, WRITERS),
    Info("fashion-mnist", "small pictures of clothes", 60_000, 10_000, 10, (1, 28, 28), "mnistnet", 31, FASHION),
    Info("cifar10", "small colour photographs", 50_000, 10_000, 10, (3, 32, 32), "resnet18", 177, CIFAR10),
    Info("cifar100", "small colour photographs", 50_000, 10_000, 100, (3, 32, 32), "resnet18", 178, CIFAR100),
    Info("tinyimagenet", "larger colour photographs", 100_000, 10_000, 200, (3, 64, 64), "resnet18", 480, TINYIMAGENET),
    Info("femnist", "handwritten characters by writer, from LEAF", 0, 0, 62, (1, 28, 28), "leafcnn", 5000, FEMNIST),
    Info("sst2", "film critics' phrases, good or bad, from GLUE", 67_349, 872, 2, (64,), "bert", 5, SST2),
)
DATASETS: dict[str, Info] = {info.name: info for info in _KNOWN}


def info(name: str) -> Info:
    """What is known of a data set before it is read."""
    kind, _, rest = name.partition(":")
    if name in DATASETS:
        return DATASETS[name]
    if kind == "hub" and rest:
        files, about = Files(lambda paths, options: hub.load(rest, options)), "from the Hugging Face hub"
    elif kind == "folder" and rest:
        files, about = Files(lambda paths, options: folder.load(Path(rest).expanduser(), options)), "a folder of images"
    else:
        raise unknown("data set", name, [*DATASETS, "hub:NAME", "folder:PATH"])
    return Info(name, about, 0, 0, 0, (), "", 0, files)
