"""Carry out configurations: one, or several methods with several seeds. Finished and interrupted runs are reused."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..core.errors import CheckpointError, ConfigError, FlashError, warn
from ..core.record import RoundRecord
from ..core.rng import fold
from ..core.state import State
from ..data.tasks import TaskConfig, build_task
from ..methods import METHODS
from . import checkpoint as checkpoints
from .budget import within_budget
from .code import code_of
from .config import RunConfig, known_method
from .identity import differences
from .options import flag_of, walk
from .progress import Display
from .results import Results
from .run import Run
from .sealed import Unusable, read_record
from .simulate import simulate


class OutOfTime(Exception):
    """A run was stopped because its time is up. It can continue from its last checkpoint."""


def run_config(
    config: RunConfig,
    folder: Path | None,
    resume: bool = False,
    quiet: bool = False,
    label: str | None = None,
    until: float = math.inf,
) -> Run:
    """Carry out one configuration. Raises OutOfTime once time.monotonic() has passed `until`."""
    task = build_task(config.task, fold(config.train.seed, "task"))
    if (file := config.task.partition_file) and config.task.clients not in (TaskConfig.clients, len(task.clients)):
        warn(
            f"clients = {config.task.clients}: not used, because {file} holds a split over {len(task.clients)} clients"
        )

    def stop(state: State, record: RoundRecord) -> None:
        if time.monotonic() > until and not config.method.done(state):
            raise OutOfTime

    display = Display(label or config.method.name, config.train.rounds, quiet=quiet, then=stop)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="interrupted after")  # the command line says it itself
        run = simulate(
            config.method, task, train=config.train, folder=folder, resume=resume, overwrite=not resume,
            progress=display, header=config.to_json(),
        )  # fmt: skip
    if run.stopped == "interrupted":
        raise KeyboardInterrupt  # several runs must not go on with the next one
    return run


def run_or_continue(config: RunConfig, folder: Path, label: str, quiet: bool = False, until: float = math.inf) -> Run:
    """Carry out a configuration. Continue from the checkpoint if it belongs to this run and all records are there."""
    if points := checkpoints.found_in(folder / "checkpoints"):
        try:
            _check_records(folder, points)
            return run_config(config, folder, resume=True, quiet=quiet, label=label, until=until)
        except CheckpointError as error:
            print(f"{label}: cannot continue ({error}); starting again", file=sys.stderr)
    return run_config(config, folder, quiet=quiet, label=label, until=until)


def _check_records(folder: Path, points: Sequence[Path]) -> None:
    """A summary needs the records of all rounds. A checkpoint does not hold them."""
    try:
        recorded = len(Results.read(folder).rounds)
    except FlashError as error:
        raise CheckpointError(str(error)) from None
    done = 0
    for point in points:
        with suppress(Unusable):
            read_record(point)
            done = max(done, int(point.stem.removeprefix("checkpoint-")))
    if recorded < done:
        raise CheckpointError(
            f"its checkpoint has {done} rounds, but its results file has only {recorded}: some of its lines are lost"
        )


def compare(
    base: Callable[[str, int], RunConfig],
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    quiet: bool = False,
    overwrite: bool = False,
) -> dict[str, list[Results]]:
    """The results of every method with every seed.

    A finished run in the folder is reused and an interrupted one continues, if its settings and code are the same. One
    with other settings or code, or with unknown code, is an error unless `overwrite` is set.
    """
    jobs = []
    for name, seed in itertools.product(methods, seeds):
        config, place = base(name, seed), folder / f"{name}-seed{seed}"
        found = Results.held(place)
        other = _other(found, config) if found else ""
        if other and not overwrite:
            raise ConfigError(
                f"{place} holds a run with other {other}, so its results cannot be reused. Choose another folder with "
                "--out, or replace the run with --overwrite."
            )
        done = found if found and found.end and not other else None
        jobs.append((config, place, done, other))
    task_of = functools.cache(build_task)
    for config, _, done, _ in jobs:
        if config.train.budget and done is None:
            within_budget(config.method, task_of(config.task), config.train)  # refuses it before others train for hours
    runs: dict[str, list[Results]] = {name: [] for name in methods}
    for at, (config, place, done, other) in enumerate(jobs, 1):
        name, label = config.method.name, f"[{at}/{len(jobs)}] {config.method.name} seed {config.train.seed}"
        if done is None:
            carry_out = run_config if other else run_or_continue
            done = carry_out(config, place, label=label, quiet=quiet).results
        elif not quiet:
            print(f"{label}: reused from {place}", file=sys.stderr)
        runs[name].append(done)
    return runs


def _other(found: Results, config: RunConfig) -> str:
    """What of a run differs from this configuration: its settings, its code, or nothing. Unknown code differs."""
    code = code_of(config.method)
    if different := differences(found.header.get("config", {}), config.to_json()):
        return f"settings ({different})"
    changed = "code (flashfl or the method's file was changed since then, or its code is unknown)"
    return changed if code is None or found.header.get("code") != code else ""


def settings_for(method: str, overrides: Mapping[str, str]) -> dict[str, str]:
    """In a comparison a setting reaches the methods that have it: dense FedAvg has no density.

    A setting with a method's name before it, such as `spdst.density`, is for that method only, and wins.
    """
    every, own = _options(METHODS), _options([method])
    shared, mine = {}, {}
    for name, value in overrides.items():
        owner = _owner(name)
        if owner == method:
            mine[name.partition(".")[2]] = value
        elif owner is None and (name in own or name not in every):
            shared[name] = value
    return {**shared, **mine}


def _owner(setting: str) -> str | None:
    """The method whose name stands before a setting, if any."""
    first, dot, _ = setting.partition(".")
    return next((name for name in METHODS if dot and name.replace("-", "_") == first), None)


def check_settings(methods: Sequence[str], overrides: Mapping[str, str]) -> None:
    """An unknown method, and a setting that a comparison sets itself or that none of its methods has, are mistakes."""
    for name, instead in (("seed", "--seeds N uses the seeds 0 to N-1"), ("method", "--methods names the methods")):
        if name in overrides or f"train.{name}" in overrides:
            raise ConfigError(f"--{name} cannot be used in a comparison: {instead}")
    for name in methods:
        known_method(name)
    for name in overrides:
        if (owner := _owner(name)) is not None and owner not in methods:
            raise ConfigError(f"{flag_of(name)}: {owner} is not among the methods {', '.join(methods)}")
        if name in _options(METHODS) - _options(methods):
            raise ConfigError(f"{flag_of(name)}: none of {', '.join(methods)} has such a setting")


def _options(methods: Iterable[str]) -> set[str]:
    """The names that settings of these methods may have on the command line, short and full."""
    short = {".".join(path) for method in methods for path, _, _ in walk(METHODS[method])}
    return short | {f"method.{name}" for name in short}
