"""A run's state on disk: tensors as safetensors, the rest as JSON, written so that a crash leaves the last good one.

A checkpoint is two files. The tensors are written first; the JSON, which holds their digest and its own, is moved into
place last and makes the checkpoint exist. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.layout import Layout
from ..core.state import Mask, Plan, Recipe, State, Weights

FORMAT = 2
_OLDER = 1  # had no digest of the JSON, and is read all the same
_NAME = re.compile(r"checkpoint-(\d{8})\.json")


class Unusable(CheckpointError):
    """A checkpoint that is damaged or of another format; the one before it may be sound."""


class Foreign(Unusable):
    """A checkpoint of another run."""


@dataclass(frozen=True)
class Checkpoint:
    """A state, what the engine must remember, and how far the run's record had got."""

    state: State
    engine: Mapping[str, Any]  # JSON
    progress: Mapping[str, Any]  # JSON


def save(folder: Path, number: int, checkpoint: Checkpoint, identity: Mapping[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint atomically and forget all but the last `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, described = _describe(checkpoint.state)
    stem = folder / f"checkpoint-{number:08d}"
    with _or_nothing(folder):
        digest = _write(stem.with_suffix(".safetensors"), lambda path: save_file(tensors, path))
        record = {
            "flashfl checkpoint": FORMAT,
            "identity": dict(identity),
            "tensors": digest,
            "state": described,
            "engine": checkpoint.engine,
            "progress": checkpoint.progress,
        }
        text = json.dumps({**record, "digest": _digest(record)})
        _write(stem.with_suffix(".json"), lambda path: path.write_text(text))
    ours = [path for path in found_in(folder) if path.stem <= stem.name]  # later ones were of no use to this run
    for old in ours[keep:]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    return stem.with_suffix(".json")


@contextmanager
def _or_nothing(folder: Path) -> Iterator[None]:
    """Leave no halves behind where writing fails; safetensors has an error of its own for a full disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        for partial in folder.glob("*.partial"):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise
        raise OSError(str(error)) from None


def clear(folder: Path) -> None:
    """Remove the checkpoints of an earlier run: a new one must never be continued from them."""
    for path in folder.glob("checkpoint-*"):
        path.unlink(missing_ok=True)


def _write(path: Path, write: Callable[[Path], object]) -> str:
    """Write a file through a partial one that is synced and moved into place; the content's digest."""
    partial = path.with_suffix(path.suffix + ".partial")
    write(partial)
    with partial.open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()
        os.fsync(file.fileno())
    partial.replace(path)
    return digest


def load(folder: Path, plan: Plan, identity: Mapping[str, Any], masks: Mapping[str, Mask] | None = None) -> Checkpoint:
    """The newest checkpoint of this run that is whole; any other is named in a warning and the one before it is used.

    masks: where the masks lie that clients remember, which must all be there to go on with the run.
    """
    found = found_in(folder)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {folder}: start the run anew (--overwrite if it had begun)")
    passed: dict[Path, Unusable] = {}
    for path in found:
        try:
            point = _read(path, plan, identity, masks)
        except Unusable as error:
            passed[path] = error
            continue
        if passed:
            said = "; ".join(map(str, passed.values()))
            warnings.warn(f"{said}. Going on from {path.name}.", RuntimeWarning, stacklevel=2)
        if masks is not None:
            _set_aside(path for path, error in passed.items() if not isinstance(error, Foreign))
        return point
    if foreign := [error for error in passed.values() if isinstance(error, Foreign)]:
        raise CheckpointError(f"{foreign[0]}. Resume with the same settings, or use another folder.")
    raise CheckpointError(
        f"no checkpoint in {folder} can be used: {'; '.join(map(str, passed.values()))}. "
        "Start the run anew (--overwrite)."
    )


def _set_aside(paths: Iterable[Path]) -> None:
    """Later checkpoints that could not be used must not come back: the record is cut to the one that was."""
    for path in paths:
        with suppress(OSError):
            path.rename(path.with_name(f"{path.name}.unused"))


def _read(path: Path, plan: Plan, identity: Mapping[str, Any], masks: Mapping[str, Mask] | None) -> Checkpoint:
    record = read_record(path)
    _check_tensors(path.with_suffix(".safetensors"), record.get("tensors"))
    _check_identity(path, record["identity"], identity)
    point = _restore(path, record, plan)
    if masks is not None:
        _check_masks(path, point.engine, masks)
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
        if found not in (FORMAT, _OLDER):
            raise Unusable(f"{path.name} is of format {found!s:.20} and this version of flashfl reads format {FORMAT}")
        if found != _OLDER and digest != _digest(record):
            raise Unusable(f"{path.name} is damaged: its digest is not the one recorded")
        for name in ("identity", "state", "engine", "progress"):
            if not isinstance(record.get(name), dict):
                raise Unusable(f"{path.name} is damaged: it has no table {name!r}")
        if not isinstance(record["engine"].get("masks", []), list):
            raise Unusable(f"{path.name} is damaged: it does not say which masks it needs")
    except (OSError, ValueError, RecursionError) as error:
        raise Unusable(f"{path.name} cannot be read ({error})") from None
    return record


def _digest(record: Mapping[str, Any]) -> str:
    """Of a record as JSON, which is the same text for the record and for what is read of it."""
    return hashlib.blake2b(json.dumps(record).encode()).hexdigest()


def _check_tensors(tensors: Path, recorded: object) -> None:
    try:
        with tensors.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        raise Unusable(f"{tensors.name} cannot be read ({error.strerror})") from None
    if digest != recorded:
        raise Unusable(f"{tensors.name} is damaged or truncated: its digest is not the one recorded")


def _check_masks(path: Path, engine: Mapping[str, Any], masks: Mapping[str, Mask]) -> None:
    """Where clients are played here, their masks are state; real ones hold their own and are sent what they lack."""
    for digest in engine.get("masks", ()) if engine.get("clients") else ():
        try:
            masks[digest]
        except (KeyError, TypeError):
            raise Unusable(f"{path.name} needs the mask {digest}, which is lost") from None
        except CheckpointError as error:
            raise Unusable(f"{path.name} needs a mask that cannot be used ({error})") from None


def _check_identity(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    theirs, ours = ({**table} for table in (found, wanted))
    samples = theirs.pop("samples", None), ours.pop("samples", None)
    different = list(_differences(theirs, ours))
    if all(samples) and samples[0] != samples[1]:  # older checkpoints do not know theirs
        different.append("samples are others than this run's")
    if different:
        raise Foreign(f"{path} belongs to another run: its {'; its '.join(different)}")


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """What of one run is not as in another, name by name."""
    for name in sorted({*found, *wanted}):
        theirs, ours = found.get(name), wanted.get(name)
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            yield from _differences(theirs, ours)
        elif theirs != ours:
            yield f"{name} is {str(theirs)[:200]}, this run's is {str(ours)[:200]}"


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
    described = {"stage": state.stage, "round": state.round, "attempt": state.attempt, "masks": masks}
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
        state = State(plan, weights, described["stage"], described["round"], described["attempt"], extra)
        int(record["progress"]["rounds"])
        return Checkpoint(state, record["engine"], record["progress"])
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise Unusable(f"{path.name} does not hold the state of this model ({error})") from None


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
            needed |= set(read_record(path)["engine"].get("masks", ()))
    return needed
