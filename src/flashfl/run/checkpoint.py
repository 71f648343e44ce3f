"""A run's state on disk: tensors as safetensors, the rest as JSON, written so that a crash leaves the last good one.

A checkpoint is two files. The tensors are written first; the JSON, which holds their digest and its own, is moved into
place last and makes the checkpoint exist. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..core.engine import JSON, Engine, Population
from ..core.errors import CheckpointError, warn
from ..core.exchange import Traffic
from ..core.files import put
from ..core.layout import Layout
from ..core.mask import Mask, Recipe, Weights
from ..core.state import Phase, Plan, State
from .results import Results

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

    def __init__(self, results: Results, engine: Engine, clients: Population, identity: Mapping[str, Any]) -> None:
        self.results, self.engine, self.clients, self.identity = results, engine, clients, identity
        self.folder = results.folder / "checkpoints" if results.folder else None
        self.state: State | None = None
        self.traffic = Traffic()
        self.rounds = 0  # finished rounds of all phases

    def begin(self) -> None:
        """A new run starts in the folder: remove the checkpoints, mask snapshots and model of an earlier one."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.rmtree(self.folder.with_name("snapshots"), ignore_errors=True)
            for name in ("model.safetensors", "model.masks.safetensors"):
                self.folder.with_name(name).unlink(missing_ok=True)

    def snapshot(self) -> None:
        """The state and what the engine remembers belong together now, whatever happens in the next round."""
        if self.folder is not None:
            self.engine.memory.snapshot()

    def keep(self) -> bool:
        """Write a checkpoint. If that fails, for instance because the disk is full, warn and return False."""
        if self.folder is None or self.state is None:
            return True
        try:
            self.results.sync()
            memory, clients = self.engine.memory.save(), self.clients.save()
            point = Checkpoint(self.state, memory, clients, self.rounds, self.traffic)
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

    def load(self, plan: Plan, masks: Mapping[str, Mask]) -> tuple[State, Traffic]:
        """Restore the newest usable checkpoint everywhere; the state and the traffic it ended with."""
        assert self.folder is not None
        point = load(self.folder, plan, self.identity, masks, self._accept)
        self.engine.memory.keep_only(referenced(self.folder))  # from now on too, masks in checkpoints are kept
        self.rounds = point.rounds
        self.results.resume(point.rounds)
        return point.state, point.traffic

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
    folder: Path,
    plan: Plan,
    identity: Mapping[str, Any],
    masks: Mapping[str, Mask] | None = None,
    accept: Callable[[Checkpoint], None] = lambda point: None,
) -> Checkpoint:
    """The newest usable checkpoint of this run. Others are named in a warning.

    masks: the store of masks that clients remember. All that a checkpoint names must be there. accept: takes over what
    a checkpoint holds beside the state; if it cannot, the checkpoint is not usable.
    """
    found = found_in(folder)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {folder}: start the run again (--overwrite if it had begun)")
    passed: dict[Path, Unusable] = {}
    for path in found:
        try:
            point = _read(path, plan, identity, masks)
            _take_over(path, point, accept)
        except Unusable as error:
            passed[path] = error
            continue
        if passed:
            warn(f"{'; '.join(map(str, passed.values()))}. Continuing from {path.name}.")
        if masks is not None:
            _set_aside(path for path, error in passed.items() if not isinstance(error, Foreign))
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


def _set_aside(paths: Iterable[Path]) -> None:
    """Rename later checkpoints that could not be used, so that they never come back: the results are cut too."""
    for path in paths:
        with suppress(OSError):
            path.rename(path.with_name(f"{path.name}.unused"))


def _read(path: Path, plan: Plan, identity: Mapping[str, Any], masks: Mapping[str, Mask] | None) -> Checkpoint:
    record = read_record(path)
    _check_tensors(path.with_suffix(".safetensors"), record.get("tensors"))
    _check_identity(path, record["identity"], identity)
    point = _restore(path, record, plan)
    if masks is not None:
        _check_masks(path, point.memory, masks)
    return point


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
        if not isinstance(record["memory"].get("masks", []), list):
            raise Unusable(f"{path.name} is damaged: it does not list the masks it needs")
    except (OSError, ValueError, RecursionError) as error:
        raise Unusable(f"{path.name} cannot be read ({error})") from None
    return record


def _digest(record: Mapping[str, Any]) -> str:
    """The digest of a record's JSON text."""
    return hashlib.blake2b(json.dumps(record).encode()).hexdigest()


def _check_tensors(tensors: Path, recorded: object) -> None:
    try:
        digest = _file_digest(tensors)
    except OSError as error:
        raise Unusable(f"{tensors.name} cannot be read ({error.strerror})") from None
    if digest != recorded:
        raise Unusable(f"{tensors.name} is damaged or truncated: its content does not match its digest")


def _check_masks(path: Path, memory: Mapping[str, Any], masks: Mapping[str, Mask]) -> None:
    """The masks of simulated clients must all be there. Real clients hold their own and are sent what they lack."""
    for digest in memory.get("masks", ()) if memory.get("simulated") else ():
        try:
            masks[digest]
        except (KeyError, TypeError):
            raise Unusable(f"{path.name} needs the mask {digest}, which is lost") from None
        except CheckpointError as error:
            raise Unusable(f"{path.name} needs a mask that cannot be used ({error})") from None


def _check_identity(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """The settings must be the same, but for the number of rounds: a run may be extended."""
    theirs, ours = ({**table} for table in (found, wanted))
    for table in (theirs, ours):
        if isinstance(table.get("settings"), Mapping):
            table["settings"] = {k: v for k, v in table["settings"].items() if k != "rounds"}
    samples = theirs.pop("samples", None), ours.pop("samples", None)
    different = list(_differences(theirs, ours))
    if all(samples) and samples[0] != samples[1]:
        different.append("samples differ from this run's")
    if different:
        raise Foreign(f"{path} belongs to another run: its {'; its '.join(different)}")


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """What of one run is not as in another, name by name."""
    for name in sorted({*found, *wanted}):
        theirs, ours = found.get(name), wanted.get(name)
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            yield from _differences(theirs, ours)
        elif theirs != ours:
            yield f"{name} is {str(theirs)[:200]} and this run's is {str(ours)[:200]}"


def _describe(state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state as tensors (packed) and JSON."""
    tensors: dict[str, Tensor] = {"weights": state.weights.packed().cpu()}
    masks: dict[str, Any] = {}

    def put_mask(name: str, mask: Mask) -> None:
        tensors[name] = torch.from_numpy(mask.packed.copy())
        recipe = mask.recipe
        masks[name] = recipe and {"key": str(recipe.key), "budgets": list(recipe.budgets), "nm": recipe.nm}

    put_mask("mask", state.mask)
    for name, value in state.extra.items():
        if isinstance(value, Mask):
            put_mask(f"extra {name}", value)
        else:
            tensors[f"extra {name}"] = value.cpu().clone(memory_format=torch.contiguous_format)  # may be another's too
    described = {
        "phase": asdict(state.phase),
        "round": state.round,
        "attempt": state.attempt,
        "counted": state.counted,
        "masks": masks,
    }
    return tensors, described


def _restore(path: Path, record: Mapping[str, Any], plan: Plan) -> Checkpoint:
    try:
        tensors = load_file(path.with_suffix(".safetensors"))
        described = record["state"]
        masks = {name: _mask(plan.layout, tensors[name], r, plan) for name, r in described["masks"].items()}
        weights = Weights.unpack(masks["mask"], tensors["weights"].to(plan.device))
        extra: dict[str, Mask | Tensor] = {
            name.removeprefix("extra "): masks[name] if name in masks else value.to(plan.device)
            for name, value in tensors.items()
            if name.startswith("extra ")
        }
        phase, counters = Phase(**described["phase"]), [described[name] for name in _COUNTERS]
        if not all(type(n) is int and n >= 0 for n in (*counters, record["rounds"], *record["traffic"].values())):
            raise ValueError("a counter is not a whole number of at least 0")
        state = State(plan, weights, phase, counters[0], counters[1], extra, counters[2])
        return Checkpoint(state, record["memory"], record["clients"], record["rounds"], Traffic(**record["traffic"]))
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise Unusable(f"{path.name} does not hold a state of this model ({error})") from None


def _mask(layout: Layout, packed: Tensor, recipe: Mapping[str, Any] | None, plan: Plan) -> Mask:
    mask = Mask.unpack(layout, packed.numpy(), plan.device)
    if recipe is None:
        return mask
    made = Recipe(int(recipe["key"]), tuple(recipe["budgets"]), recipe["nm"])
    return Mask(layout, mask.bits, mask.counts, made)


def referenced(folder: Path) -> set[str]:
    """The hashes of all masks that a kept checkpoint still needs."""
    needed: set[str] = set()
    for path in found_in(folder):
        with suppress(Unusable, TypeError):
            needed |= set(read_record(path)["memory"].get("masks", ()))
    return needed
