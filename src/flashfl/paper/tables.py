"""Our results beside the paper's: a table of its cells, and the curves for a plot of accuracy against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..run.progress import amount
from ..run.summary import summarise
from ..run.table import COLUMNS, TRANSFER, Entry, Table, percent, transfer
from .cells import Cell, load_table
from .results import Stored, numbers_of, stale

_COLUMNS = (
    "method", "ours %", "best %", "before %", "paper %", "difference", "seeds", "up / client", "down / client",
    TRANSFER, "seconds",
)  # fmt: skip
ABOUT = (
    "Ours after the last round beside the paper's, mean ± standard deviation over seeds. Best: a run's best "
    "evaluation. Before: the model before the server cuts it to its density. Bytes per client and round, first phase "
    "included, and how many times fewer that is than the model's dense size."
)


def table_of(name: str, cells: Sequence[Cell], seeds: int | None, stored: Stored) -> Table:
    """A row for each cell. `seeds`: how many count; None takes all that are stored."""
    paper = load_table(name)
    rows = [{**_place(cell), **_row(cell, stored.all(cell, seeds))} for cell in cells]
    head = [c for c in (*paper.keys, *_COLUMNS) if c != "before %" or any("before %" in row for row in rows)]
    return Table(head, [[row.get(c, Entry("")) for c in head] for row in rows], paper.title)


def _place(cell: Cell) -> dict[str, Entry]:
    alpha = Entry("-") if cell.alpha is None else Entry(f"{cell.alpha:g}", cell.alpha)
    return {
        "dataset": Entry(cell.dataset, cell.dataset),
        "alpha": alpha,
        "density": Entry(f"{cell.density:g}", cell.density),
        "method": Entry(cell.column, cell.column),
    }


def _row(cell: Cell, found: Sequence[Mapping[str, Any]]) -> dict[str, Entry]:
    theirs = cell.paper or {}
    row = {"ours %": Entry("not run"), "paper %": Entry("-")}
    if theirs:
        row["paper %"] = Entry(percent(theirs["mean"], theirs.get("std")), theirs["mean"])
    if not found:
        return row
    ours = summarise([numbers_of(record) for record in found])
    row |= {name: COLUMNS[name](ours) for name in ("best %", "seeds")}
    row |= {"before %": COLUMNS["before %"](ours)} if ours.before is not None else {}
    mean, dropped = COLUMNS["accuracy %"](ours), ours.dropped * ours.seeds
    marks = " (stale)" if any(stale(record, cell) for record in found) else ""
    marks += f" ({dropped:.0f} clients dropped)" if dropped else ""
    row["ours %"] = Entry(mean.text + marks, mean.value)
    if theirs and ours.accuracy is not None:
        apart = 100 * ours.accuracy - theirs["mean"]
        row["difference"] = Entry(f"{apart:+.2f}", apart)
    for way, sent in (("up", ours.up), ("down", ours.down)):
        each, saving = sent / ours.orders, ours.dense / 2 / sent
        said = f", paper {theirs[way]:g}x" if way in theirs else ""
        row[f"{way} / client"] = Entry(f"{amount(each)} ({saving:.1f}x{said})", each)
    row[TRANSFER] = transfer((ours.up + ours.down) / ours.orders)
    return row | {"seconds": Entry(f"{ours.seconds:.0f}", ours.seconds)}


def panels(cells: Sequence[Cell], seeds: int | None, stored: Stored) -> dict[str, dict[str, list[Any]]]:
    """The stored curves, by row of the table and by method. Dense FedAvg, which has no density, is in every row."""
    out: dict[str, dict[str, list[Any]]] = {}
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
