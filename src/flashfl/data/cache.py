"""Arrays that take long to make, kept on disk and mapped into memory."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
_FOLDER = ".flashfl-cache"


def digest(parts: Iterable[str]) -> str:
    """A short name for what a cached array was made of."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def stamp(path: Path, name: str) -> str:
    """The file `name` as part of a digest: it changes when the file is written anew."""
    try:
        held = path.stat()
    except OSError:  # whoever reads it will say so
        return name
    return f"{name} {held.st_size} {held.st_mtime_ns}"


def cached(beside: Path, name: str, arrays: Iterable[str], make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` makes, from disk if they were made before, mapped into memory.

    They are kept in the folder `beside`, or in the user's cache where that cannot be written to. `name` must change
    with what they are made of. Where nothing can be kept they are made anew each time.
    """
    arrays = tuple(arrays)
    places = (beside / _FOLDER, _user_cache() / digest([str(beside.absolute())]))
    for place in places:
        files = {array: place / f"{name}-{array}.npy" for array in arrays}
        if all(file.is_file() for file in files.values()):
            try:
                return {array: _map(file) for array, file in files.items()}
            except (OSError, ValueError, EOFError):  # cut short by a full disk or another hand: made again below
                continue
    made = make()
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            for array, values in made.items():
                _write(place / f"{name}-{array}.npy", values)
            return {array: _map(place / f"{name}-{array}.npy") for array in arrays}
        except OSError:
            continue
    return made


def _map(file: Path) -> NDArray[Any]:
    # Copy-on-write: torch wants memory it might write to, and the file must not change.
    mapped: NDArray[Any] = np.load(file, mmap_mode="c", allow_pickle=False)
    return mapped


def _write(file: Path, values: NDArray[Any]) -> None:
    """Write under another name first, so that a reader never meets half a file."""
    handle, other = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as out:
            np.save(out, values, allow_pickle=False)
        os.replace(other, file)
    except BaseException:
        Path(other).unlink(missing_ok=True)
        raise


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashfl"
