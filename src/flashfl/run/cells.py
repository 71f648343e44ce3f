"""Cells of the paper's tables: what to run for each, and the results that are already there.

A table is data (flashfl/tables/*.json): cells with a task, a method and the paper's figures. A result is one JSON file
a cell and seed, written when the run has ended; nothing in it is typed by hand.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ConfigError, unknown
from ..core.files import put
from ..methods import METHODS
from .code import PACKAGE, digest
from .config import OUTSIDE, RunConfig, make_config
from .results import reported, versions

# Raised whenever the code changes in a way that changes results: older cells are then marked stale.
RECIPE = 1
CHANGED = {"hetero-spdst": 1, "hetero-jmwst": 1}  # and of these methods alone, this often; counts never fall

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


_OUTSIDE = (*OUTSIDE, "threads", "lanes")  # a cell on another machine differs in its last bits, and counts


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
        tail = "".join(f"-{k}={_short(v)}" for k, v in sorted(options.items()))
        at = f"alpha{self.alpha:g}" if self.alpha is not None else "natural"
        density = f"-d{self.density:g}" if "density" in self.method else ""
        return f"{self.task['dataset']}/{at}/{name}{density}{tail}-seed{seed}"


def _short(value: Any) -> str:
    return ",".join(map(_short, value)) if isinstance(value, list | tuple) else str(value)


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


def result_of(cell: Cell, seed: int, folder: Path) -> dict[str, Any] | None:
    """The stored result of a cell, if there is one that can be read and is this cell's."""
    path = folder / f"{cell.place(seed)}.json"
    try:
        found: Any = json.loads(path.read_text())
        wrong = _wrong(found, cell, seed)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        found, wrong = {}, f"it cannot be read ({error})"
    if wrong:
        warnings.warn(f"{path} counts as not run: {wrong}", RuntimeWarning)
        return None
    return dict(found)


def _wrong(found: Any, cell: Cell, seed: int) -> str:
    """Why this is not a result of the cell and the seed; empty if it is one."""
    if not isinstance(found, dict):
        return "it is no JSON object"
    sent, views = found.get("bytes"), found.get("views", {})
    numbers = {name: found.get(name) for name in ("recipe", "seed", "accuracy", "best", "seconds")}
    numbers |= {f"view {name}": value for name, value in (views.items() if isinstance(views, dict) else [("", None)])}
    above: dict[str, Any] = {name: found.get(name) for name in ("rounds", "clients_per_round", "values")}
    above |= {f"bytes {way}": sent.get(way) if isinstance(sent, dict) else None for way in ("up", "down")}
    curve = found.get("curve", [])
    rows = curve if isinstance(curve, list) else [None]
    if odd := [name for name, value in numbers.items() if not _is_number(value)]:
        return f"its {', '.join(odd)} is missing or no number"
    if odd := [name for name, value in above.items() if not _is_number(value) or value <= 0]:
        return f"its {', '.join(odd)} is missing or not above 0"
    if not all(isinstance(row, list) and len(row) == 4 and all(map(_is_number, row)) for row in rows):
        return "its curve is not made of rounds, accuracies and bytes"
    if found["seed"] != seed:
        return f"it is of seed {found['seed']}"
    return "" if stale(found, cell) else _other_settings(found.get("config"), cell, seed)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _other_settings(config: Any, cell: Cell, seed: int) -> str:
    """Which setting of a stored configuration is not the cell's; one that either does not know does not count."""
    for table, settings in json.loads(json.dumps(cell.config(seed).to_json())).items():
        stored = config.get(table) if isinstance(config, dict) else None
        if not isinstance(stored, dict):
            return f"it does not say its {table} settings"
        for name, value in settings.items():
            if name not in _OUTSIDE and name in stored and not _alike(stored[name], value):
                return f"its {name} is {str(stored[name])[:40]} and the cell's is {str(value)[:40]}"
    return ""


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_alike(a[name], b[name]) for name in a.keys() & b.keys())
    return bool(a == b)


def results_of(cell: Cell, seeds: int | None, folder: Path) -> list[dict[str, Any]]:
    """The stored results of a cell's first seeds, or of all there are; stale ones only where all are."""
    stem = cell.place(0).removesuffix("0")
    there = [path.stem.rpartition("-seed")[2] for path in folder.glob(f"{stem}*.json")]
    wanted = (
        range(seeds) if seeds else sorted(int(seed) for seed in there if seed.isdecimal() and seed == f"{int(seed)}")
    )
    found = [result for seed in wanted if (result := result_of(cell, seed, folder))]
    return [result for result in found if not stale(result, cell)] or found


def recipe_of(method: str) -> int:
    return RECIPE + CHANGED.get(method, 0)


def stale(result: Mapping[str, Any], cell: Cell) -> bool:
    return bool(result.get("recipe") != recipe_of(cell.method["name"]))


def write_result(cell: Cell, seed: int, run: Mapping[str, Any], folder: Path) -> Path:
    """Store a finished run: figures, curve, and all that is needed to know where they came from."""
    end, rounds = run["end"], run["rounds"]
    judged = [r for r in rounds if r["metrics"]]
    config = run["header"]["config"]
    source = digest(PACKAGE)
    begun = (run["header"].get("code") or {}).get(PACKAGE.name, source)
    record = {
        "recipe": recipe_of(cell.method["name"]),
        "command": command_of(config),
        "commit": commit() + ("" if begun == source else f", begun by source {begun}"),
        "seed": seed,
        "machine": machine(),
        "versions": versions(),
        "accuracy": end["accuracy"],
        "best": end["best"],
        "views": {name: values["metric"] for name, values in judged[-1]["metrics"].items()},
        "density": reported(judged[-1])["density"],
        "curve": [
            [r["round"] + 1, round(reported(r)["metric"], 5), r["total"]["up"], r["total"]["down"]] for r in judged
        ],
        "mismatch": [round(r.get("mismatch", 0.0), 4) for r in rounds if r["stage"] == 2][:: max(1, len(rounds) // 60)],
        "layer_densities": rounds[-1]["layer_densities"],
        "bytes": end["bytes"],
        "rounds": len([r for r in rounds if r["stage"] == 2]),
        "left_out": sum(len(r["failures"]) for r in rounds),
        "clients_per_round": config["train"]["per_round"],
        "values": run["header"]["task"]["values"],
        "seconds": round(end["seconds"], 1),
        "checksum": end["checksum"],
        "config": config,
    }  # fmt: skip
    path = folder / f"{cell.place(seed)}.json"
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
    put(path, ("{\n" + lines + "\n}\n").encode())
    return path


def command_of(config: Mapping[str, Any]) -> str:
    """A command line that gives this very configuration."""
    default = RunConfig().to_json()
    words = [f"flashfl run --method {config['method']['name']}"]
    plain = make_config({"method": {"name": config["method"]["name"]}}, {}).to_json()["method"]
    derived = {f.name for f in fields(METHODS[config["method"]["name"]]) if f.metadata.get("derived")}
    for table, base in (("method", plain), ("task", default["task"]), ("train", default["train"])):
        for name, value in config[table].items():
            always = name == "density"  # its default depends on the data set
            if name in ("name", "device", "workers", "data_root") or (value == base.get(name) and not always):
                continue
            if table == "method" and name in derived:
                continue
            if isinstance(value, dict):
                words += [f"--{name}.{k} {v}" for k, v in value.items() if v != base[name][k]]
            else:
                words.append(f"--{name.replace('_', '-')} {_short(value)}")
    return " ".join(words)


@cache
def commit() -> str:
    """The commit of the code as it was when first asked for, if it is a checkout; else a digest of the content.

    FLASHFL_COMMIT says it for a copy without its history, on a machine of its own.
    """
    if said := os.environ.get("FLASHFL_COMMIT"):
        return said

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=PACKAGE, capture_output=True, text=True, timeout=10, check=True
        )  # fmt: skip
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # a copy may lie in a checkout of something else
        return git("describe", "--always", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return "source " + digest(PACKAGE)


def machine() -> str:
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"CPU {platform.machine()}"


def pending(cells: Sequence[Cell], seeds: int, folder: Path) -> Iterator[tuple[Cell, int]]:
    """Cells still to be run, in the table's order, first seeds first; a cell of several tables comes once."""
    seen = set()
    for seed in range(seeds):
        for cell in cells:
            place = cell.place(seed)
            if place not in seen and missing(cell, seed, folder):
                seen.add(place)
                yield cell, seed


def missing(cell: Cell, seed: int, folder: Path) -> bool:
    """Whether there is no result of this recipe."""
    found = result_of(cell, seed, folder)
    return found is None or stale(found, cell)
