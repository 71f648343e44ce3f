"""Tasks by name: a data set, split over clients, and a model to train on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.errors import ConfigError
from ..core.parts import build
from ..core.rng import fold
from ..models import PRETRAINED, SQUARE, bert, build_model
from . import partition, registry
from .dataset import DataSet, Options
from .examples import Arrays, Subset
from .files import data_root
from .synthetic import make
from .task import Task


@dataclass(frozen=True)
class TaskConfig:
    """Which data, split how, and which model: all of a task, as plain values."""

    dataset: str = "digits"  # see `flashfl data`; also hub:NAME and folder:PATH
    model: str = ""  # empty: the one the data set is usually trained with
    model_path: str = ""  # where a pretrained model lies: a folder (looked for under the data root too) or a hub name
    clients: int = 20  # 0 with the natural partition: everyone
    partition: str = "lda"  # lda, dirichlet, shards, natural, iid
    alpha: float = 1.0  # of lda and dirichlet: the smaller, the more unlike the clients
    classes_per_client: int = 2  # of shards
    per_client: int = 0  # at most this many samples a client; 0: all it has
    partition_seed: int = -1  # -1: each seed of a run splits anew
    partition_file: str = ""  # a saved partition, used instead of drawing one
    data_root: str = ""  # empty: the environment's FLASHFL_DATA, else ./data
    limit: int = 0  # at most this many samples to train on and to judge on, for quick runs; 0: all
    synthetic: bool = False  # made-up data of the same shapes, for trying things without files
    augment: bool = True
    verify: bool = True  # compare files with their published checksums
    holdout: float = 0.2  # of each client's samples, where the data set has no test samples
    prunable: str = "auto"  # a rule or a glob: see `Layout.of`; auto: as the model says
    tokens: str = "auto"  # wordpiece or words; auto: wordpiece for a pretrained model
    length: int = 64  # tokens a text is cut or padded to
    vocab_size: int = 8192  # of a vocabulary of words
    size: int = 0  # pixels a side that images of a folder or the hub are scaled to; 0: as they are

    def __post_init__(self) -> None:
        # A text has a start, a word and an end; a vocabulary the four special words and one more.
        least = {"clients": 0, "per_client": 0, "limit": 0, "size": 0, "length": 3, "vocab_size": 5}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least {value}")
        if self.tokens not in ("auto", "wordpiece", "words"):
            raise ConfigError(f"tokens = {self.tokens!r}: expected auto, wordpiece or words")


def load_data(config: TaskConfig) -> DataSet:
    """The data set a config asks for."""
    options = Options(config.verify, config.augment, config.length, _vocabulary(config), config.vocab_size, config.size)
    if not config.synthetic:
        return registry.load(config.dataset, data_root(config.data_root), options)
    info = registry.info(config.dataset)
    if not info.shape:
        raise ConfigError(f"synthetic data needs a data set of known shapes, not {config.dataset!r}")
    samples = config.limit or max(16 * config.clients, 256)
    return make(info, max(samples, config.clients), config.clients, options)


def build_task(config: TaskConfig, key: int = 0, data: DataSet | None = None) -> Task:
    """The task; `key` draws the partition. Data already loaded may be given, to share it between tasks."""
    data = load_data(config) if data is None else data
    parts = split_data(config, data, key)
    model, name = _model(config, data, key)
    train: list[Any] = [Subset(data.train, torch.from_numpy(part)) for part in parts]
    task = Task(
        model,
        train,
        _judged(data.test, config.limit),
        prunable=config.prunable,
        fixed=getattr(model, "fixed", ()),
        holdout=config.holdout,
        name=config.dataset,
    )
    task.info = {
        "dataset": config.dataset + (" (made-up data)" if config.synthetic else ""),
        "model": name,
        "clients": len(parts),
        "partition": config.partition_file or config.partition,
        "alpha": config.alpha,
        "classes": data.classes,
        "shape": list(data.shape),
        "train": sum(map(len, parts)),
        "test": 0 if task.test is None else len(task.test),
        "histogram": partition.histogram(parts, data.labels, data.classes).tolist(),
    }
    return task


def split_data(config: TaskConfig, data: DataSet, key: int) -> partition.Partition:
    """Which training samples each client holds; `key` draws them."""
    if config.partition_file:
        return partition.load(config.partition_file, data.labels)
    key = fold(config.partition_seed if config.partition_seed >= 0 else key, "partition")
    natural = config.partition == "natural"
    # Few of all samples would leave each writer one or none: there the limit is shared out over the clients instead.
    used = _some(len(data.train), 0 if natural else config.limit, fold(key, "limit"))
    parts = partition.split(
        config.partition,
        data.labels[used],
        config.clients,
        key,
        alpha=config.alpha,
        classes_per_client=config.classes_per_client,
        ids=None if data.writers is None else data.writers[used],
    )
    caps = [config.per_client, max(1, config.limit // len(parts)) if natural and config.limit else 0]
    cap = min((c for c in caps if c), default=0)
    return [used[part[_some(len(part), cap, fold(key, "cap", i))]] for i, part in enumerate(parts)]


def _some(count: int, limit: int, key: int) -> NDArray[np.int64]:
    """`limit` of the numbers below `count`, ascending; all if there is no limit."""
    if not limit or limit >= count:
        return np.arange(count)
    return np.sort(np.random.Generator(np.random.Philox(key)).permutation(count)[:limit])


def _judged(test: Arrays | None, limit: int) -> Subset | Arrays | None:
    if test is None or not 0 < limit < len(test):
        return test
    return Subset(test, torch.from_numpy(_some(len(test), limit, fold(0, "test"))))


def _model(config: TaskConfig, data: DataSet, key: int) -> tuple[Any, str]:
    """The model, or the function that draws it where it is not pretrained, and its name."""
    name = _model_name(config) or ("resnet18" if len(data.shape) == 3 else "tiny-transformer")
    options: dict[str, Any] = {"classes": data.classes}
    if len(data.shape) == 3:
        channels, height, width = data.shape
        if name in SQUARE and height != width:
            raise ConfigError(f"{name} needs square images, not {height}x{width}: scale them with size = {height}")
        options |= {"channels": channels, "size": min(height, width)}
    else:
        options |= {"vocab": data.vocab, "length": data.shape[0]}
    if name not in PRETRAINED:
        if config.model_path:
            options["path"] = _beside(config)
        return functools.partial(build_model, name, **options), name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(key, "head") % 2**63)
        if config.synthetic:  # the same shapes and the same fixed parameters, without the weights' file
            return build_model(PRETRAINED[name], freeze=True, **options), name
        return build_model(name, path=_beside(config), **options), name


def _model_name(config: TaskConfig) -> str:
    return config.model or registry.info(config.dataset).model


def _beside(config: TaskConfig) -> str:
    """The folder of a pretrained model, if there is one under the data root; else its path or name as given."""
    path = config.model_path or "bert-base-uncased"
    under = data_root(config.data_root) / path
    return str(under) if under.is_dir() else path


def _vocabulary(config: TaskConfig) -> str:
    """The vocab.txt that texts are cut into pieces by; empty: whole words."""
    pieces = config.tokens == "wordpiece" or (config.tokens == "auto" and _model_name(config) in PRETRAINED)
    if config.synthetic or not pieces:
        return ""
    return str(bert.vocabulary(_beside(config)))


def _named(dataset: str, clients: int, **more: Any) -> Callable[..., Task]:
    """A function that makes the task of one data set."""

    def task(root: str | Path = "", clients: int = clients, alpha: float = 1.0, seed: int = 0, **settings: Any) -> Task:
        values = {**more, **settings, "dataset": dataset, "data_root": str(root), "clients": clients, "alpha": alpha}
        return build_task(build(TaskConfig, values, "task"), fold(seed, "task"))

    task.__name__ = task.__qualname__ = dataset
    task.__doc__ = f"""{registry.info(dataset).about}, split over clients.

    `root` is the folder of the data (else FLASHFL_DATA, else ./data); `settings` are those of `TaskConfig`.
    """
    return task


digits = _named("digits", 20)
mnist = _named("mnist", 100)
fashion_mnist = _named("fashion-mnist", 100)
mnist_writers = _named("mnist-writers", 0, partition="natural")
cifar10 = _named("cifar10", 100)
cifar100 = _named("cifar100", 100)
tinyimagenet = _named("tinyimagenet", 100)
femnist = _named("femnist", 0, partition="natural")
sst2 = _named("sst2", 100)
