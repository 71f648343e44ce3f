"""The paper's published figures, looked up for a run's setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

# What a method must not have been changed in to be the paper's.
_PLAIN = {"method.allocation": "uniform", "method.freeze_after": 0, "method.mask_init": "random"}
_SCALE = ("clients", "per_round", "rounds", "epochs", "batch")


@cache
def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("paper.json").read_text())
    return found


def match(settings: Mapping[str, Any], model: str = "") -> dict[str, Any] | None:
    """The paper's accuracy (in percent) for the same data, split, method and density, or None.

    `differs` says in what the run's scale is not the paper's; it is empty where the settings are one.
    """
    for row in published()["accuracy"]:
        if _same(row, settings):
            scale = published()["settings"].get(row["dataset"], {})
            mine = {k: settings.get(f"task.{k}" if k == "clients" else f"train.{k}") for k in _SCALE}
            # All writers of FEMNIST may be asked for as 0.
            differs = [
                f"{k} {mine[k]} here, {scale[k]} there"
                for k in _SCALE
                if k in scale and mine[k] != scale[k] and not (k == "clients" and mine[k] == 0)
            ]
            if model and "model" in scale and model != scale["model"]:
                differs.insert(0, f"model {model} here, {scale['model']} there")
            return {"mean": row["mean"], "std": row.get("std"), "differs": differs}
    return None


def saving(settings: Mapping[str, Any]) -> float | None:
    """How many times fewer bytes the paper says this method sends, where it says so."""
    for row in published()["savings"]:
        if row["dataset"] == settings.get("task.dataset") and _method(row, settings):
            return float(row["times"])
    return None


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
    if row["method"] != settings.get("method.name"):
        return False
    if any(settings.get(k, v) != v for k, v in _PLAIN.items()) or settings.get("method.warmup_clients") == 0:
        return False
    densities = settings.get("method.densities")
    density = max(densities) if densities else settings.get("method.density", 1.0)
    return (
        row["density"] == density
        and bool(row.get("nm")) == bool(settings.get("method.nm"))
        and row.get("r_int", settings.get("method.r_int")) == settings.get("method.r_int")
    )
