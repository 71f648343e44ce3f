"""Run the cells of a table that have no result yet, within a budget of time, in one or several processes."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.errors import ConfigError, DataError, FlashError
from ..core.files import make_folder
from ..run.compare import OutOfTime, run_or_continue
from ..run.config import RunConfig
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
    make_folder(results)
    try:
        tempfile.TemporaryFile(dir=results).close()
    except OSError as error:  # better now than after hours
        raise ConfigError(f"--results {results}: cannot write there ({error.strerror})") from None
    commit()  # of the code that is loaded now, whatever is committed while cells run
    stored = Stored(results)
    todo = stored.pending(cells, seeds)
    unreadable: set[str] = set()  # data sets
    try:
        for at, (cell, seed) in enumerate(todo, 1):
            if time.monotonic() >= until:
                raise OutOfTime
            ready = settled(cell, stored)
            if ready is None:
                _say(f"{cell.place(seed)}: skipped. First run `flashfl reproduce {cell.tuned}`")
            elif cell.dataset in unreadable:
                failed += 1
            else:
                try:
                    config = ready.config(seed, **overrides)
                    finished += _run(ready, config, stored, runs, f"[{at}/{len(todo)}]", until)
                except (FlashError, OSError, RuntimeError) as error:
                    _report(ready.place(seed), error)
                    failed += 1
                    if isinstance(error, DataError):
                        unreadable.add(cell.dataset)
                        _say(f"{cell.dataset}: other cells are skipped, as the data cannot be read")
    except OutOfTime:
        _say(
            f"the budget of {budget_minutes:g} minutes is spent; {len(todo) - at + 1} cells are left: run the command "
            "again to go on. A cell that has begun continues from its checkpoint"
        )
    return finished, failed


def _run(cell: Cell, config: RunConfig, stored: Stored, runs: Path, label: str, until: float) -> bool:
    """Run a cell and store its result, unless another process does."""
    seed = config.train.seed
    place = cell.place(seed)
    folder = runs / f"recipe{recipe_of(cell.method['name'])}" / place
    with claim(folder.with_name(folder.name + ".lock")) as ours:
        if not ours or not stored.missing(cell, seed):
            _say(f"{place}: skipped, as another process runs it or has finished it")
            return False
        run = run_or_continue(config, folder, f"{label} {place}", until=until)
        stored.add(cell, record_of(cell, seed, run.results))
    _say(f"{place}: {100 * run.accuracy:.2f} % in {run.seconds:.0f} s")
    return True


def _report(place: str, error: Exception) -> None:
    """Say why a cell failed. A fault of the code, which every cell would have, is raised."""
    if isinstance(error, NotImplementedError | RecursionError):
        raise error
    if not isinstance(error, FlashError):
        traceback.print_exc()
    _say(f"{place} failed: {type(error).__name__}: {error}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
