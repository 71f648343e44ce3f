"""The paper's published figures, looked up for a run's setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Any

from ..data import registry
from ..methods import METHODS
from ..run.cells import SETTINGS, Cell, load_table
from .load import flat

# What a method must not have been changed in to be the paper's.
_PLAIN = {"method.allocation": "uniform", "method.freeze_after": 0, "method.mask_init": "random"}
# What changes a result no more than chance does, or not with the paper's data sets and splits. (A row's data set,
# split and method are those of the run: `_same` has seen to it.)
_NO_MATTER = (
    "task.dataset", "task.partition", "task.alpha", "task.partition_seed", "task.data_root", "task.verify",
    "task.synthetic", "task.classes_per_client", "task.holdout", "task.size", "train.seed", "train.eval_every",
    "train.device", "train.precision", "train.lanes", "train.crew", "train.compile", "train.deterministic",
    "train.workers", "train.threads", "train.checkpoint_every", "train.track", "method.name",
)  # fmt: skip
_OF_TEXT = ("task.model_path", "task.tokens", "task.length", "task.vocab_size")  # and of nothing else
_OF_SGD = ("train.lr", "train.lr_end")
_OF_BYTES = ("task.model", "task.prunable", "train.values")


@cache
def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("paper.json").read_text())
    return found


def match(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The paper's accuracy (in percent) for the same data, split, method and density, or None.

    `differs` says in what else the run is not the paper's; it is empty where the settings are one.
    """
    for at, row in enumerate(published()["accuracy"]):
        if _same(row, settings):
            differs = _differences(_config("accuracy", at), settings)
            return {"mean": row["mean"], "std": row.get("std"), "differs": list(differs.values())}
    return None


def saving(settings: Mapping[str, Any]) -> float | None:
    """How many times fewer bytes the paper says this method sends with this model, where it says so."""
    for at, row in enumerate(published()["savings"]):
        if row["dataset"] == settings.get("task.dataset") and _method(row, settings):
            changed = _differences(_config("savings", at), settings)
            return None if any(k in changed for k in _OF_BYTES) else float(row["times"])
    return None


@cache
def _config(table: str, at: int) -> dict[str, Any]:
    """The settings behind one of the paper's figures, without those that do not matter."""
    row = published()[table][at]
    name, data = row["method"], row["dataset"]
    derived = {f.name: bool(f.metadata.get("derived")) for f in fields(METHODS[name])}
    method = {"name": name} | {k: row[k] for k in ("density", "r_int") if k in row and derived.get(k) is False}
    if row.get("nm"):
        method["nm"] = load_table("nm")[2][0].method["nm"]
    # Of SST-2 the paper states no learning rate, and no clients and batch either: they are its other experiments'.
    stated, scale = data in SETTINGS, published()["settings"][data]
    cell = Cell({"dataset": data if stated else "cifar10"}, method, "", None, {"rounds": scale["rounds"]})
    every = flat(cell.config(seed=0).to_json()) | {"task.model": scale["model"]}
    aside = {*_NO_MATTER, *(_OF_TEXT if stated else _OF_SGD), *(f"method.{k}" for k in derived if derived[k])}
    return {k: v for k, v in every.items() if k not in aside}


def _differences(theirs: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings in which a run is not the paper's, in words; one that it did not record did not exist yet."""
    mine = {**settings, "task.model": settings.get("task.model") or registry.info(settings["task.dataset"]).model}
    if mine.get("task.clients") == 0:  # so all writers of FEMNIST may be asked for
        del mine["task.clients"]
    return {
        k: f"{k.partition('.')[2]} {_value(mine[k])} here, {_value(there)} there"
        for k, there in theirs.items()
        if k in mine and mine[k] != there
    }


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value == "" else str(value)


def _same(row: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    if row["dataset"] != settings.get("task.dataset") or settings.get("task.synthetic"):
        return False
    return row["alpha"] == _alpha(settings) and _method(row, settings)


def _alpha(settings: Mapping[str, Any]) -> float | None:
    """Alpha as the paper states it: an even split is its 1000, writers have none."""
    partition = settings.get("task.partition")
    if partition == "natural":
        return None
    if settings.get("task.clients") == 1:
        return -1.0  # centralised: not in the paper's tables of federated runs
    return 1000.0 if partition == "iid" else float(settings.get("task.alpha", 1.0)) if partition == "lda" else -1.0


def _method(row: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    if row["method"] != settings.get("method.name") or "task.holdings" in settings:
        return False  # a run started from Python has not recorded its task's settings one by one
    if any(settings.get(k, v) != v for k, v in _PLAIN.items()) or settings.get("method.warmup_clients") == 0:
        return False
    densities = settings.get("method.densities")
    density = max(densities) if densities else settings.get("method.density", 1.0)
    return (
        row["density"] == density
        and bool(row.get("nm")) == bool(settings.get("method.nm"))
        and row.get("r_int", settings.get("method.r_int")) == settings.get("method.r_int")
    )
