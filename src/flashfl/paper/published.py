"""The paper's figures, looked up for the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..data import registry
from ..run.config import OUTSIDE, Settings
from ..run.track import flat
from .cells import Cell, derived, every_table

# A method with other values of these is not the paper's.
_PLAIN = {"allocation": "uniform", "freeze_after": 0, "mask_init": "random"}
# Settings that say where or how a run is carried out, not what it is.
ELSEWHERE = {"train.seed", *(f"{table}.{name}" for table in ("task", "train") for name in OUTSIDE)}
# Others that change a result no more than chance does, or do nothing with the paper's data sets and splits. The data
# set, the split and the method have been compared before.
_IRRELEVANT = (
    "task.dataset", "task.partition", "task.alpha", "task.partition_seed", "task.synthetic", "task.classes_per_client",
    "task.holdout", "task.size", "train.eval_every", "train.precision", "train.lanes", "train.crew", "train.compile",
    "train.deterministic", "train.threads", "method.name",
)  # fmt: skip
_OF_TEXT = ("task.model_path", "task.tokens", "task.length", "task.vocab_size")
_UNSTATED = ("train.lr", "train.lr_end")  # for SST-2
_OF_BYTES = ("task.model", "task.prunable", "train.values")


@dataclass(frozen=True)
class Published:
    """What the paper reports for the settings of a run. `differs` names the settings in which the run is another."""

    mean: float | None = None  # accuracy in percent
    std: float | None = None
    differs: tuple[str, ...] = ()
    saving: float | None = None


def lookup(settings: Settings) -> Published:
    """The paper's accuracy for the same data, split, method and density, and its saving of bytes, if it has them."""
    alike = [
        (cell, cell.paper, _differences(theirs, settings))
        for cell, theirs in _cells()
        if cell.paper and cell.dataset == settings.get("task.dataset") and _same_method(cell, settings)
    ]
    first = next(((paper["up"], differs) for _, paper, differs in alike if "up" in paper), None)
    saving = first[0] if first and not any(name in first[1] for name in _OF_BYTES) else None
    for cell, paper, differs in alike:
        if cell.alpha == _alpha(settings) and not settings.get("task.synthetic"):
            return Published(paper["mean"], paper.get("std"), tuple(differs.values()), saving)
    return Published(saving=saving)


@cache
def _cells() -> tuple[tuple[Cell, Settings], ...]:
    """The cells of all tables with their settings. Tables that state spreads come first."""
    return tuple((cell, _settings(cell)) for table in every_table().values() for cell in table.cells)


def _settings(cell: Cell) -> Settings:
    """The settings behind one of the paper's figures, without those that do not matter."""
    model = registry.info(cell.dataset).model
    every = flat(cell.config(seed=0).to_json()) | {"task.model": model}
    aside = {*ELSEWHERE, *_IRRELEVANT, *derived(cell.method["name"]), *(_UNSTATED if model == "bert" else _OF_TEXT)}
    return {k: v for k, v in every.items() if k not in aside}


def _differences(theirs: Settings, settings: Settings) -> dict[str, str]:
    """The settings in which a run is not the paper's, in words. A setting the run did not record did not exist yet."""
    mine = {**settings, "task.model": settings.get("task.model") or registry.info(settings["task.dataset"]).model}
    if mine.get("task.clients") == 0:  # 0 asks for all writers of FEMNIST
        del mine["task.clients"]
    return {
        k: f"{k.partition('.')[2]} {_text(mine[k])} here, {_text(there)} there"
        for k, there in theirs.items()
        if k in mine and mine[k] != there
    }


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value == "" else str(value)


def _alpha(settings: Settings) -> float | None:
    """Alpha as the paper states it: 1000 for an even split, None for writers, -1 for splits it does not have."""
    partition = settings.get("task.partition")
    if partition == "natural":
        return None
    if settings.get("task.clients") == 1 or partition not in ("iid", "lda"):
        return -1.0
    return 1000.0 if partition == "iid" else float(settings.get("task.alpha", 1.0))


def _same_method(cell: Cell, settings: Settings) -> bool:
    if "task.digests.layout" in settings:
        return False  # a run started from Python has not recorded the settings of its task
    method = {k.removeprefix("method."): v for k, v in settings.items() if k.startswith("method.")}
    if any(method.get(k, plain) != plain for k, plain in _PLAIN.items()):
        return False
    r_int = method.get("r_int")
    return _key(cell.method) == _key(method) and cell.method.get("r_int", r_int) == r_int


def _key(method: Settings) -> tuple[object, ...]:
    densities = method.get("densities")
    density = max(densities) if densities else method.get("density", 1.0)
    return method.get("name"), density, bool(method.get("nm")), method.get("warmup_clients") == 0
