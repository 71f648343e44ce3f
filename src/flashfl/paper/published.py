"""The paper's figures, looked up for the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from ..data import registry
from ..methods import METHODS
from ..report.load import Published
from ..run.track import flat
from .cells import Cell, load_table, table_names

# A method with other values of these is not the paper's.
_PLAIN = {"allocation": "uniform", "freeze_after": 0, "mask_init": "random"}
# Settings that change a result no more than chance does, or do nothing with the paper's data sets and splits. The data
# set, the split and the method have been compared before.
_IRRELEVANT = (
    "task.dataset", "task.partition", "task.alpha", "task.partition_seed", "task.data_root", "task.verify",
    "task.synthetic", "task.classes_per_client", "task.holdout", "task.size", "train.seed", "train.eval_every",
    "train.device", "train.precision", "train.lanes", "train.crew", "train.compile", "train.deterministic",
    "train.workers", "train.threads", "train.checkpoint_every", "train.track", "method.name",
)  # fmt: skip
_OF_TEXT = ("task.model_path", "task.tokens", "task.length", "task.vocab_size")
_UNSTATED = ("train.lr", "train.lr_end")  # for SST-2
_OF_BYTES = ("task.model", "task.prunable", "train.values")


def lookup(settings: Mapping[str, Any]) -> Published:
    """The paper's accuracy for the same data, split, method and density, and its saving of bytes, if it has them."""
    saving = _saving(settings)
    for at, cell in enumerate(_cells()):
        if cell.paper and _same_data(cell, settings) and _same_method(cell, settings):
            differs = _differences(_settings(at), settings)
            return Published(cell.paper["mean"], cell.paper.get("std"), tuple(differs.values()), saving)
    return Published(saving=saving)


def _saving(settings: Mapping[str, Any]) -> float | None:
    """How many times fewer bytes the paper says this method sends with this model, if it says so."""
    for at, cell in enumerate(_cells()):
        stated = cell.paper and cell.paper.get("up")
        if stated and cell.dataset == settings.get("task.dataset") and _same_method(cell, settings):
            changed = _differences(_settings(at), settings)
            return None if any(k in changed for k in _OF_BYTES) else stated
    return None


@cache
def _cells() -> tuple[Cell, ...]:
    """The cells of all tables. Those that state a spread come first."""
    first = ("main", "hetero", "savings")
    names = [*first, *(name for name in table_names() if name not in first)]
    return tuple(cell for name in names for cell in load_table(name).cells)


@cache
def _settings(at: int) -> dict[str, Any]:
    """The settings behind one of the paper's figures, without those that do not matter."""
    cell = _cells()[at]
    derived = [f"method.{f.name}" for f in fields(METHODS[cell.method["name"]]) if f.metadata.get("derived")]
    model = registry.info(cell.dataset).model
    every = flat(cell.config(seed=0).to_json()) | {"task.model": model}
    aside = {*_IRRELEVANT, *derived, *(_UNSTATED if model == "bert" else _OF_TEXT)}
    return {k: v for k, v in every.items() if k not in aside}


def _differences(theirs: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings in which a run is not the paper's, in words. A setting the run did not record did not exist yet."""
    mine = {**settings, "task.model": settings.get("task.model") or registry.info(settings["task.dataset"]).model}
    if mine.get("task.clients") == 0:  # 0 asks for all writers of FEMNIST
        del mine["task.clients"]
    return {
        k: f"{k.partition('.')[2]} {_text(mine[k])} here, {_text(there)} there"
        for k, there in theirs.items()
        if k in mine and mine[k] != there
    }


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value == "" else str(value)


def _same_data(cell: Cell, settings: Mapping[str, Any]) -> bool:
    if cell.dataset != settings.get("task.dataset") or settings.get("task.synthetic"):
        return False
    return cell.alpha == _alpha(settings)


def _alpha(settings: Mapping[str, Any]) -> float | None:
    """Alpha as the paper states it: 1000 for an even split, None for writers, -1 for splits it does not have."""
    partition = settings.get("task.partition")
    if partition == "natural":
        return None
    if settings.get("task.clients") == 1 or partition not in ("iid", "lda"):
        return -1.0
    return 1000.0 if partition == "iid" else float(settings.get("task.alpha", 1.0))


def _same_method(cell: Cell, settings: Mapping[str, Any]) -> bool:
    if "task.digests.layout" in settings:
        return False  # a run started from Python has not recorded the settings of its task
    method = {k.removeprefix("method."): v for k, v in settings.items() if k.startswith("method.")}
    if any(method.get(k, plain) != plain for k, plain in _PLAIN.items()):
        return False
    r_int = method.get("r_int")
    return _key(cell.method) == _key(method) and cell.method.get("r_int", r_int) == r_int


def _key(method: Mapping[str, Any]) -> tuple[object, ...]:
    densities = method.get("densities")
    density = max(densities) if densities else method.get("density", 1.0)
    return method.get("name"), density, bool(method.get("nm")), method.get("warmup_clients") == 0
