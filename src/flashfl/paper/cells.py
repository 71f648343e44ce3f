"""The paper's tables: what to run for each cell, and the figures the paper reports.

A table is data (data/*.json): notes, and cells with a task, a method and the paper's figures. `SETTINGS` holds what the
paper says about each data set. Nothing else in the package repeats these numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

from ..core.errors import ConfigError, unknown
from ..methods import METHODS
from ..run.config import RunConfig, Settings, Tables, make_config
from ..run.track import flat
from . import TABLES

_TABLE_1 = {"per_round": 10, "batch": 32, "epochs": 1, "lr": 0.1, "lr_end": 0.001}
SETTINGS: dict[str, Tables] = {
    "mnist": {"task": {"clients": 100}, "train": {**_TABLE_1, "rounds": 400}},
    "cifar10": {"task": {"clients": 100}, "train": {**_TABLE_1, "rounds": 600}},
    "cifar100": {"task": {"clients": 100}, "train": {**_TABLE_1, "rounds": 800}},
    "tinyimagenet": {"task": {"clients": 100}, "train": {**_TABLE_1, "rounds": 600}},
    "femnist": {
        "task": {"clients": 3400, "partition": "natural"},
        "train": {**_TABLE_1, "rounds": 1000, "per_round": 34, "batch": 16},
    },
    # The paper states only the rounds. Clients and batch are those of its other experiments, and the learning rate is
    # one that plain SGD can fine-tune at.
    "sst2": {"task": {"clients": 100}, "train": {**_TABLE_1, "rounds": 50, "lr": 0.02}},
}


@dataclass(frozen=True)
class Cell:
    """One entry of a table."""

    task: Settings
    method: Settings
    column: str
    paper: Mapping[str, float] | None
    train: Settings
    tuned: str = ""  # the table whose results choose the learning rate; see `results.settled`
    up: int = 0  # read the run's results when this many bytes have been sent up; 0: at its end

    @property
    def dataset(self) -> str:
        return str(self.task["dataset"])

    @property
    def alpha(self) -> float | None:
        return self.task.get("alpha")

    @property
    def density(self) -> float:
        return float(self.method.get("density", 1.0))

    def config(self, seed: int, data_root: str = "", **more: str) -> RunConfig:
        """What to run: the paper's settings for the data set, this cell's changes, a seed."""
        base = SETTINGS[self.dataset]
        warmed_up = hasattr(METHODS[self.method["name"]], "warmup_clients")
        method = {**({"warmup_clients": base["train"]["per_round"]} if warmed_up else {}), **self.method}
        train = {**base["train"], "eval_every": 10, "seed": seed, **self.train, **more}
        task = {**base["task"], **self.task, **({"data_root": data_root} if data_root else {})}
        return make_config({"task": task, "train": train, "method": method})

    def place(self, seed: int) -> str:
        """The key of the result of this cell and seed. It is the same in every table that has such a cell."""
        name = self.method["name"]
        options = {**flat({k: v for k, v in self.method.items() if k not in ("name", "density")}), **self.train}
        tail = "".join(f"-{k}={short(v)}" for k, v in sorted(options.items()))
        at = f"alpha{self.alpha:g}" if self.alpha is not None else self.task.get("partition", "natural")
        at += f"-{self.task['model']}" if "model" in self.task else ""
        density = f"-d{self.density:g}" if "density" in self.method else ""
        return f"{self.dataset}/{at}/{name}{density}{tail}-seed{seed}"


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's tables: its title, the columns that name a row, its cells, and whether it shows mismatch.

    Notes say what the experiments in LOG.md found, each for a data set, or for one alpha of it.
    """

    title: str
    rows: Sequence[str]
    cells: Sequence[Cell]
    mismatch: bool = False
    notes: Sequence[Mapping[str, Any]] = ()


def derived(method: str) -> set[str]:
    """The settings that a method works out itself, by their full names."""
    return {f"method.{f.name}" for f in fields(METHODS[method]) if f.metadata.get("derived")}


def short(value: object) -> str:
    """A value as part of a key or a command."""
    return ",".join(map(short, value)) if isinstance(value, list | tuple) else str(value)


@cache
def load_table(name: str) -> PaperTable:
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    data = json.loads(files(__package__).joinpath("data", f"{name}.json").read_text())
    shared = {"paper": None, "train": data.pop("train", {}), "task": data.pop("task", {})}
    return PaperTable(**{**data, "cells": [Cell(**{**shared, **cell}) for cell in data["cells"]]})


def every_table() -> dict[str, PaperTable]:
    return {name: load_table(name) for name in TABLES}


def chosen(cells: Sequence[Cell], **filters: str) -> list[Cell]:
    """The cells a user asked for: by dataset, alpha, density and method, each a comma-separated list or empty."""
    found = list(cells)
    for name, text in filters.items():
        wanted = {_plain(word) for word in text.split(",") if word}
        known = {fact for cell in cells for fact in _facts(cell)[name]}
        if wanted and not known:
            raise ConfigError(f"--{name} {text}: this table cannot be filtered by {name}. Leave the option out")
        if strange := wanted - known:
            raise unknown(name, min(strange), known)
        if wanted:  # dense cells have no density and fit every one
            found = [cell for cell in found if not (facts := _facts(cell)[name]) or wanted & facts]
    if not found or (filters.get("density") and not any("density" in c.method for c in found)):
        raise ConfigError("no entry of the table matches all of these filters: remove one")
    return found


def _facts(cell: Cell) -> dict[str, set[str]]:
    """What a filter may say to get this cell."""
    return {
        "dataset": {cell.dataset},
        "alpha": {"-" if cell.alpha is None else f"{cell.alpha:g}"},
        "density": {f"{cell.density:g}"} if "density" in cell.method else set(),
        "method": {_plain(cell.column), cell.method["name"]},
    }


def _plain(word: str) -> str:
    """A word in the form in which it is compared: 0.10 is 0.1."""
    try:
        return f"{float(word):g}"
    except ValueError:
        return word.strip().lower()
