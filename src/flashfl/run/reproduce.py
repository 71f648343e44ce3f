"""`flashfl reproduce TABLE`: run the missing cells of one of the paper's tables and show ours beside theirs."""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, DataError, FlashError
from ..core.files import put
from .cells import Cell, load_table
from .compare import OutOfTime, run_or_continue
from .lock import claim
from .progress import amount
from .stored import commit, missing, pending, recipe_of, results_of, stale, write_result


def reproduce(
    cells: Sequence[Cell], seeds: int, results: Path, runs: Path, budget_minutes: float, overrides: Mapping[str, Any]
) -> tuple[int, int]:
    """Run what is missing until the budget is spent; how many cells were finished, and how many could not be run.

    A cell that was interrupted, by the end of the budget too, goes on from its last checkpoint, unless that is of
    another recipe; one that fails is named and the others go on. Several processes may work on one table: none takes a
    cell that another has begun.
    """
    until, finished, failed = time.monotonic() + budget_minutes * 60, 0, 0
    _check_writable(results)
    commit()  # of the code that is loaded, whatever is committed while cells run
    todo = list(pending(cells, seeds, results))
    lost: dict[str, int] = {}  # data sets that cannot be read, and how many cells were passed over for it
    for at, (cell, seed) in enumerate(todo, 1):
        if time.monotonic() >= until:
            _say_spent(budget_minutes, len(todo) - at + 1)
            break
        dataset = cell.task["dataset"]
        if dataset in lost:
            lost[dataset] += 1
            continue
        folder = runs / f"recipe{recipe_of(cell.method['name'])}" / cell.place(seed)
        with claim(folder.with_name(folder.name + ".lock")) as ours:
            if not ours or not missing(cell, seed, results):
                print(f"{cell.place(seed)}: another process has it", file=sys.stderr)
                continue
            try:
                config = cell.config(seed, **overrides)
                run = run_or_continue(config, folder, f"[{at}/{len(todo)}] {cell.place(seed)}", until=until)
                path = write_result(cell, seed, run, results)
            except OutOfTime:
                _say_spent(budget_minutes, len(todo) - at + 1, " (one is begun, and goes on from its checkpoint)")
                break
            except (FlashError, OSError, RuntimeError) as error:
                if isinstance(error, NotImplementedError | RecursionError):
                    raise  # a fault of the code, which every cell would have
                if not isinstance(error, FlashError):
                    traceback.print_exc()
                print(f"{cell.place(seed)} could not be run: {type(error).__name__}: {error}", file=sys.stderr)
                failed += 1
                if isinstance(error, DataError):
                    lost[dataset] = 0
                continue
        finished += 1
        print(f"{path}: {100 * run['end']['accuracy']:.2f} % in {run['end']['seconds']:.0f} s", file=sys.stderr)
    for dataset, count in lost.items():
        if count:
            print(f"{dataset}: {count} other cells were not tried, as the data cannot be read", file=sys.stderr)
    return finished, failed + sum(lost.values())


def _say_spent(minutes: float, left: int, more: str = "") -> None:
    print(f"the budget of {minutes:g} minutes is spent; {left} cells are left{more}", file=sys.stderr)


def _check_writable(results: Path) -> None:
    """Found out before hours are spent on what could not be kept."""
    probe = results / f".probe-{os.getpid()}"
    try:
        put(probe, b"results can be written here\n")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--results {results}: nothing can be written there ({error.strerror})") from None


def figures(cell: Cell, seeds: int | None, results: Path) -> dict[str, Any] | None:
    """Our mean and spread over seeds (None: all there are) for a cell, in percent, and what it cost."""
    found = results_of(cell, seeds, results)
    if not found:
        return None
    accuracy = [100 * r["accuracy"] for r in found]
    before = [100 * r["views"]["before"] for r in found if "before" in r.get("views", {})]
    rounds, each = found[0]["rounds"], found[0]["clients_per_round"]
    return {
        "mean": statistics.fmean(accuracy),
        "std": statistics.stdev(accuracy) if len(accuracy) > 1 else None,
        "best": statistics.fmean(100 * r["best"] for r in found),
        "before": statistics.fmean(before) if len(before) == len(found) else None,
        "seeds": len(found),
        "up": statistics.fmean(r["bytes"]["up"] for r in found) / (rounds * each),
        "down": statistics.fmean(r["bytes"]["down"] for r in found) / (rounds * each),
        "dense": 4 * found[0]["values"],
        "seconds": statistics.fmean(r["seconds"] for r in found),
        "stale": any(stale(r, cell) for r in found),
        "left_out": sum(r.get("left_out", 0) for r in found),
    }


def _said(mean: float, std: float | None) -> str:
    return f"{mean:.2f} ± {std:.2f}" if std is not None else f"{mean:.2f}"


_COLUMNS = (
    "method", "ours %", "best %", "before %", "paper %", "difference", "seeds", "up / client", "down / client",
    "seconds",
)  # fmt: skip


def lines(name: str, cells: Sequence[Cell], seeds: int | None, results: Path) -> list[list[str]]:
    """The table's head, and a line for each cell: ours after the last round, at its best, the paper's, bytes and time.

    Before: the model before the server's subsampling, a column only where a cell has such a model.
    """
    _, keys, _ = load_table(name)
    rows = [{**_place(cell), **_row(cell, figures(cell, seeds, results))} for cell in cells]
    head = [c for c in (*keys, *_COLUMNS) if c != "before %" or any("before %" in row for row in rows)]
    return [head, *([row.get(c, "") for c in head] for row in rows)]


def _place(cell: Cell) -> dict[str, str]:
    alpha = "-" if cell.alpha is None else f"{cell.alpha:g}"
    return {"dataset": cell.task["dataset"], "alpha": alpha, "density": f"{cell.density:g}", "method": cell.column}


def _row(cell: Cell, ours: Mapping[str, Any] | None) -> dict[str, str]:
    theirs = cell.paper
    row = {"ours %": "not run", "paper %": _said(theirs["mean"], theirs.get("std")) if theirs else "-"}
    if ours is None:
        return row
    row["ours %"] = _said(ours["mean"], ours["std"]) + (" (stale)" if ours["stale"] else "")
    if ours["left_out"]:
        row["ours %"] += f" ({ours['left_out']} clients left out)"
    row |= {f"{which} %": f"{ours[which]:.2f}" for which in ("best", "before") if ours[which] is not None}
    row |= {"seeds": str(ours["seeds"]), "seconds": f"{ours['seconds']:.0f}"}
    if theirs:
        row["difference"] = f"{ours['mean'] - theirs['mean']:+.2f}"
    for way in ("up", "down"):
        said = f", paper {theirs[way]:g}x" if theirs and way in theirs else ""
        row[f"{way} / client"] = f"{amount(ours[way])} ({ours['dense'] / ours[way]:.1f}x{said})"
    return row


def markdown(name: str, cells: Sequence[Cell], seeds: int | None, results: Path) -> str:
    """The table as Markdown."""
    title, _, _ = load_table(name)
    head, *rows = ("| " + " | ".join(line) + " |" for line in lines(name, cells, seeds, results))
    return "\n".join([f"**{title}**", "", head, "|" + "---|" * (head.count(" | ") + 1), *rows]) + "\n"


def panels(cells: Sequence[Cell], seeds: int | None, results: Path) -> dict[str, dict[str, list[Any]]]:
    """The stored curves, by row of the table and by method; dense, which has no density, is in every row."""
    out: dict[str, dict[str, list[Any]]] = {}
    sparse = [cell for cell in cells if "density" in cell.method]
    rows = [(cell.task["dataset"], cell.alpha) for cell in cells]
    for like in sorted(sparse or cells, key=lambda c: (rows.index((c.task["dataset"], c.alpha)), -c.density)):
        where = [str(like.task["dataset"])] + ([f"alpha {like.alpha:g}"] if like.alpha is not None else [])
        lines = out.setdefault(", ".join([*where, f"density {like.density:g}"] if sparse else where), {})
        for cell in cells:
            mine = cell.task == like.task and ("density" not in cell.method or cell.density == like.density)
            if mine and cell.column not in lines:
                curves = [result["curve"] for result in results_of(cell, seeds, results) if result.get("curve")]
                if curves:
                    lines[cell.column] = curves
    return {title: lines for title, lines in out.items() if lines}


def page(name: str, cells: Sequence[Cell], seeds: int | None, results: Path) -> str:
    """The table as one self-contained page."""
    from html import escape

    title, _, _ = load_table(name)
    first, *rest = lines(name, cells, seeds, results)
    head = "".join(f"<th>{escape(c)}</th>" for c in first)
    body = "".join("<tr>" + "".join(f"<td>{escape(x)}</td>" for x in row) + "</tr>\n" for row in rest)
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:90rem;padding:0 1rem}"
        ":root{color-scheme:light dark}"
        "table{border-collapse:collapse;width:100%}div{overflow-x:auto}th,td{padding:.3rem .6rem;text-align:left;"
        "border-bottom:1px solid #8884;white-space:nowrap}th{position:sticky;top:0;background:Canvas}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style><h1>{escape(title)}</h1>"
        f"<p>Ours after the last round beside the paper's, mean ± standard deviation over seeds. Best: a run's best "
        f"evaluation. Before: the model before the server cuts it to its density. Bytes per client and round, stage 1 "
        f"included, and how many times fewer that is than the model's dense size.</p>"
        f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></html>"
    )
