"""The result of one cell and seed: its figures, its curve, and everything that says where they came from."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import torch

from ..methods import METHODS
from ..report.summary import Numbers
from ..run.code import PACKAGE, digest
from ..run.config import RunConfig, make_config
from ..run.results import Results, versions
from .cells import Cell, short

Record = dict[str, Any]  # a line of a results file

# Raised when the code changes in a way that changes results: older ones are then marked stale.
RECIPE = 1
CHANGED = {"hetero-spdst": 1, "hetero-jmwst": 1}  # changes of these methods only; counts never fall


def recipe_of(method: str) -> int:
    return RECIPE + CHANGED.get(method, 0)


def stale(record: Mapping[str, Any], cell: Cell) -> bool:
    return bool(record.get("recipe") != recipe_of(cell.method["name"]))


def numbers_of(record: Mapping[str, Any]) -> Numbers:
    """A stored result as a report's numbers."""
    orders = record["rounds"] * record["clients_per_round"]
    return Numbers(
        accuracy=record["accuracy"],
        best=record["best"],
        before=record.get("views", {}).get("before"),
        density=record.get("density"),
        up=record["bytes"]["up"],
        down=record["bytes"]["down"],
        rounds=record["rounds"],
        orders=orders,
        dense=2 * 4 * record["values"] * orders,
        seconds=record["seconds"],
        dropped=record.get("dropped", 0),
    )


def record_of(cell: Cell, seed: int, results: Results) -> Record:
    """A finished run as a line: its figures, its curve, and everything that says where they came from."""
    end, rounds = results.end or {}, results.rounds
    counted = [r for r in rounds if r.counts]
    scores = [(r, r.score) for r in rounds if r.score is not None]
    config, source = results.header["config"], digest(PACKAGE)
    begun = (results.header.get("code") or {}).get(PACKAGE.name, source)
    last, score = scores[-1]
    return {
        "place": cell.place(seed),
        "recipe": recipe_of(cell.method["name"]),
        "command": command_of(config),
        "commit": commit() + ("" if begun == source else f", begun by source {begun.partition('+')[0]}"),
        "seed": seed,
        "machine": machine(),
        "versions": versions(),
        "accuracy": end["accuracy"],
        "best": end["best"],
        "views": {name: view.metric for name, view in last.metrics.items()},
        "density": score.density,
        "curve": [[r.round + 1, round(s.metric, 5), r.total.up, r.total.down] for r, s in scores],
        "mismatch": [round(r.mismatch or 0.0, 4) for r in counted][:: max(1, len(rounds) // 60)],
        "layer_densities": list(rounds[-1].layer_densities),
        "bytes": end["bytes"],
        "rounds": len(counted),
        "dropped": sum(len(r.failures) for r in rounds),
        "clients_per_round": config["train"]["per_round"],
        "values": results.header["task"]["values"],
        "seconds": round(end["seconds"], 1),
        "checksum": end["checksum"],
        "config": config,
    }  # fmt: skip


def command_of(config: Mapping[str, Any]) -> str:
    """The command line that gives this configuration."""
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
    """The commit of the code when first asked for, if it is a checkout, or else a digest of its content.

    Set FLASHFL_COMMIT to name it for a copy without history.
    """
    if said := os.environ.get("FLASHFL_COMMIT"):
        return said

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=PACKAGE, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # the code may be a copy inside another checkout
        return git("describe", "--always", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return "source " + digest(PACKAGE)


def machine() -> str:
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"CPU {platform.machine()}"
