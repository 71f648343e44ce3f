"""Cells of the paper's tables: what to run for each.

A table is data (flashfl/tables/*.json): cells with a task, a method and the paper's figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from ..core.errors import ConfigError, unknown
from ..methods import METHODS
from .config import RunConfig, make_config

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "mnist": {"task": {"clients": 100}, "train": {"rounds": 400, "per_round": 10, "batch": 32}},
    "cifar10": {"task": {"clients": 100}, "train": {"rounds": 600, "per_round": 10, "batch": 32}},
    "cifar100": {"task": {"clients": 100}, "train": {"rounds": 800, "per_round": 10, "batch": 32}},
    "tinyimagenet": {"task": {"clients": 100}, "train": {"rounds": 600, "per_round": 10, "batch": 32}},
    "femnist": {
        "task": {"clients": 3400, "partition": "natural"},
        "train": {"rounds": 1000, "per_round": 34, "batch": 16},
    },
}


@dataclass(frozen=True)
class Cell:
    """One entry of a table."""

    task: Mapping[str, Any]
    method: Mapping[str, Any]
    column: str
    paper: Mapping[str, float] | None
    train: Mapping[str, Any]

    @property
    def alpha(self) -> float | None:
        return self.task.get("alpha")

    @property
    def density(self) -> float:
        return float(self.method.get("density", 1.0))

    def config(self, seed: int, data_root: str = "", **more: Any) -> RunConfig:
        """What has to be run: the paper's settings for the data set, this cell's changes, a seed."""
        base = SETTINGS[self.task["dataset"]]
        stage1 = "warmup_clients" in {f.name for f in fields(METHODS[self.method["name"]])}
        method = {**({"warmup_clients": base["train"]["per_round"]} if stage1 else {}), **self.method}
        train = {**base["train"], "eval_every": 10, "seed": seed, **self.train, **more}
        task = {**base["task"], **self.task, **({"data_root": data_root} if data_root else {})}
        return make_config({"task": task, "train": train, "method": method}, {})

    def place(self, seed: int) -> str:
        """Where the result of this cell and seed lies: the same for every table that has such a cell."""
        name = self.method["name"]
        options = {**{k: v for k, v in self.method.items() if k not in ("name", "density")}, **self.train}
        tail = "".join(f"-{k}={short(v)}" for k, v in sorted(options.items()))
        at = f"alpha{self.alpha:g}" if self.alpha is not None else "natural"
        density = f"-d{self.density:g}" if "density" in self.method else ""
        return f"{self.task['dataset']}/{at}/{name}{density}{tail}-seed{seed}"


def short(value: Any) -> str:
    """A value as words of a name or of a command."""
    return ",".join(map(short, value)) if isinstance(value, list | tuple) else str(value)


def tables() -> list[str]:
    return sorted(p.name[:-5] for p in files("flashfl.tables").iterdir() if p.name.endswith(".json"))


def load_table(name: str) -> tuple[str, list[str], list[Cell]]:
    """A table's title, what its rows are keyed by, and its cells."""
    if name not in tables():
        raise unknown("table", name, tables())
    data = json.loads(files("flashfl.tables").joinpath(f"{name}.json").read_text())
    cells = [Cell(c["task"], c["method"], c["column"], c.get("paper"), c.get("train", {})) for c in data["cells"]]
    return data["title"], data["rows"], cells


def chosen(cells: Sequence[Cell], dataset: str, alpha: str, density: str, method: str) -> list[Cell]:
    """The cells a user asked for; each filter is a comma-separated list or empty."""
    asked = {"dataset": dataset, "alpha": alpha, "density": density, "method": method}
    found = [c for c in cells if all(_fits(words, _answers(c, name)) for name, words in asked.items())]
    for name, words in asked.items():
        known = {answer for c in cells for answer in _answers(c, name)} - {""}
        for word in filter(None, words.split(",")):
            if not known:
                raise ConfigError(f"the cells of this table have no {name}")
            if not _fits(word, tuple(known)):
                raise unknown(name, word, known)
    if not found or (density and not any("density" in c.method for c in found)):
        raise ConfigError("no cell of the table fits these filters together")
    return found


def _answers(cell: Cell, name: str) -> tuple[str, ...]:
    """What a filter may say to get this cell; an empty one: whatever it says."""
    if name == "density":
        return (f"{cell.density:g}",) if "density" in cell.method else ("",)
    if name == "method":
        return cell.column, cell.method["name"]
    return (cell.task["dataset"],) if name == "dataset" else ("-" if cell.alpha is None else f"{cell.alpha:g}",)


def _fits(words: str, answers: tuple[str, ...]) -> bool:
    return not words or any(_same(w, a) for w in words.split(",") for a in answers)


def _same(word: str, answer: str) -> bool:
    try:
        return not answer or float(word) == float(answer)
    except ValueError:
        return word.strip().lower() == answer.lower()
