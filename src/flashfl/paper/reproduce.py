"""Run the cells of a table that have no result yet, within a budget of time, in one or several processes."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.errors import ConfigError, DataError, FlashError
from ..core.files import put
from ..run.compare import OutOfTime, run_or_continue
from ..run.lock import claim
from .cells import Cell
from .results import Stored, commit, recipe_of, record_of, settled


def reproduce(
    cells: Sequence[Cell], seeds: int, results: Path, runs: Path, budget_minutes: float, overrides: Mapping[str, str]
) -> tuple[int, int]:
    """Run what is missing until the budget is spent. Returns how many cells finished and how many failed.

    An interrupted cell continues from its last checkpoint, unless that has another recipe. A cell that fails is
    reported and the others go on. Several processes may share a table: each cell is run by one of them.
    """
    until, finished, failed = time.monotonic() + budget_minutes * 60, 0, 0
    _check_writable(results)
    commit()  # of the code that is loaded now, whatever is committed while cells run
    stored = Stored(results)
    todo = stored.pending(cells, seeds)
    unreadable: dict[str, int] = {}  # data sets, and how many cells were skipped because of each
    for at, (cell, seed) in enumerate(todo, 1):
        if time.monotonic() >= until:
            _say_spent(budget_minutes, len(todo) - at + 1)
            break
        ready = settled(cell, stored)
        if ready is None:
            print(f"{cell.place(seed)}: skipped. First run `flashfl reproduce {cell.tuned}`", file=sys.stderr)
            continue
        cell = ready
        if cell.dataset in unreadable:
            unreadable[cell.dataset] += 1
            continue
        folder = runs / f"recipe{recipe_of(cell.method['name'])}" / cell.place(seed)
        with claim(folder.with_name(folder.name + ".lock")) as ours:
            if not ours or not stored.missing(cell, seed):
                print(f"{cell.place(seed)}: skipped, as another process runs it or has finished it", file=sys.stderr)
                continue
            try:
                config = cell.config(seed, **overrides)
                run = run_or_continue(config, folder, f"[{at}/{len(todo)}] {cell.place(seed)}", until=until)
                stored.add(cell, record_of(cell, seed, run.results))
            except OutOfTime:
                _say_spent(budget_minutes, len(todo) - at + 1, " (one has begun and will continue from its checkpoint)")
                break
            except (FlashError, OSError, RuntimeError) as error:
                _report(cell.place(seed), error)
                failed += 1
                if isinstance(error, DataError):
                    unreadable[cell.dataset] = 0
                continue
        finished += 1
        print(f"{cell.place(seed)}: {100 * run.accuracy:.2f} % in {run.seconds:.0f} s", file=sys.stderr)
    for dataset, count in unreadable.items():
        if count:
            print(f"{dataset}: {count} other cells were skipped, as the data cannot be read", file=sys.stderr)
    return finished, failed + sum(unreadable.values())


def _report(place: str, error: Exception) -> None:
    """Say why a cell failed. A fault of the code, which every cell would have, is raised."""
    if isinstance(error, NotImplementedError | RecursionError):
        raise error
    if not isinstance(error, FlashError):
        traceback.print_exc()
    print(f"{place} failed: {type(error).__name__}: {error}", file=sys.stderr)


def _say_spent(minutes: float, left: int, more: str = "") -> None:
    print(
        f"the budget of {minutes:g} minutes is spent; {left} cells are left{more}: run the command again to go on",
        file=sys.stderr,
    )


def _check_writable(results: Path) -> None:
    """Find out before hours are spent on results that could not be kept."""
    probe = results / f".probe-{os.getpid()}"
    try:
        put(probe, b"results can be written here\n")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--results {results}: cannot write there ({error.strerror})") from None
