"""Our results beside the paper's: a table of its cells, and the curves for a plot of accuracy against bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import hypot
from pathlib import Path
from statistics import fmean, stdev

from ..run.progress import amount
from ..run.summary import summarise
from ..run.table import COLUMNS, TRANSFER, Entry, Table, percent, transfer
from .cells import Cell, every_table, load_table
from .results import Record, Stored, numbers_of, stale

_COLUMNS = (
    "method", "ours %", "best %", "before %", "paper %", "difference", "spreads", "seeds", "mismatch",
    "up / client", "down / client", TRANSFER, "seconds",
)  # fmt: skip
_MEANINGS = (
    ("ours %, paper %", "accuracy after the last round: mean ± standard deviation over seeds. (stale): the run "
     "was made before a change of the method's code"),
    ("best %", "the best evaluation of a run"),
    ("before %", "accuracy before the server cuts the model to its density"),
    ("spreads", "the difference divided by sqrt(a^2 + b^2). a is the paper's standard deviation. b is our "
     "standard deviation: over seeds or over a run's last ten evaluations, whichever is larger"),
    ("mismatch", "how different the masks of consecutive rounds are, late in a run"),
    ("up / client, down / client", "bytes of a client in a round: an average over all rounds that includes the "
     "bytes of the first phase (the paper's stage 1). (19.2x): 19.2 times fewer than the dense model"),
    (TRANSFER, "transfer time of both at these speeds"),
    ("seconds", "how long a run took. It may have shared its GPU with other runs"),
)  # fmt: skip


def words(head: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> Table:
    """A table of texts."""
    return Table(head, [[Entry(text, text) for text in row] for row in rows], notes=notes)


MEANINGS = words(("column", "meaning"), _MEANINGS)
ABOUT = " ".join(f"{name}: {meaning}." for name, meaning in _MEANINGS)  # the same for a page with one table
NEAR, FAR = 1.0, 2.0  # spreads up to which a difference is small, and beyond which it needs an explanation
Panels = dict[str, dict[str, list[Sequence[Sequence[float]]]]]  # title -> method -> the curve of each seed
_LAST = 10  # evaluations at the end of a run that say how much it swings


@dataclass(frozen=True)
class Miss:
    """How far our mean is from the paper's, in points, and in combined spreads if the paper states one."""

    points: float
    spreads: float | None


def miss_of(cell: Cell, found: Sequence[Record]) -> Miss | None:
    """Our results of a cell against the paper's. None if one of them has no figure."""
    if not cell.paper or not found:
        return None
    accuracies = [100 * record["accuracy"] for record in found]
    ends = [[100 * point[1] for point in record["curve"][-_LAST:]] for record in found]
    swings = [stdev(end) for end in ends if len(end) > 1]
    ours = max(stdev(accuracies) if len(found) > 1 else 0.0, fmean(swings) if swings else 0.0)
    points, theirs = fmean(accuracies) - cell.paper["mean"], cell.paper.get("std") or _stated().get(cell.place(0))
    return Miss(points, abs(points) / hypot(ours, theirs) if theirs else None)


@cache
def _stated() -> dict[str, float]:
    """The spreads in the paper, by place: a cell may stand in two tables, one of which states none."""
    cells = (cell for table in every_table().values() for cell in table.cells)
    return {cell.place(0): cell.paper["std"] for cell in cells if cell.paper and "std" in cell.paper}


def table_of(name: str, cells: Sequence[Cell], seeds: int | None, stored: Stored) -> Table:
    """A row for each cell. `seeds`: how many count; None takes all that are stored."""
    paper = load_table(name)
    rows = [_row(cell, stored.all(cell, seeds)) for cell in cells]
    shown = {"before %": any("before %" in row for row in rows), "mismatch": paper.mismatch}
    shown |= dict.fromkeys(("paper %", "difference", "spreads"), any(cell.paper for cell in cells))
    head = [c for c in (*paper.rows, *_COLUMNS) if shown.get(c, True)]
    return Table(head, [[row.get(c, Entry("")) for c in head] for row in rows], paper.title)


def _row(cell: Cell, found: Sequence[Record]) -> dict[str, Entry]:
    theirs = cell.paper or {}
    row = {
        "dataset": Entry(cell.dataset, cell.dataset),
        "alpha": Entry("-") if cell.alpha is None else Entry(f"{cell.alpha:g}", cell.alpha),
        "density": Entry(f"{cell.density:g}", cell.density),
        "method": Entry(cell.column, cell.column),
        "ours %": Entry("not run"),
        "paper %": Entry(percent(theirs["mean"], theirs.get("std")), theirs["mean"]) if theirs else Entry("-"),
    }
    if not found:
        return row
    ours = summarise([numbers_of(record) for record in found])
    row |= {name: COLUMNS[name](ours) for name in ("best %", "seeds")}
    row |= {"before %": COLUMNS["before %"](ours)} if ours.before is not None else {}
    mean, dropped = COLUMNS["accuracy %"](ours), ours.dropped * ours.seeds
    marks = " (stale)" if any(stale(record, cell) for record in found) else ""
    marks += f" ({dropped:.0f} clients dropped)" if dropped else ""
    row["ours %"] = Entry(mean.text + marks, mean.value)
    if miss := miss_of(cell, found):
        row["difference"] = Entry(f"{miss.points:+.2f}", miss.points)
        row |= {"spreads": Entry(f"{miss.spreads:.1f}", miss.spreads)} if miss.spreads is not None else {}
    late = fmean(fmean((record.get("mismatch") or [0.0])[-_LAST:]) for record in found)
    row["mismatch"] = Entry(f"{late:.2f}", late)
    for way, sent in (("up", ours.up), ("down", ours.down)):
        each, saving = sent / ours.orders, ours.dense / 2 / sent
        said = f", paper {theirs[way]:g}x" if way in theirs else ""
        row[f"{way} / client"] = Entry(f"{amount(each)} ({saving:.1f}x{said})", each)
    row[TRANSFER] = transfer((ours.up + ours.down) / ours.orders)
    return row | {"seconds": Entry(f"{ours.seconds:.0f}", ours.seconds)}


def panels(cells: Sequence[Cell], seeds: int | None, stored: Stored) -> Panels:
    """The stored curves, by row of the table and by method. Dense FedAvg, which has no density, is in every row."""
    out: Panels = {}
    sparse = [cell for cell in cells if "density" in cell.method]
    rows = [(cell.dataset, cell.alpha) for cell in cells]
    for like in sorted(sparse or cells, key=lambda c: (rows.index((c.dataset, c.alpha)), -c.density)):
        where = [like.dataset] + ([f"alpha {like.alpha:g}"] if like.alpha is not None else [])
        lines = out.setdefault(", ".join([*where, f"density {like.density:g}"] if sparse else where), {})
        for cell in cells:
            mine = cell.task == like.task and ("density" not in cell.method or cell.density == like.density)
            if mine and cell.column not in lines:
                curves = [record["curve"] for record in stored.all(cell, seeds) if record.get("curve")]
                if curves:
                    lines[cell.column] = curves
    return {title: lines for title, lines in out.items() if lines}


def add_flashplus(panels: Panels, path: Path) -> None:
    """Add flashplus to each panel in which SPDST takes the bytes that it was given, from its runs on the test set.

    path: the lines of `bench/plus.py`. They hold the mean bytes of a client and round; rounds have 10 clients.
    """
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for title, lines in panels.items():
        spdst = sum(lines["SPDST"][0][-1][2:]) if "SPDST" in lines else 0
        for x in found:
            up, down = 1e7 * x["mb_up"], 1e7 * x["mb_down"]
            mine = x["test"] and "budget" in x["settings"] and title.startswith(f"cifar10, alpha {x['alpha']:g}, ")
            if mine and abs(x["rounds"] * (up + down) - spdst) < 0.01 * spdst:
                scored = zip(x["rounds_at"], x["curves"]["average"], strict=True)
                lines.setdefault("flashplus", []).append([[r, a / 100, r * up, r * down] for r, a in scored])
