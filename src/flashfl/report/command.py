"""The commands `report`, `figure` and `watch`: their options and what they do."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import files
from ..core.errors import ConfigError

if TYPE_CHECKING:
    from .load import Found

FORMATS = ("html", "png", "csv", "md")
FIGURES = "sm-heatmap, sm-layers, accuracy-rounds, accuracy-bytes, layer-sensitivity, flops-bytes, mismatch-rounds"

Add = Callable[..., argparse.ArgumentParser]


def add_commands(add: Add) -> None:
    """Tell a command line about the three commands."""
    report = add("report", _report, "write one self-contained page (or image, or table) about runs")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or folders that hold some")
    report.add_argument("--out", type=Path, help="the file to write (default: report.html; md and csv: to the screen)")
    report.add_argument("--format", choices=FORMATS, help="default: as the file's name says, else html")

    figure = add("figure", _figure, "draw one of the paper's figures from runs")
    figure.add_argument("name", help=FIGURES)
    figure.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or folders that hold some")
    figure.add_argument("--out", type=Path, help="png, svg or pdf (default: NAME.png)")

    watch = add("watch", _watch, "serve the page on this machine, refreshed while runs go on")
    watch.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="where runs are (default: runs)")
    watch.add_argument("--port", type=int, default=8327, help="default: 8327; 0: any that is free")


def _report(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    form = args.format or (args.out.suffix.lstrip(".").lower() if args.out and args.out.suffix else "html")
    if form not in FORMATS:
        raise ConfigError(f"--out {args.out}: the format {form!r} is not one of {', '.join(FORMATS)}")
    found = _load(args.runs)
    if not found.runs:
        raise ConfigError("there is no run to report on")
    if form in ("csv", "md") and args.out is None:
        sys.stdout.write(_text(form, found))
    else:
        print(write(found, args.out or Path(f"report.{form}"), form))
    return 0


def write(found: Found, path: Path, form: str = "html") -> Path:
    """A report in a file."""
    if form == "png":
        from . import figures

        path.parent.mkdir(parents=True, exist_ok=True)
        return figures.save(figures.overview(found.runs), path)
    files.put(path, _text(form, found).encode())
    return path


def _text(form: str, found: Found) -> str:
    if form == "html":
        from .gather import page_data
        from .html import page

        return page(page_data(found))
    from . import tables

    return tables.markdown(found) if form == "md" else tables.rounds_csv(found)


def _load(paths: Sequence[Path]) -> Found:
    from .load import load

    found = load(paths)
    for problem in found.problems:
        print(f"flashfl: left out: {problem.why}", file=sys.stderr)
    return found


def _figure(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from . import figures

    print(figures.save(figures.figure(args.name, _load(args.runs).runs), args.out or Path(f"{args.name}.png")))
    return 0


def _watch(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from .watch import serve

    server = serve(args.folder, args.port, lambda address: print(f"{args.folder} at {address} (stop with Ctrl-C)"))
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


def page_for(folder: Path, runs: Sequence[Any] | None = None) -> Path | None:
    """The page about the runs in a folder, written into it; a page that cannot be made is a warning, no more."""
    try:
        from .load import load

        wanted = [Path(run) for run in runs] if runs else [folder]
        return write(load(wanted), folder / "report.html")
    except Exception as error:  # the table has been printed, and hours of runs must not end in a traceback
        warnings.warn(f"the report page could not be written: {error}", RuntimeWarning)
        return None
