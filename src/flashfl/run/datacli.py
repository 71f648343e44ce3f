"""The command `data`: list data sets and how to get them, show how one splits, check its files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    from .config import RunConfig

_WHAT = "a data set (see `flashfl data`), hub:NAME or folder:PATH; for partition also a TOML configuration"


def add_data(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `data` to a command line."""
    data = add("data", _data, "list data sets and how to get them; show a split; check files", settings=True)
    data.add_argument("action", nargs="?", default="list", choices=sorted(_ACTIONS), help="what to do (default: list)")
    data.add_argument("what", nargs="?", default="", metavar="DATASET", help=_WHAT)
    data.add_argument("--data-root", dest="root", default="", help="folder of data sets (default: FLASHFL_DATA, "
                      "else ./data)")  # fmt: skip
    data.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="partition: save the split to this file; a run loads it with --partition-file",
    )
    data.add_argument("--plot", type=Path, metavar="FILE.png", help="partition: draw it (png, svg or pdf)")
    data.add_argument("--rows", type=int, default=40, help="partition: show at most this many clients (default: 40)")
    data.epilog = (
        "To show the split of a run, give its task settings and --seed, for instance: flashfl data partition mnist "
        "--clients 100 --partition lda --alpha 0.1 --seed 0. `flashfl settings` lists the settings."
    )


def _data(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    if args.action == "list" and args.what:
        raise ConfigError(f"`flashfl data list` takes no name; did you mean `flashfl data check {args.what}`?")
    if args.action != "list" and not args.what:
        raise ConfigError(f"flashfl data {args.action} needs the name of a data set: flashfl data {args.action} mnist")
    if args.action != "partition" and (args.save or args.plot):
        raise ConfigError("--save and --plot belong to `flashfl data partition`")
    _ACTIONS[args.action](args, overrides)
    return 0


def _list(args: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from ..data.files import data_root
    from ..data.registry import DATASETS

    for name in overrides:
        raise ConfigError(f"unknown option --{name}: `flashfl data list` takes --data-root only")
    root = data_root(args.root)
    given_by = "--data-root" if args.root else "FLASHFL_DATA" if os.environ.get("FLASHFL_DATA") else "the default"
    print(f"data root: {root.absolute()} ({given_by}{'' if root.is_dir() else '; there is no such folder'})\n")
    print(f"{'name':<14} {'':<8} {'train':>8} {'test':>7} {'classes':>7} {'shape':<8} {'MB':>5}  what it is")
    how: list[str] = []
    for info in DATASETS.values():
        train, test = (f"{n:,}" if n else "varies" for n in (info.train, info.test))
        absent = info.files.absent(root)
        print(f"{info.name:<14} {'missing' if absent else 'present':<8} {train:>8} {test:>7} {info.classes:>7} "
              f"{_shape(info.shape):<8} {info.megabytes or '-':>5}  {info.about}")  # fmt: skip
        if absent:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            how += [f"{info.name}: not found: {absent[0]}{more}", f"    {info.files.get}."]
    print(f"{'hub:NAME':<64}  images or texts with labels on the Hugging Face hub; pip install 'flashfl[hub]'")
    print(f"{'folder:PATH':<64}  images in folders, one folder a class; pip install 'flashfl[images]'")
    if how:
        print("\nTo get what is missing, under the data root:", *how, sep="\n")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _config(args: argparse.Namespace, overrides: Mapping[str, str], known: tuple[str, ...]) -> RunConfig:
    """The configuration that a command asks for, with the overrides that it knows.

    Texts are read as words, because only labels matter here.
    """
    from .config import load_toml, make_config

    for name in overrides:
        if name.removeprefix("task.") not in known:
            raise unknown("option", name, known)
    data = load_toml(Path(args.what)) if args.what.endswith(".toml") else {"task": {"dataset": args.what}}
    config = make_config(data, {**overrides, "data_root": args.root} if args.root else overrides)
    return replace(config, task=replace(config.task, tokens="words"))


def _partition(args: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    from ..core.rng import fold
    from ..data import partition, show
    from ..data.tasks import TaskConfig, load_data, split_data

    if args.rows < 1:
        raise ConfigError(f"--rows {args.rows}: must be at least 1")
    config = _config(args, overrides, ("seed", *(f.name for f in fields(TaskConfig))))
    data = load_data(config.task)
    parts = split_data(config.task, data, fold(config.train.seed, "task"))  # the key that a run of this seed uses
    counts = partition.histogram(parts, data.labels, data.classes)
    title = _title(config)
    print(title)
    print(show.render(counts, rows=args.rows))
    if args.save:
        _write(args.save, lambda path: partition.save(parts, path, data.labels))
        print(f"saved as {args.save}; a run takes it with --partition-file {args.save}")
    if args.plot:
        _write(args.plot, lambda path: show.plot(counts, path, title))
        print(f"drawn in {args.plot}")


def _title(config: RunConfig) -> str:
    task = config.task
    if task.partition_file:
        return f"{task.dataset}: as saved in {task.partition_file}"
    alpha = f", alpha {task.alpha:g}"
    detail = {"lda": alpha, "dirichlet": alpha, "shards": f", {task.classes_per_client} classes a client"}
    seed = f"partition seed {task.partition_seed}" if task.partition_seed >= 0 else f"seed {config.train.seed}"
    made_up = " (made-up data)" if task.synthetic else ""
    return f"{task.dataset}{made_up}: {task.partition}{detail.get(task.partition, '')}, {seed}"


def _write(path: Path, write: Callable[[Path], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except (OSError, ValueError) as error:  # ValueError: a kind of image that matplotlib does not know
        raise ConfigError(f"{path} could not be written: {error}") from None


def _check(args: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    import numpy as np

    from ..data.files import data_root
    from ..data.registry import info as known
    from ..data.tasks import load_data

    task = _config(args, overrides, ("size",)).task
    info, root = known(task.dataset), data_root(task.data_root)
    data = load_data(task)
    train, test = len(data.train), 0 if data.test is None else len(data.test)
    for what, found, published in (
        ("training samples", train, info.train),
        ("test samples", test, info.test),
        ("classes", data.classes, info.classes),
    ):
        if published and found != published:
            raise DataError(
                f"{info.name} under {root.absolute()} has {found:,} {what}, expected {published:,}: files are missing "
                f"or are not the published ones. {info.files.get}"
            )
    counts = np.bincount(data.labels, minlength=data.classes)
    print(f"{info.name}: {train:,} training and {f'{test:,}' if test else 'no'} test samples of {data.classes} "
          f"classes, shape {_shape(data.shape)}")  # fmt: skip
    print(f"a class has {counts.min():,} to {counts.max():,} training samples")
    if data.writers is not None:
        print(f"{len(np.unique(data.writers)):,} writers")
    compared = any(path and info.files.checksum(path) for path in info.files.find(root).values())
    print(f"checksums: {'as published' if compared else 'none are known for these files'}")


_ACTIONS: dict[str, Callable[[argparse.Namespace, Mapping[str, str]], None]] = {
    "list": _list,
    "partition": _partition,
    "check": _check,
}
