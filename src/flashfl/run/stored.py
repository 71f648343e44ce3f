"""Results of cells: one JSON file a cell and seed, written when the run has ended; nothing in it is typed by hand."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..core.files import put
from ..methods import METHODS
from .cells import Cell, short
from .code import PACKAGE, digest
from .config import OUTSIDE, RunConfig, make_config
from .results import reported, versions

# Raised whenever the code changes in a way that changes results: older cells are then marked stale.
RECIPE = 1
CHANGED = {"hetero-spdst": 1, "hetero-jmwst": 1}  # and of these methods alone, this often; counts never fall

_OUTSIDE = (*OUTSIDE, "threads", "lanes")  # a cell on another machine differs in its last bits, and counts


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
        "commit": commit() + ("" if begun == source else f", begun by source {begun.partition('+')[0]}"),
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
                words.append(f"--{name.replace('_', '-')} {short(value)}")
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
