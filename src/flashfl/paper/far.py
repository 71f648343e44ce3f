"""The cells that lie far from the paper, each with what is known of the reason (data/far.json)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from ..run.table import Table
from .cells import Cell
from .results import Record
from .tables import FAR, words

_MOST = 8  # cells that are listed one by one
_ABOUT = "Numbers are ours minus the paper's, in points; in parentheses that of a run's best evaluation."


@dataclass(frozen=True)
class Compared:
    """A cell beside the paper's figure, in the first table that has it."""

    table: str
    cell: Cell
    found: Sequence[Record]
    points: float  # as in a `Miss`
    spreads: float


def far_table(compared: Iterable[Compared]) -> Table:
    """The cells beyond FAR combined spreads, grouped by what is known of them."""
    groups: dict[tuple[str, str], list[Compared]] = {}
    for one in compared:
        if one.spreads > FAR:
            groups.setdefault((one.cell.dataset, _known(one)), []).append(one)
    rows = [(dataset, _named(some), said) for (dataset, said), some in sorted(groups.items(), key=lambda it: it[0][0])]
    return words(("data set", "cells", "what is known"), rows, [_ABOUT])


@cache
def reasons() -> list[dict[str, Any]]:
    """What is known, each with the cells it is about and a section of LOG.md. The first that fits a cell counts."""
    found: list[dict[str, Any]] = json.loads(files(__package__).joinpath("data", "far.json").read_text())
    return found


def _known(of: Compared) -> str:
    cell = of.cell
    facts = {"table": of.table, "dataset": cell.dataset, "alpha": cell.alpha, "density": cell.density}
    facts |= {"method": cell.method["name"]}
    for reason in reasons():
        if all(facts[name] in allowed for name, allowed in reason["cells"].items()):
            return f"{reason['said']} LOG.md: {reason['section']}"
    return "Not understood. Nothing was tried."


def _named(some: Sequence[Compared]) -> str:
    """The cells by name, or how many there are, and how far they lie from the paper."""
    if len(some) > _MOST:
        counts = ", ".join(f"{table} {count}" for table, count in Counter(one.table for one in some).items())
        points = [one.points for one in some]
        return f"{counts}: {min(points):+.2f} to {max(points):+.2f}"
    return "; ".join(map(_one, some))


def _one(of: Compared) -> str:
    cell = of.cell
    place = [of.table, *([] if cell.alpha is None else [f"alpha {cell.alpha:g}"])]
    density = [f"{cell.density:g}"] if "density" in cell.method else []
    best = 100 * fmean(record["best"] for record in of.found) - (cell.paper or {})["mean"]
    return f"{', '.join(place)}: {' '.join([cell.column, *density])}, {of.points:+.2f} (best {best:+.2f})"
