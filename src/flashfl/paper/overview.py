"""All tables on one page: our results beside the paper's, what is known about the differences, and what is missing."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..data import registry
from ..run.table import Table
from .cells import Cell, chosen, every_table, load_table
from .far import Compared, far_table
from .results import Record, Stored
from .tables import FAR, MEANINGS, NEAR, miss_of, table_of, words

Place = tuple[str, float | None]  # a data set, and an alpha where a section has only one

_FAR_AWAY = f"Cells more than {FAR:g} combined spreads from the paper"
_NEEDS = {"sst2": "needs the weights of BERT-base"}
_LEFT_OUT = {
    "femnist": "femnist: the paper's row at density 0.05 repeats a row of CIFAR-100, so the main table leaves it out. "
    "The paper's second figure for FEMNIST at density 0.05 is in the table `savings`."
}
_WHERE = "Data sets belong in the folder FLASHFL_DATA. `flashfl data` lists the missing ones."


@dataclass(frozen=True)
class Section:
    """One table, or a part of it: the command that shows it if there is one, its rows, and notes on it."""

    title: str
    command: str
    table: Table


@dataclass(frozen=True)
class Overview:
    """Everything on the page."""

    said: Sequence[str]
    sections: Sequence[Section]
    far: Table
    missing: Table

    def markdown(self) -> str:
        """The page as Markdown."""
        first, *counts = (f"{textwrap.fill(text, 120)}\n" for text in self.said)
        made = "Made by `flashfl reproduce --all`. Do not edit by hand.\n"
        lines = ["# Results beside the paper's", "", made, first, MEANINGS.markdown(), *counts]
        for section in self.all():
            command = [f"`{section.command}`", ""] if section.command else []
            lines += [f"## {section.title}", "", *command, section.table.markdown()]
        return "\n".join(lines)

    def all(self) -> list[Section]:
        """The sections, and below them what is far from the paper and what is missing."""
        ends = [Section(_FAR_AWAY, "", self.far), Section("What is missing", "", self.missing)]
        return [*self.sections, *(section for section in ends if section.table.rows)]


def every_cell(**filters: str) -> dict[str, list[Cell]]:
    """The cells of all tables that the filters choose, by table."""
    tables = every_table()
    found = chosen([cell for table in tables.values() for cell in table.cells], **filters)
    return {name: [cell for cell in table.cells if cell in found] for name, table in tables.items()}


def overview(cells: Mapping[str, Sequence[Cell]], seeds: int | None, stored: Stored) -> Overview:
    """The page about these cells. Data sets without any result are listed at its end."""
    groups = [(name, place, some) for name in cells for place, some in _groups(name, cells[name]).items()]
    found = {_key(cell): stored.all(cell, seeds) for _, _, some in groups for cell in some}
    sections = [
        _section(name, place, table_of(name, some, seeds, stored))
        for name, place, some in groups
        if any(found[_key(cell)] for cell in some)
    ]
    compared: dict[str, Compared] = {}  # the first table that has a cell counts
    for name, _, some in groups:
        for cell in some:
            mine = found[_key(cell)]
            if (miss := miss_of(cell, mine)) and miss.spreads is not None:
                compared.setdefault(cell.place(0), Compared(name, cell, mine, miss.points, miss.spreads))
    missing = Counter((name, dataset) for name, (dataset, _), some in groups for cell in some if not found[_key(cell)])
    known = {cell.dataset for _, _, some in groups for cell in some if found[_key(cell)]}
    return Overview(
        _counted(found, compared.values()), sections, far_table(compared.values()), _missing(missing, known)
    )


def _key(cell: Cell) -> tuple[str, int]:
    """What two cells with equal results have in common."""
    return cell.place(0), cell.up


def _groups(name: str, cells: Sequence[Cell]) -> dict[Place, list[Cell]]:
    """The cells by data set. The main table is long, so it is divided by alpha too."""
    found: dict[Place, list[Cell]] = {}
    datasets = list(dict.fromkeys(cell.dataset for cell in cells))
    for cell in sorted(cells, key=lambda cell: datasets.index(cell.dataset)):
        found.setdefault((cell.dataset, cell.alpha if name == "main" else None), []).append(cell)
    return found


def _section(name: str, place: Place, table: Table) -> Section:
    """A table without the columns that its heading states, or that are empty."""
    dataset, alpha = place
    title, command, stated = f"{table.title}: {dataset}", f"flashfl reproduce {name} --dataset {dataset}", {"dataset"}
    if alpha is not None:
        title, command, stated = f"{title}, alpha {alpha:g}", f"{command} --alpha {alpha:g}", {*stated, "alpha"}
    filled = [any(row[i].text not in ("", "-") for row in table.rows) for i in range(len(table.head))]
    kept = [i for i, column in enumerate(table.head) if column not in stated and filled[i]]
    notes = [n["text"] for n in load_table(name).notes if n["dataset"] == dataset and n.get("alpha") in (None, alpha)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return Section(title, command, Table([table.head[i] for i in kept], rows, notes=notes))


def _counted(found: Mapping[tuple[str, int], Sequence[Record]], compared: Iterable[Compared]) -> list[str]:
    """How many cells have results, and for each data set how far they lie from the paper."""
    done = sum(map(bool, found.values()))
    said = [
        f"The tables compare our results with the paper's. A cell is one figure of the paper; {done} of {len(found)} "
        "have results. Notes below the tables, and a list of cells far from the paper, explain differences."
    ]
    by: dict[str, list[float]] = {}
    for one in compared:
        by.setdefault(one.cell.dataset, []).append(one.spreads)
    for dataset, some in by.items():
        near, far = (sum(spreads <= limit for spreads in some) for limit in (NEAR, FAR))
        said.append(
            f"{dataset}: {len(some)} cells have a value for *spreads*. At most {NEAR:g}: {near} cells. {NEAR:g} to "
            f"{FAR:g}: {far - near}. Larger: {len(some) - far}."
        )
    return said


def _missing(cells: Mapping[tuple[str, str], int], known: Collection[str]) -> Table:
    """For each data set: how many cells of each table have no result, why, and the command that runs them."""
    by: dict[str, list[str]] = {}
    for (name, dataset), count in cells.items():
        by.setdefault(dataset, []).append(f"{name} {count}")
    rows = []
    for dataset, counts in by.items():
        why = "not run yet" if dataset in known else _NEEDS.get(dataset, "needs the data set")
        command = f"`flashfl reproduce --all --dataset {dataset} --budget-minutes 600`"
        rows.append((dataset, ", ".join(counts), why, command))
    get = [f"{dataset}: {registry.info(dataset).files.get}." for dataset in by if dataset not in known]
    notes = [*([_WHERE] if get else []), *get, *(_LEFT_OUT[dataset] for dataset in by if dataset in _LEFT_OUT)]
    return words(("data set", "missing cells of each table", "why", "command"), rows, notes)
