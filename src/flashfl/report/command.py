"""The commands `report`, `figure` and `watch`: their options and what they do."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import files
from ..core.errors import ConfigError

if TYPE_CHECKING:
    from .load import Found, Lookup

FORMATS = ("html", "png", "csv", "md")
FIGURES = "sm-heatmap, sm-layers, accuracy-rounds, accuracy-bytes, layer-sensitivity, flops-bytes, mismatch-rounds"
_RUNS = "folders of runs, or folders that contain runs"

Add = Callable[..., argparse.ArgumentParser]


def add_commands(add: Add, lookup: Lookup) -> None:
    """Add the three commands to a command line. lookup: finds what the paper reports for the settings of a run."""
    report = add("report", partial(_report, lookup), "write a report about runs: one page, an image or a table")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=_RUNS)
    report.add_argument("--out", type=Path, help="file to write (default: report.html; md and csv are printed)")
    report.add_argument("--format", choices=FORMATS, help="default: the file's ending, or html")

    figure = add("figure", partial(_figure, lookup), "draw one of the paper's figures from your runs")
    figure.add_argument("name", help=FIGURES)
    figure.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=_RUNS)
    figure.add_argument("--out", type=Path, help="png, svg or pdf file to write (default: NAME.png)")

    watch = add(
        "watch", partial(_watch, lookup), "show runs in a browser while they go on (served to this machine only)"
    )
    watch.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    watch.add_argument("--port", type=int, default=8327, help="default: 8327; 0 takes a free one")


def _report(lookup: Lookup, args: argparse.Namespace, overrides: dict[str, str]) -> int:
    form = args.format or (args.out.suffix.lstrip(".").lower() if args.out and args.out.suffix else "html")
    if form not in FORMATS:
        raise ConfigError(f"--out {args.out}: cannot write the format {form!r}; choose one of {', '.join(FORMATS)}")
    found = _load(args.runs, lookup)
    if not found.runs:
        raise ConfigError("there is no run to report on: give folders that contain runs")
    if form in ("csv", "md") and args.out is None:
        sys.stdout.write(_text(form, found))
    else:
        print(write(found, args.out or Path(f"report.{form}"), form))
    return 0


def write(found: Found, path: Path, form: str = "html") -> Path:
    """Write a report to a file."""
    if form == "png":
        from . import figures

        return figures.save(figures.overview(found.runs), path)
    files.put(path, _text(form, found).encode())
    return path


def _text(form: str, found: Found) -> str:
    if form == "html":
        from .page import page, page_data

        return page(page_data(found))
    from .groups import groups_table, rounds_table

    return groups_table(found).markdown() if form == "md" else rounds_table(found).csv()


def _load(paths: Sequence[Path], lookup: Lookup) -> Found:
    from .load import load

    found = load(paths, lookup)
    for problem in found.problems:
        print(f"flashfl: skipped: {problem.why}", file=sys.stderr)
    return found


def _figure(lookup: Lookup, args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from . import figures

    print(figures.save(figures.figure(args.name, _load(args.runs, lookup).runs), args.out or Path(f"{args.name}.png")))
    return 0


def _watch(lookup: Lookup, args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .watch import serve

    def ready(address: str) -> None:
        print(f"{args.folder} at {address} (stop with Ctrl-C)")

    server = serve(args.folder, args.port, ready, lookup)
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


def page_for(folder: Path, runs: Sequence[Path], lookup: Lookup) -> Path | None:
    """Write the page about these runs into a folder. If that fails, warn: hours of runs must not end in a traceback."""
    try:
        from .load import load

        return write(load(runs, lookup), folder / "report.html")
    except Exception as error:
        warnings.warn(f"the report page could not be written: {error}", RuntimeWarning)
        return None
