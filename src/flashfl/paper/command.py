"""The command `reproduce`: its options and what it does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ..core.errors import ConfigError

_FILTERS = ("dataset", "alpha", "density", "method")
_PLOTS, _TEXTS = (".png", ".svg", ".pdf"), (".md", ".html")


def add_reproduce(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to a command line."""
    again = add("reproduce", _reproduce, "show our results beside a table of the paper, and run the missing cells")
    names = "main, savings, hetero, r_int, stage1, initialisation, nm, static_bn, wfa or sst2"
    again.add_argument("table", help=names)
    for name in _FILTERS:
        again.add_argument(f"--{name}", default="", help="only these cells (comma-separated)")
    again.add_argument("--seeds", type=int, help="seeds of each cell (default: 1 when running, all when showing)")
    again.add_argument("--budget-minutes", type=float, default=0.0, help="how long to run; 0 (default) only shows")
    again.add_argument("--results", type=Path, default=Path("results"), help="folder of results (default: results)")
    again.add_argument("--runs", type=Path, default=Path("runs/reproduce"), help="folder of the runs")
    again.add_argument("--data-root", dest="root", default="", help="folder of data sets (default: FLASHFL_DATA)")
    again.add_argument("--device", default="auto", help="auto, cpu or cuda")
    said = "also write the table (.md, .html), or a plot of accuracy against bytes (.png, .svg, .pdf)"
    again.add_argument("--out", type=Path, help=said)


def _reproduce(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .cells import chosen, load_table
    from .reproduce import reproduce
    from .stored import Stored
    from .tables import table_of

    _check(args)
    cells = chosen(load_table(args.table).cells, **{name: getattr(args, name) for name in _FILTERS})
    if not args.budget_minutes and not args.results.is_dir():
        raise ConfigError(f"there is no folder {args.results}: give the folder of results (a checkout has one)")
    failed = 0
    if args.budget_minutes > 0:
        settings = {"device": args.device, "data_root": args.root}
        _, failed = reproduce(cells, args.seeds or 1, args.results, args.runs, args.budget_minutes, settings)
    stored = Stored(args.results)
    table = table_of(args.table, cells, args.seeds, stored)
    print(table.markdown())
    if args.out and args.out.suffix in _PLOTS:
        from ..report.figures import accuracy_bytes_of_cells, save
        from .tables import panels

        shown = panels(cells, args.seeds, stored)
        if not shown:
            raise ConfigError(f"--out {args.out}: there is nothing to draw, as none of these cells has been run")
        print(save(accuracy_bytes_of_cells(shown), args.out), file=sys.stderr)
    elif args.out:
        from ..core.files import put
        from ..report.page import table_page
        from .tables import ABOUT

        put(args.out, (table_page(table, ABOUT) if args.out.suffix == ".html" else table.markdown()).encode())
    return 1 if failed else 0


def _check(args: argparse.Namespace) -> None:
    if args.seeds is not None and args.seeds < 1:
        raise ConfigError(f"--seeds {args.seeds}: must be at least 1")
    if args.out and args.out.suffix not in _TEXTS + _PLOTS:
        raise ConfigError(f"--out {args.out}: must end in one of {', '.join(_TEXTS + _PLOTS)}")
    if not args.budget_minutes >= 0:  # NaN too
        raise ConfigError(f"--budget-minutes {args.budget_minutes:g}: must be 0 (only show) or more")
