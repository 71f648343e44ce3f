"""A run's state on disk: tensors as safetensors, the rest as JSON, written so that a crash leaves the last good one.

A checkpoint is two files. The tensors are written first; the JSON (`sealed.py`), which holds their digest and its own,
is moved into place last and makes the checkpoint exist. Nothing is pickled. A record is read as if a stranger had
written it: whatever it says, the outcome is a state that can go on, or an error that names the file.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from ..core.engine import JSON, Engine, Population
from ..core.errors import CheckpointError, ConfigError, check_range, warn
from ..core.exchange import Traffic
from ..core.files import put
from ..core.loop import checked
from ..core.mask import Mask, Recipe, Weights
from ..core.parts import build, coerce
from ..core.state import Phase, Plan, State
from ..sparsity import recipe_mask
from ..wire.masks import check_recipe
from .identity import differences
from .run import Run
from .sealed import Unsigned, Unusable, given_key, read_record, write_record

SECONDS = 20.0  # between two checkpoints at most, if a round is not longer
LONG = 2.0  # seconds that a checkpoint may take without coming less often
_COUNTERS = ("round", "attempt", "counted")
_NAME = re.compile(r"checkpoint-(\d{8})\.json")


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

    def __init__(self, run: Run, engine: Engine, clients: Population, identity: Mapping[str, object]) -> None:
        self.run, self.engine, self.clients, self.identity = run, engine, clients, identity
        self.folder = run.folder / "checkpoints" if run.folder else None
        self._kept, self._cost = time.monotonic(), 0.0  # when the last checkpoint was written, and how long that took

    def begin(self) -> None:
        """A new run starts in the folder: remove the checkpoints, mask snapshots and model of an earlier one."""
        if (folder := self.run.folder) is not None:
            given_key()  # one that cannot be read is an error before the first round
            for name in ("checkpoints", "snapshots", "private"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in ("model.safetensors", "model.masks.safetensors"):
                (folder / name).unlink(missing_ok=True)

    def due(self) -> bool:
        """Whether a checkpoint is due: after so many rounds, or seconds. Then it takes at most 2 % of the time.

        If clients remember gigabytes, checkpoints take seconds. They then come less often, unless asked for each round.
        """
        every, waited = self.run.train.checkpoint_every, time.monotonic() - self._kept
        dear = every > 1 and self._cost > LONG and waited < 10 * self._cost
        return bool(every) and ((self.run.rounds % every == 0 and not dear) or waited > max(SECONDS, 50 * self._cost))

    def keep(self) -> bool:
        """Write a checkpoint. If that fails, for instance because the disk is full, warn and return False."""
        if self.folder is None or self.run.state is None:
            return True
        began = time.monotonic()
        try:
            self.run.results.sync()
            memory, clients = self.engine.memory.save(), self.clients.save()
            point = Checkpoint(self.run.state, memory, clients, self.run.rounds, self.run.traffic)
            save(self.folder, point, self.identity)
        except OSError as error:
            self._failed(error)
            return False
        self.engine.memory.keep_only(referenced(self.folder))
        self._kept = time.monotonic()
        self._cost = self._kept - began
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
        kept = "the last good one is kept" if self.folder and found_in(self.folder) else "there is no earlier one"
        warn(f"could not write a checkpoint to {self.folder} ({error}); {kept}")

    def load(self, plan: Plan) -> State | None:
        """Restore the newest usable checkpoint everywhere; its state. None: there is no checkpoint."""
        if self.folder is None:
            raise ConfigError("resume needs the folder of the run to continue: give `folder`")
        if not found_in(self.folder):
            return None
        point = load(self.folder, plan, self.identity, self._accept)
        if point.state.counted > plan.rounds:  # before anything in the folder changes
            raise ConfigError(
                f"rounds = {plan.rounds}: the run in {self.run.folder} already has {point.state.counted} rounds. Set "
                f"rounds to at least {point.state.counted}."
            )
        self.engine.memory.keep_only(referenced(self.folder))  # from now on too, masks in checkpoints are kept
        self.run.rounds, self.run.traffic = point.rounds, point.traffic
        self.run.results.resume(point.rounds, point.traffic.total)
        return point.state

    def _accept(self, point: Checkpoint) -> None:
        checked(self.run.method, point.state)
        self.engine.memory.load(point.memory)
        self.clients.load(point.clients)


def save(folder: Path, point: Checkpoint, identity: Mapping[str, object]) -> Path:
    """Write a checkpoint and forget all but the last two."""
    tensors, described = _describe(point.state)
    content = to_bytes(tensors)
    path = folder / f"checkpoint-{point.rounds:08d}.json"
    put(path.with_suffix(".safetensors"), content, sync=True)
    record = {
        "identity": dict(identity),
        "tensors": hashlib.blake2b(content).hexdigest(),
        "state": described,
        "memory": point.memory,
        "clients": point.clients,
        "rounds": point.rounds,
        "traffic": asdict(point.traffic),
    }
    write_record(path, record)
    ours = [other for other in found_in(folder) if other.name <= path.name]  # later ones were of no use to this run
    for old in ours[2:]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    return path


def load(
    folder: Path, plan: Plan, identity: Mapping[str, object], accept: Callable[[Checkpoint], None] | None = None
) -> Checkpoint:
    """The newest usable checkpoint of this run. Others are named in a warning.

    accept: takes over what a checkpoint holds beside the state, for a run that goes on; if it cannot, the checkpoint is
    not usable.
    """
    found = found_in(folder)
    if not found:
        raise CheckpointError(
            f"{folder.parent} has no checkpoint to export. If the run is still going, wait for its first checkpoint. "
            "Otherwise continue it with --resume."
        )
    passed: dict[Path, Unusable] = {}
    for path in found:
        try:
            point = _read(path, plan, identity)
            if accept is not None:
                accept(point)
        except Unsigned:
            raise
        except Unusable as error:
            passed[path] = error
            continue
        except Exception as error:  # the content may be a stranger's, and fail in any way
            passed[path] = Unusable(f"{path.name} does not hold a state that this run can go on from ({error})")
            continue
        if passed:
            warn(f"{'; '.join(map(str, passed.values()))}. Continuing from {path.name}.")
        for later, reason in passed.items() if accept is not None else ():
            if not isinstance(reason, Foreign):  # it must not come back: the results are cut too
                with suppress(OSError):
                    later.rename(later.with_name(f"{later.name}.unused"))
        return point
    if foreign := [error for error in passed.values() if isinstance(error, Foreign)]:
        raise CheckpointError(
            f"{foreign[0]}. Resume with the same settings, or start a new run: with overwrite, or in another folder."
        )
    raise CheckpointError(
        f"no checkpoint in {folder} can be used: {'; '.join(map(str, passed.values()))}. "
        "Start the run again: in another folder, or here with --overwrite (in Python overwrite=True)."
    )


def _read(path: Path, plan: Plan, identity: Mapping[str, object]) -> Checkpoint:
    record, tensors = read_record(path), path.with_suffix(".safetensors")
    try:
        content = tensors.read_bytes()
    except OSError as error:
        raise Unusable(f"{tensors.name} cannot be read ({error.strerror})") from None
    if hashlib.blake2b(content).hexdigest() != record["tensors"]:
        raise Unusable(f"{tensors.name} is damaged or truncated: its content does not match its digest")
    if different := differences(record["identity"], identity, free="rounds"):  # a run may be extended
        raise Foreign(f"{path} belongs to another run ({different})")
    rounds, traffic = record["rounds"], build(Traffic, record["traffic"])
    if f"checkpoint-{rounds:08d}" != path.stem:
        raise ValueError(f"it records {rounds!s:.20} rounds, but its file name says another number")
    check_range("[0, inf)", up=traffic.up, down=traffic.down)
    state = _restore(from_bytes(content), record["state"], plan, rounds)
    return Checkpoint(state, record["memory"], record["clients"], rounds, traffic)


def found_in(folder: Path) -> list[Path]:
    """The records of a folder's checkpoints, the newest first."""
    return sorted((p for p in folder.glob("checkpoint-*.json") if _NAME.fullmatch(p.name)), reverse=True)


def _describe(state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state as tensors (packed) and JSON."""
    tensors: dict[str, Tensor] = {"weights": state.weights.packed().cpu()}
    if state.average is not None:  # under the same mask; a copy, as in its first round it is the weights themselves
        tensors["average"] = state.average.packed().cpu().clone()
    recipes: dict[str, Any] = {}  # of every mask, or None
    for name, value in {"mask": state.mask, **{f"extra {name}": value for name, value in state.extra.items()}}.items():
        if isinstance(value, Mask):
            tensors[name] = torch.from_numpy(value.packed.copy())
            recipes[name] = value.recipe and asdict(value.recipe)
        else:
            tensors[name] = value.cpu().clone(memory_format=torch.contiguous_format)  # may be another's too
    counters = {name: getattr(state, name) for name in _COUNTERS}
    return tensors, {"phase": asdict(state.phase), **counters, "masks": recipes}


def _restore(tensors: Mapping[str, Tensor], described: Mapping[str, Any], plan: Plan, rounds: int) -> State:
    """The state that `_describe` described, after so many rounds of all phases."""
    found: dict[str, Mask | Tensor] = {name: value.to(plan.device) for name, value in tensors.items()}
    for name, recipe in described["masks"].items():
        found[name] = _mask(plan, tensors[name], recipe)
    mask, values, average = found.pop("mask"), found.pop("weights"), found.pop("average", None)
    if not (isinstance(mask, Mask) and isinstance(values, Tensor)):
        raise ValueError("its mask or its weights are missing")
    if values.shape != (wanted := (mask.active + plan.layout.size - plan.layout.prunable_size,)):
        raise ValueError(f"its weights have the shape {tuple(values.shape)}, expected {wanted}")
    kept = Weights.unpack(mask, average) if isinstance(average, Tensor) else None
    counters = {name: coerce(described[name], int, name) for name in _COUNTERS}
    check_range(f"[0, {rounds}]", counted=counters["counted"])
    check_range("[0, 4294967295]", round=counters["round"])  # repeated secure rounds have numbers of their own
    check_range("[0, 65535]", attempt=counters["attempt"])
    return State(
        plan, Weights.unpack(mask, values), build(Phase, described["phase"]), **counters,
        average=kept, extra={name.removeprefix("extra "): value for name, value in found.items()},
    )  # fmt: skip


def _mask(plan: Plan, packed: Tensor, described: Any) -> Mask:
    """A stored mask. Its recipe, if it has one, must really give it."""
    recipe = None if described is None else build(Recipe, described)
    mask = Mask.unpack(plan.layout, packed.numpy(), plan.device, recipe)
    if recipe is not None:
        check_recipe(recipe, plan.layout)
        if not recipe_mask(plan.layout, recipe).equal(mask):
            raise ValueError("a stored random mask differs from the one that is drawn again from its random key")
    return mask


def referenced(folder: Path) -> set[str]:
    """The hashes of all masks that a kept checkpoint still needs."""
    needed: set[str] = set()
    for path in found_in(folder):
        with suppress(Exception):  # its content may be a stranger's, and fail in any way
            needed |= set(read_record(path)["memory"].get("masks", ()))
    return needed
