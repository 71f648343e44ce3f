"""The commands `report`, `figure`, `watch` and `reproduce`: their options and what they do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import files
from ..core.errors import ConfigError, check_range, warn
from ..paper import TABLES

if TYPE_CHECKING:
    from ..paper.cells import Cell
    from ..paper.results import Stored
    from .load import Found

FORMATS = ("html", "png", "csv", "md")
FIGURES = (
    "sm-heatmap, sm-layers, accuracy-rounds, accuracy-bytes, layer-sensitivity, flops-bytes, mismatch-rounds, "
    "accuracy-total"
)
_RUNS = "folders of runs, or folders that contain runs"
_FILTERS = ("dataset", "alpha", "density", "method")
_PLOTS, _TEXTS = (".png", ".svg", ".pdf"), (".md", ".html")


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands to a command line."""
    report = add("report", _report, "write a report about runs: one page, an image or a table")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=_RUNS)
    report.add_argument("--out", type=Path, help="file to write (default: report.html; md and csv are printed)")
    report.add_argument("--format", choices=FORMATS, help="format (default: the ending of --out, or html)")

    figure = add("figure", _figure, "draw one of the paper's figures from your runs")
    figure.add_argument("name", help=FIGURES)
    figure.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=_RUNS)
    figure.add_argument("--out", type=Path, help="png, svg or pdf file to write (default: NAME.png)")

    watch = add("watch", _watch, "show runs in a browser while they go on (served to this machine only)")
    watch.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    watch.add_argument("--port", type=int, default=8327, help="port to serve on (default: 8327; 0: any free port)")

    said = "compare our results with a table of the paper; with --budget-minutes, run missing ones"
    again = add("reproduce", _reproduce, said)
    again.add_argument("table", nargs="?", default="", help=", ".join(TABLES))
    again.add_argument("--all", action="store_true", help="all tables on one page, and what is missing")
    for name in _FILTERS:
        said = f"show or run only table entries with this {name} (several: comma-separated)"
        again.add_argument(f"--{name}", default="", help=said)
    said = "number of seeds per table entry (default: 1 with --budget-minutes, else all)"
    again.add_argument("--seeds", type=int, help=said)
    said = "minutes to spend on missing results (default: 0, only show what is there)"
    again.add_argument("--budget-minutes", type=float, default=0.0, help=said)
    said = "folder of finished results; new ones are added to it (default: results)"
    again.add_argument("--results", type=Path, default=Path("results"), help=said)
    said = "folder for the runs that this command starts (default: runs/reproduce)"
    again.add_argument("--runs", type=Path, default=Path("runs/reproduce"), help=said)
    said = "folder of data sets (default: the environment variable FLASHFL_DATA, or ./data)"
    again.add_argument("--data-root", default="", help=said)
    again.add_argument("--device", default="auto", help="auto, cpu or cuda")
    said = "also write the table (.md, .html), or a plot of accuracy against bytes (.png, .svg, .pdf); with --all the "
    said += "page (.html, .md; default: results.html)"
    again.add_argument("--out", type=Path, help=said)


def _report(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    form = args.format or (args.out.suffix[1:].lower() if args.out else "") or "html"
    if form not in FORMATS:
        raise ConfigError(f"--out {args.out}: cannot write the format {form!r}; choose one of {', '.join(FORMATS)}")
    found = _load(args.runs)
    if form in ("csv", "md") and args.out is None:
        print(_text(form, found), end="")
    else:
        print(write(found, args.out or Path(f"report.{form}"), form))
    return 0


def write(found: Found, path: Path, form: str = "html") -> Path:
    """Write a report to a file."""
    if form == "png":
        from . import figures
        from .drawing import save

        return save(figures.overview(found.runs), path)
    files.put(path, _text(form, found).encode(errors="replace"))  # a folder may have a name that is no text
    return path


def _text(form: str, found: Found) -> str:
    if form == "html":
        from .page import page, page_data

        return page(page_data(found))
    from .groups import rounds_csv, task_tables

    return task_tables(found) if form == "md" else rounds_csv(found)


def _load(paths: Sequence[Path]) -> Found:
    from .load import load

    found = load(paths)
    for why in found.problems.values():
        print(f"flashfl: skipped: {why}", file=sys.stderr)
    if not found.runs:
        raise ConfigError("there is no run to show: give folders that contain runs")
    return found


def _figure(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from . import figures
    from .drawing import save

    print(save(figures.figure(args.name, _load(args.runs).runs), args.out or Path(f"{args.name}.png")))
    return 0


def _watch(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .watch import serve

    server, address = serve(args.folder, args.port)
    print(f"{args.folder} at {address} (stop with Ctrl-C)", flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


def _reproduce(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from ..paper.cells import chosen, load_table
    from ..paper.overview import every_cell, overview
    from ..paper.page import page
    from ..paper.reproduce import reproduce
    from ..paper.results import Stored, settled

    _check_reproduce(args)
    filters = {name: getattr(args, name) for name in _FILTERS}
    tables = every_cell(**filters) if args.all else {args.table: chosen(load_table(args.table).cells, **filters)}
    if not args.budget_minutes and not args.results.is_dir():
        raise ConfigError(
            f"--results {args.results}: there is no such folder. Clone the flashfl repository and give its folder "
            "`results`."
        )
    failed = 0
    if args.budget_minutes:
        cells = [cell for some in tables.values() for cell in some]
        settings = {"device": args.device, "data_root": args.data_root}
        _, failed = reproduce(cells, args.seeds or 1, args.results, args.runs, args.budget_minutes, settings)
    stored = Stored(args.results)
    tables = {name: [settled(cell, stored) or cell for cell in some] for name, some in tables.items()}
    if args.all:
        found, out = overview(tables, args.seeds, stored), args.out or Path("results.html")
        files.put(out, (found.markdown() if out.suffix == ".md" else page(found)).encode())
        print(out)
    else:
        _show_table(args, tables[args.table], stored)
    return 1 if failed else 0


def _check_reproduce(args: argparse.Namespace) -> None:
    if bool(args.table) == args.all:
        raise ConfigError(f"flashfl reproduce needs one table ({', '.join(TABLES)}), or --all")
    endings = _TEXTS if args.all else _TEXTS + _PLOTS
    if args.out and args.out.suffix not in endings:
        raise ConfigError(f"--out {args.out}: must end in one of {', '.join(endings)}")
    if args.seeds is not None:
        check_range("[1, inf)", **{"--seeds": args.seeds})
    check_range("[0, inf]", "0 only shows results", **{"--budget-minutes": args.budget_minutes})


def _show_table(args: argparse.Namespace, cells: Sequence[Cell], stored: Stored) -> None:
    """Print one table. Write it, or a plot of its cells, to --out."""
    from ..paper.tables import ABOUT, add_flashplus, panels, table_of

    table = table_of(args.table, cells, args.seeds, stored)
    print(table.markdown())
    if args.out and args.out.suffix in _PLOTS:
        from .drawing import save
        from .figures import accuracy_bytes_of_cells

        shown = panels(cells, args.seeds, stored)
        add_flashplus(shown, args.results / "bench" / "plus.jsonl")
        if not shown:
            raise ConfigError(f"--out {args.out}: there is nothing to draw, as none of these cells has been run")
        print(save(accuracy_bytes_of_cells(shown), args.out), file=sys.stderr)
    elif args.out:
        from .page import table_page

        files.put(args.out, (table_page(table, ABOUT) if args.out.suffix == ".html" else table.markdown()).encode())


def page_for(folder: Path, runs: Sequence[Path]) -> Path | None:
    """Write the page about these runs into a folder. If that fails, warn: hours of runs must not end in a traceback."""
    try:
        from .load import load

        return write(load(runs), folder / "report.html")
    except Exception as error:
        warn(f"the report page could not be written: {error}")
        return None
