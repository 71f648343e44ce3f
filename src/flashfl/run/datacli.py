"""The command `data`: what is there and how to get the rest, how a data set splits, whether its files are sound."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    from ..data.dataset import DataSet, Info
    from .config import RunConfig

_WHAT = "a data set (see `flashfl data`), hub:NAME or folder:PATH; for partition also a TOML configuration"
_PACKAGES = {  # data sets without a name of their own: what they are, the package and the extra they need
    "hub:NAME": ("any images or texts with labels on the Hugging Face hub", "datasets", "hub"),
    "folder:PATH": ("images in folders, one folder a class", "PIL", "images"),
}


def add_data(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Tell a command line about `data`."""
    data = add("data", _data, "list data sets and how to get them; show a split; check files", settings=True)
    data.add_argument("action", nargs="?", default="list", choices=sorted(_ACTIONS), help="default: list")
    data.add_argument("what", nargs="?", default="", metavar="DATASET", help=_WHAT)
    data.add_argument("--data-root", dest="root", default="", help="where data sets lie (default: FLASHFL_DATA, "
                      "else ./data)")  # fmt: skip
    data.add_argument("--save", type=Path, metavar="FILE", help="partition: keep the split, for task.partition_file")
    data.add_argument("--plot", type=Path, metavar="FILE.png", help="partition: draw it (png, svg or pdf)")
    data.add_argument("--rows", type=int, default=40, help="partition: at most this many clients shown (default: 40)")
    data.epilog = (
        "A split takes the settings of tasks and --seed: flashfl data partition mnist --clients 100 --partition lda "
        "--alpha 0.1 --seed 0 shows the one a run with these settings and this seed has. `flashfl settings` lists them."
    )


def _data(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    if args.action != "list" and not args.what:
        raise ConfigError(f"flashfl data {args.action} needs the name of a data set: flashfl data {args.action} mnist")
    if args.action != "partition" and (args.save or args.plot):
        raise ConfigError("--save and --plot belong to `flashfl data partition`")
    return _ACTIONS[args.action](args, overrides)


def _list(args: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    from ..data.files import data_root
    from ..data.registry import DATASETS

    if args.what:
        raise ConfigError(f"`flashfl data list` takes no name; did you mean `flashfl data check {args.what}`?")
    _only(overrides, ())
    root = data_root(args.root)
    said_by = "--data-root" if args.root else "FLASHFL_DATA" if os.environ.get("FLASHFL_DATA") else "the default"
    print(f"data root: {root.absolute()} ({said_by}{'' if root.is_dir() else '; there is no such folder'})\n")
    print(f"{'name':<14} {'':<8} {'train':>8} {'test':>7} {'classes':>7} {'shape':<8} {'MB':>5}  what it is")
    for info in DATASETS.values():
        print(_row(info, info.present(root)))
    for name, (about, package, extra) in _PACKAGES.items():
        need = "" if _installed(package) else f"; needs pip install 'flashfl[{extra}]'"
        print(f"{name:<14} {'':<49}  {about}{need}")
    for line in _wanting(root, list(DATASETS.values())):
        print(line)
    return 0


def _row(info: Info, present: bool) -> str:
    train, test = (f"{n:,}" if n else "varies" for n in (info.train, info.test))
    shape, size = "x".join(map(str, info.shape)), str(info.megabytes or "-")
    state = "present" if present else "missing"
    return f"{info.name:<14} {state:<8} {train:>8} {test:>7} {info.classes:>7} {shape:<8} {size:>5}  {info.about}"


def _wanting(root: Path, known: list[Info]) -> list[str]:
    """What it takes to get the data sets, and the weights, that are not there."""
    from ..models import PRETRAINED
    from ..models.bert import has_weights

    lines = []
    for info in known:
        if absent := info.absent(root):
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            lines += [f"{info.name}: not found: {absent[0]}{more}", f"    {info.get}."]
        elif info.model in PRETRAINED and not has_weights(root / "bert-base-uncased"):
            lines += [
                f"{info.name}: its pretrained model is not there: no weights in bert-base-uncased/",
                "    Put config.json, vocab.txt and model.safetensors there, or train from random weights with --model "
                "bert-scratch or --model tiny-transformer.",
            ]
    return ["", "To get what is missing, under the data root:", *lines] if lines else []


def _installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name is no package


def _partition(args: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    from ..core.rng import fold
    from ..data import load_data, partition, show
    from ..data.tasks import split_data

    if args.rows < 1:
        raise ConfigError(f"--rows {args.rows}: must be at least 1")
    config = _config(args, overrides)
    task = config.task
    data = load_data(task)
    parts = split_data(task, data, fold(config.train.seed, "task"))  # the key a run of this seed draws it with
    counts = partition.histogram(parts, data.labels, data.classes)
    title = _title(config)
    print(title)
    print(show.render(counts, rows=args.rows))
    if args.save:
        _write(args.save, lambda path: partition.save(parts, path, data.labels))
        print(f"saved as {args.save}; a run takes it with --partition_file {args.save}")
    if args.plot:
        _write(args.plot, lambda path: show.plot(counts, path, title))
        print(f"drawn in {args.plot}")
    return 0


def _config(args: argparse.Namespace, overrides: Mapping[str, str]) -> RunConfig:
    """A configuration whose task is the one asked for; text is read by words, for only labels matter here."""
    from ..data import TaskConfig
    from .config import load_toml, make_config

    _only(overrides, ("seed", *(f.name for f in fields(TaskConfig))))
    data = load_toml(Path(args.what)) if args.what.endswith(".toml") else {"task": {"dataset": args.what}}
    config = make_config(data, {**overrides, "data_root": args.root} if args.root else overrides)
    return replace(config, task=replace(config.task, tokens="words"))


def _title(config: RunConfig) -> str:
    task = config.task
    if task.partition_file:
        return f"{task.dataset}: as saved in {task.partition_file}"
    detail = {
        "lda": f", alpha {task.alpha:g}",
        "dirichlet": f", alpha {task.alpha:g}",
        "shards": f", {task.classes_per_client} classes a client",
    }.get(task.partition, "")
    seed = f"partition seed {task.partition_seed}" if task.partition_seed >= 0 else f"seed {config.train.seed}"
    return f"{task.dataset}{' (made-up data)' if task.synthetic else ''}: {task.partition}{detail}, {seed}"


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except (OSError, ValueError) as error:  # ValueError: a kind of image that matplotlib does not know
        raise ConfigError(f"{path} could not be written: {error}") from None


def _check(args: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    import numpy as np

    from ..data.dataset import Options
    from ..data.files import data_root
    from ..data.registry import info as known

    _only(overrides, ("size",))
    size = next(iter(overrides.values()), "0")
    if not size.isdecimal():
        raise ConfigError(f"--size {size}: expected pixels a side")
    info, root = known(args.what), data_root(args.root)
    form = info.form(root)
    data = info.load(root, Options(verify=True, size=int(size)))
    _compare(info, data, root)
    counts = np.bincount(data.labels, minlength=data.classes)
    test = "no" if data.test is None else f"{len(data.test):,}"
    print(f"{info.name}: {len(data.train):,} training and {test} test samples of {data.classes} classes, shape "
          f"{'x'.join(map(str, data.shape))}")  # fmt: skip
    print(f"a class has {counts.min():,} to {counts.max():,} training samples")
    if data.writers is not None:
        print(f"{len(np.unique(data.writers)):,} writers")
    print("checksums: as published" if form.checksums else "checksums: none are known for these files")
    return 0


def _compare(info: Info, data: DataSet, root: Path) -> None:
    """Raise unless the data set is of the published size, as far as that is known."""
    test = 0 if data.test is None else len(data.test)
    for what, found, published in (
        ("training samples", len(data.train), info.train),
        ("test samples", test, info.test),
        ("classes", data.classes, info.classes),
    ):
        if published and found != published:
            raise DataError(f"{info.name} under {root.absolute()} has {found:,} {what} where {published:,} belong: "
                            f"files are missing or are not the published ones. {info.get}")  # fmt: skip


def _only(overrides: Mapping[str, str], known: tuple[str, ...]) -> None:
    for name in overrides:
        if name.removeprefix("task.") not in known:
            raise unknown("option", name, known) if known else ConfigError(f"unknown option --{name}")


_ACTIONS: dict[str, Callable[[argparse.Namespace, Mapping[str, str]], int]] = {
    "list": _list,
    "partition": _partition,
    "check": _check,
}
