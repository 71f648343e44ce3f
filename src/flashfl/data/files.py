"""Find, check and read the files of data sets, and keep arrays that take long to make.

Errors say which file is meant, what is wrong with it and what to do.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError
from ..core.files import put

Arrays = dict[str, NDArray[Any]]
_UNPACKED = 1 << 30  # bytes that a gzipped file may unpack to: published ones need a fifth of that


def data_root(given: str | Path = "") -> Path:
    """The folder of data sets: the one given, else the environment variable FLASHFL_DATA, else ./data."""
    return Path(given or os.environ.get("FLASHFL_DATA", "") or "data").expanduser()


def find(root: Path, name: str) -> Path | None:
    """The file or folder `name` under `root`, or the gzipped file."""
    return next((path for path in (root / name, root / f"{name}.gz") if path.exists()), None)


def damaged(path: Path, what: str) -> DataError:
    """The error for a file that cannot be used."""
    return DataError(f"{path} is damaged: {what}. Delete it and fetch it again")


def read(path: Path) -> bytes:
    """A file's contents, unpacked if it is gzipped."""
    try:
        held = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if path.suffix != ".gz":
        return held
    stream = zlib.decompressobj(wbits=31)  # 31: gzip
    try:
        held = stream.decompress(held, _UNPACKED)
    except zlib.error as error:
        raise damaged(path, f"not readable as gzip ({error})") from None
    if not stream.eof or stream.unused_data:
        raise damaged(path, f"it is truncated, has more than one gzip stream, or unpacks to over {_UNPACKED:,} bytes")
    return held


def read_text(path: Path) -> str:
    """A file's text."""
    try:
        return read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, f"not UTF-8 text ({error.reason} at byte {error.start})") from None


def verify(path: Path, md5: str) -> None:
    """Raise unless a file has the published md5, which is that of its unpacked contents."""
    found = hashlib.md5(read(path), usedforsecurity=False).hexdigest()
    if found != md5:
        raise damaged(path, f"its md5 is {found}, the published file's is {md5}")


def cached(
    folder: Path, label: str, files: Sequence[Path], arrays: Sequence[str], make: Callable[[], Arrays]
) -> Arrays:
    """The arrays that `make` makes of `files`, which lie in `folder`. Made once, then mapped from disk.

    They are kept under `folder`, or in the user's cache where that cannot be written to, and made again when a file
    changes. Where nothing can be kept they are made each time.
    """
    name = label + _digest([_stamp(file, folder) for file in files])
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashfl"
    homes = (folder / ".flashfl-cache", user / _digest([str(folder.absolute())]))
    kept = [{array: home / f"{name}-{array}.npy" for array in arrays} for home in homes]
    for paths in kept:
        with suppress(OSError, ValueError, EOFError):  # not there, or cut short: made below
            return _mapped(paths)
    made = make()
    for paths in kept:
        with suppress(OSError):
            for array, path in paths.items():
                put(path, partial(_write, made[array]))
            return _mapped(paths)
    return made


def _digest(parts: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def _stamp(file: Path, folder: Path) -> str:
    """A file's name, size and time: they change when it is written again."""
    with suppress(OSError, ValueError):  # a missing file, or an impossible name, is reported when it is read
        held = file.stat()
        return f"{file.relative_to(folder)} {held.st_size} {held.st_mtime_ns}"
    return ""


def _mapped(paths: Mapping[str, Path]) -> Arrays:
    """Arrays on disk, copy-on-write: torch wants memory it may write to, and the files must not change."""
    return {array: np.load(path, mmap_mode="c", allow_pickle=False) for array, path in paths.items()}


def _write(values: NDArray[Any], path: Path) -> None:
    with path.open("wb") as file:  # given a path, numpy would add an ending to it
        np.save(file, values, allow_pickle=False)
