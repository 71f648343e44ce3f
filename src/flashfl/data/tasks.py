"""Tasks by name: a data set, split over clients, and a model to train on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..core.errors import ConfigError, check_range
from ..core.parts import build
from ..core.rng import fold
from ..models import PRETRAINED, SQUARE, bert, build_model
from . import partition, registry
from .dataset import DataSet, Options
from .files import data_root
from .loaders.synthetic import make
from .sources import Source, Subset
from .task import Task


@dataclass(frozen=True)
class TaskConfig:
    """The settings of a task: its data, how they are split, and its model."""

    dataset: str = "digits"  # a name that `flashfl data` lists, hub:NAME or folder:PATH
    model: str = ""  # a name; empty: the usual model of the data set
    model_path: str = ""  # a pretrained model: a folder (also under the data root), or a name on the hub
    clients: int = 20  # number of clients; 0 with the natural partition: one for each writer
    partition: str = "lda"  # lda, dirichlet, shards, natural, iid
    alpha: float = 1.0  # for lda and dirichlet: the lower, the more clients differ
    classes_per_client: int = 2  # for shards: the most classes of a client
    per_client: int = 0  # at most this many samples a client; 0: no limit
    partition_seed: int = -1  # seed of the partition; -1: the run's seed
    partition_file: str = ""  # a saved partition to use
    data_root: str = ""  # folder of the data sets; empty: FLASHFL_DATA, else ./data
    limit: int = 0  # at most this many training samples, and as many test samples; 0: no limit
    synthetic: bool = False  # made-up data of the same shapes, without files
    augment: bool = True  # crop and flip training images at random, if the data set has that
    verify: bool = True  # compare files with known checksums
    holdout: float = 0.2  # share of each client's samples to evaluate on, if the data set has no test samples
    held_out: int = 0  # evaluate on this many training samples instead of the test samples; no client gets them
    prunable: str = "auto"  # which weights may be zero (docs/data.md); auto: the model says
    tokens: Literal["auto", "wordpiece", "words"] = "auto"  # auto: wordpiece for a pretrained model
    length: int = 64  # tokens of a text: longer ones are cut, shorter ones padded
    vocab_size: int = 8192  # with `tokens` words: the size of the vocabulary
    size: int = 0  # scale images of a folder or the hub to this many pixels a side; 0: as they are

    def __post_init__(self) -> None:
        check_range("[0, inf)", clients=self.clients, per_client=self.per_client, limit=self.limit)
        check_range("[0, inf)", held_out=self.held_out, size=self.size)
        check_range("[3, inf)", "A text has a start, a word and an end", length=self.length)
        check_range("[5, inf)", "There are four special words", vocab_size=self.vocab_size)

    @property
    def model_name(self) -> str:
        """The model asked for, else the data set's; empty if neither is known."""
        return self.model or registry.info(self.dataset).model

    @property
    def encoder(self) -> str:
        """The folder of the pretrained model if it lies under the data root; else its path or name as given."""
        path = self.model_path or "bert-base-uncased"
        under = data_root(self.data_root) / path
        return str(under) if under.is_dir() else path


def load_data(config: TaskConfig) -> DataSet:
    """The data set of a config."""
    pieces = config.tokens == "wordpiece" or (config.tokens == "auto" and config.model_name in PRETRAINED)
    vocab = str(bert.vocabulary(config.encoder)) if pieces and not config.synthetic else ""
    options = Options(config.verify, config.length, vocab, config.vocab_size, config.size)
    info = registry.info(config.dataset)
    if not config.synthetic:
        data = info.load(data_root(config.data_root), options)
    elif not info.shape:
        raise ConfigError(
            f"synthetic = true: not possible with {config.dataset!r}, as the size of its samples is not known before "
            "they are read. Choose a data set that `flashfl data` lists, or set synthetic = false."
        )
    else:
        samples = max(config.limit or max(16 * config.clients, 256), config.clients)
        data = make(info, samples, config.clients, options)
    return data if config.augment else replace(data, train=replace(data.train, augment=None))


def build_task(config: TaskConfig, key: int = 0, data: DataSet | None = None) -> Task:
    """The task of a config. key: random key of the partition. data: the data set, if it is loaded already."""
    data = load_data(config) if data is None else data
    parts = split_data(config, data, key)
    name = config.model_name or ("resnet18" if len(data.shape) == 3 else "tiny-transformer")
    test: Source | None = data.test
    if data.test and 0 < config.limit < len(data.test):
        test = Subset(data.test, torch.from_numpy(_some(len(data.test), config.limit, fold(0, "test"))))
    if config.held_out:
        # The same samples for every seed and split: settings are chosen on them, and the test samples stay unseen.
        chosen = _some(len(data.train), config.held_out, fold(0, "held out"))
        test, parts = Subset(data.train, torch.from_numpy(chosen)), [np.setdiff1d(part, chosen) for part in parts]
        if min(map(len, parts)) == 0:
            raise ConfigError(f"held_out = {config.held_out} leaves a client without samples: hold out fewer")
    task = Task(
        _model(name, config, data, key),
        [Subset(data.train, torch.from_numpy(part)) for part in parts],
        test,
        prunable=config.prunable,
        holdout=config.holdout,
        name=config.dataset,
    )
    task.info = {
        "dataset": config.dataset + (" (made-up data)" if config.synthetic else ""),
        "model": name,
        "clients": len(parts),
        "partition": config.partition_file or config.partition,
        "alpha": config.alpha,
        "classes_per_client": config.classes_per_client,
        "classes": data.classes,
        "shape": list(data.shape),
        "train": sum(map(len, parts)),
        "test": 0 if test is None else len(test),
        "histogram": partition.histogram(parts, data.labels, data.classes).tolist(),
    }
    return task


def split_data(config: TaskConfig, data: DataSet, key: int) -> partition.Partition:
    """The training samples of each client. key: random key of the partition."""
    if config.partition_file:
        return partition.load(config.partition_file, data.labels)
    key = fold(config.partition_seed if config.partition_seed >= 0 else key, "partition")
    natural = config.partition == "natural"
    # A limit on all samples would leave each writer one or none, so it is shared out over the writers instead.
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
    """`limit` of the numbers below `count`, ascending; all of them if there is no limit."""
    if not limit or limit >= count:
        return np.arange(count)
    return np.sort(np.random.Generator(np.random.Philox(key)).permutation(count)[:limit])


def _model(name: str, config: TaskConfig, data: DataSet, key: int) -> nn.Module | Callable[[], nn.Module]:
    """A pretrained model, or the function that draws one at random."""
    options: dict[str, int | str] = {"classes": data.classes}
    if len(data.shape) == 3:
        channels, height, width = data.shape
        if name in SQUARE and height != width:
            raise ConfigError(f"{name} needs square images, not {height}x{width}: scale them with size = {height}")
        options |= {"channels": channels, "size": min(height, width)}
    else:
        options |= {"vocab": data.vocab, "length": data.shape[0]}
    if name not in PRETRAINED:
        if config.model_path:
            options["path"] = config.encoder
        return functools.partial(build_model, name, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(key, "head") % 2**63)
        if config.synthetic:  # the same shapes and the same fixed parameters, without the weights' file
            return build_model(PRETRAINED[name], freeze=True, **options)
        return build_model(name, path=config.encoder, **options)


def _named(dataset: str, clients: int, **more: Any) -> Callable[..., Task]:
    """The function that makes the task of one data set."""

    def task(root: str | Path = "", clients: int = clients, alpha: float = 1.0, seed: int = 0, **settings: Any) -> Task:
        folder = str(root) if isinstance(root, Path) else root
        values = {**more, **settings, "dataset": dataset, "data_root": folder, "clients": clients, "alpha": alpha}
        return build_task(build(TaskConfig, values, "task"), fold(seed, "task"))

    task.__name__ = task.__qualname__ = dataset
    task.__doc__ = f"""A task with the data set {dataset}: {registry.info(dataset).about}.

    `root`: the folder of the data (default: FLASHFL_DATA, else ./data). `settings`: those of `TaskConfig`.
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
