"""A run's state on disk: tensors as safetensors, the rest as JSON, written so that a crash leaves the last good one.

A checkpoint is two files. The tensors are written first; the JSON, which holds their digest and its own, is moved into
place last and makes the checkpoint exist. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..core.engine import JSON, Engine, Population
from ..core.errors import CheckpointError, ConfigError, warn
from ..core.exchange import Traffic
from ..core.files import put
from ..core.mask import Mask, Recipe, Weights
from ..core.parts import build, coerce
from ..core.state import Phase, Plan, State
from .identity import differences
from .run import Run

FORMAT = 3
_COUNTERS = ("round", "attempt", "counted")
_NAME = re.compile(r"checkpoint-(\d{8})\.json")


class Unusable(CheckpointError):
    """A checkpoint that is damaged or has another format. The one before it may be good."""


class Foreign(Unusable):
    """A checkpoint of another run."""


@dataclass(frozen=True)
class Checkpoint:
    """A state, and as JSON: what clients remember, who they are, and how far the run's records had got."""

    state: State
    memory: Mapping[str, JSON]
    clients: Mapping[str, JSON]
    rounds: int
    traffic: Traffic


class Keeper:
    """Keeps the checkpoints of a run: at intervals, at the end, and when something ends the run early."""

    def __init__(self, run: Run, engine: Engine, clients: Population, identity: Mapping[str, Any]) -> None:
        self.run, self.engine, self.clients, self.identity = run, engine, clients, identity
        self.folder = run.folder / "checkpoints" if run.folder else None

    def begin(self) -> None:
        """A new run starts in the folder: remove the checkpoints, mask snapshots and model of an earlier one."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            for name in ("snapshots", "private"):
                shutil.rmtree(self.folder.with_name(name), ignore_errors=True)
            for name in ("model.safetensors", "model.masks.safetensors"):
                self.folder.with_name(name).unlink(missing_ok=True)

    def snapshot(self) -> None:
        """The state and what the engine remembers belong together now, whatever happens in the next round."""
        if self.folder is not None:
            self.engine.memory.snapshot()

    def keep(self) -> bool:
        """Write a checkpoint. If that fails, for instance because the disk is full, warn and return False."""
        if self.folder is None or self.run.state is None:
            return True
        try:
            self.run.results.sync()
            memory, clients = self.engine.memory.save(), self.clients.save()
            point = Checkpoint(self.run.state, memory, clients, self.run.rounds, self.run.traffic)
            save(self.folder, point, self.identity)
        except OSError as error:
            self._failed(error)
            return False
        self.engine.memory.keep_only(referenced(self.folder))
        return True

    @contextmanager
    def on_the_way_out(self) -> Iterator[None]:
        """Whatever ends the run inside, its finished rounds are kept."""
        try:
            yield
        except BaseException:
            try:
                self.keep()
            except Exception as error:  # a lost device, say; what ended the run must be what is raised
                self._failed(error)
            raise

    def _failed(self, error: Exception) -> None:
        warn(f"could not write a checkpoint to {self.folder} ({error}); the last good one is kept")

    def load(self, plan: Plan) -> State:
        """Restore the newest usable checkpoint everywhere; its state."""
        assert self.folder is not None
        point = load(self.folder, plan, self.identity, self._accept)
        self.engine.memory.keep_only(referenced(self.folder))  # from now on too, masks in checkpoints are kept
        self.run.rounds, self.run.traffic = point.rounds, point.traffic
        self.run.results.resume(point.rounds)
        return point.state

    def _accept(self, point: Checkpoint) -> None:
        self.engine.memory.load(point.memory)
        self.clients.load(point.clients)


def save(folder: Path, point: Checkpoint, identity: Mapping[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint and forget all but the last `keep`."""
    tensors, described = _describe(point.state)
    stem = folder / f"checkpoint-{point.rounds:08d}"
    file = stem.with_suffix(".safetensors")
    try:
        put(file, lambda path: save_file(tensors, path), sync=True)
        record = {
            "flashfl checkpoint": FORMAT,
            "identity": dict(identity),
            "tensors": _file_digest(file),
            "state": described,
            "memory": point.memory,
            "clients": point.clients,
            "rounds": point.rounds,
            "traffic": asdict(point.traffic),
        }
        put(stem.with_suffix(".json"), json.dumps({**record, "digest": _digest(record)}).encode(), sync=True)
    except SafetensorError as error:  # its own error for a full disk
        for partial in folder.glob("*.partial"):
            partial.unlink(missing_ok=True)
        raise OSError(str(error)) from None
    ours = [path for path in found_in(folder) if path.stem <= stem.name]  # later ones were of no use to this run
    for old in ours[keep:]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    return stem.with_suffix(".json")


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def load(
    folder: Path, plan: Plan, identity: Mapping[str, Any], accept: Callable[[Checkpoint], None] | None = None
) -> Checkpoint:
    """The newest usable checkpoint of this run. Others are named in a warning.

    accept: takes over what a checkpoint holds beside the state, for a run that goes on; if it cannot, the checkpoint is
    not usable.
    """
    found = found_in(folder)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {folder}: start the run again (--overwrite if it had begun)")
    passed: dict[Path, Unusable] = {}
    for path in found:
        try:
            point = _read(path, plan, identity)
            if accept is not None:
                _take_over(path, point, accept)
        except Unusable as error:
            passed[path] = error
            continue
        if passed:
            warn(f"{'; '.join(map(str, passed.values()))}. Continuing from {path.name}.")
        for later, reason in passed.items() if accept is not None else ():
            if not isinstance(reason, Foreign):  # it must not come back: the results are cut too
                with suppress(OSError):
                    later.rename(later.with_name(f"{later.name}.unused"))
        return point
    if foreign := [error for error in passed.values() if isinstance(error, Foreign)]:
        raise CheckpointError(f"{foreign[0]}. Resume with the same settings, or use another folder.")
    raise CheckpointError(
        f"no checkpoint in {folder} can be used: {'; '.join(map(str, passed.values()))}. "
        "Start the run again (--overwrite)."
    )


def _take_over(path: Path, point: Checkpoint, accept: Callable[[Checkpoint], None]) -> None:
    try:
        accept(point)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Unusable(f"{path.name}: what clients remember cannot be read ({error})") from None


def _read(path: Path, plan: Plan, identity: Mapping[str, Any]) -> Checkpoint:
    record, tensors = read_record(path), path.with_suffix(".safetensors")
    try:
        if _file_digest(tensors) != record.get("tensors"):
            raise Unusable(f"{tensors.name} is damaged or truncated: its content does not match its digest")
    except OSError as error:
        raise Unusable(f"{tensors.name} cannot be read ({error.strerror})") from None
    if different := list(differences(record["identity"], identity)):
        raise Foreign(f"{path} belongs to another run: its {'; its '.join(different)}")
    return _restore(path, record, plan)


def found_in(folder: Path) -> list[Path]:
    """The records of a folder's checkpoints, the newest first."""
    return sorted((p for p in folder.glob("checkpoint-*.json") if _NAME.fullmatch(p.name)), reverse=True)


def read_record(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON, if it is whole; its tensors are not looked at."""
    try:
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or "flashfl checkpoint" not in record:
            raise Unusable(f"{path.name} is not a flashfl checkpoint")
        found, digest = record["flashfl checkpoint"], record.pop("digest", None)
        if found != FORMAT:
            raise Unusable(f"{path.name} has format {found!s:.20}, and this version of flashfl reads format {FORMAT}")
        if digest != _digest(record):
            raise Unusable(f"{path.name} is damaged: its content does not match its digest")
        for name in ("identity", "state", "memory", "clients", "traffic"):
            if not isinstance(record.get(name), dict):
                raise Unusable(f"{path.name} is damaged: it has no table {name!r}")
    except (OSError, ValueError, RecursionError) as error:
        raise Unusable(f"{path.name} cannot be read ({error})") from None
    return record


def _digest(record: Mapping[str, Any]) -> str:
    """The digest of a record's JSON text."""
    return hashlib.blake2b(json.dumps(record).encode()).hexdigest()


def _describe(state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state as tensors (packed) and JSON."""
    tensors: dict[str, Tensor] = {"weights": state.weights.packed().cpu()}
    recipes: dict[str, Any] = {}  # of every mask, or None
    for name, value in {"mask": state.mask, **{f"extra {name}": value for name, value in state.extra.items()}}.items():
        if isinstance(value, Mask):
            tensors[name] = torch.from_numpy(value.packed.copy())
            recipes[name] = value.recipe and asdict(value.recipe)
        else:
            tensors[name] = value.cpu().clone(memory_format=torch.contiguous_format)  # may be another's too
    counters = {name: getattr(state, name) for name in _COUNTERS}
    return tensors, {"phase": asdict(state.phase), **counters, "masks": recipes}


def _restore(path: Path, record: Mapping[str, Any], plan: Plan) -> Checkpoint:
    try:
        tensors, described = load_file(path.with_suffix(".safetensors")), record["state"]
        found: dict[str, Mask | Tensor] = {name: value.to(plan.device) for name, value in tensors.items()}
        for name, recipe in described["masks"].items():
            made = recipe and build(Recipe, recipe)
            found[name] = Mask.unpack(plan.layout, tensors[name].numpy(), plan.device, made)
        mask, values = found.pop("mask"), found.pop("weights")
        if not (isinstance(mask, Mask) and isinstance(values, Tensor)):
            raise ValueError("its mask or its weights are missing")
        counters = {name: coerce(described[name], int, name) for name in _COUNTERS}
        rounds, traffic = coerce(record["rounds"], int, "rounds"), build(Traffic, record["traffic"])
        if min(*counters.values(), rounds, *astuple(traffic)) < 0:
            raise ValueError("a counter is below 0")
        state = State(
            plan, Weights.unpack(mask, values), build(Phase, described["phase"]), **counters,
            extra={name.removeprefix("extra "): value for name, value in found.items()},
        )  # fmt: skip
        return Checkpoint(state, record["memory"], record["clients"], rounds, traffic)
    except (ConfigError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise Unusable(f"{path.name} does not hold a state of this model ({error})") from None


def referenced(folder: Path) -> set[str]:
    """The hashes of all masks that a kept checkpoint still needs."""
    needed: set[str] = set()
    for path in found_in(folder):
        with suppress(Unusable, TypeError):
            needed |= set(read_record(path)["memory"].get("masks", ()))
    return needed
