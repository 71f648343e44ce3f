"""Finding and reading the files of data sets, with errors that say which file, where, and what to do."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from ..core.errors import DataError


def data_root(given: str | Path = "") -> Path:
    """The folder data sets lie under: the one given, else the environment's FLASHFL_DATA, else ./data."""
    return Path(given or os.environ.get("FLASHFL_DATA", "") or "data").expanduser()


def find(root: Path, name: str) -> Path | None:
    """The file or folder `name` under `root`, or the file's gzipped form."""
    for path in (root / name, root / f"{name}.gz"):
        if path.exists():
            return path
    return None


def missing(what: str, root: Path, tried: Iterable[str], get: str) -> DataError:
    """The error for a data set whose files are not there."""
    where = "\n".join(f"  {root / name}" for name in tried)
    return DataError(
        f"data set {what!r} is not complete under {root.absolute()}. Not found (gzipped or not):\n{where}\n"
        f"{get}\nAnother folder is named with --data-root or FLASHFL_DATA"
    )


def damaged(path: Path | str, what: str) -> DataError:
    """The error for a file that is there but cannot be used."""
    return DataError(f"{path} is damaged: {what}. Delete it and fetch it again")


def read(path: Path, md5: str | None = None) -> bytes:
    """A file's bytes, uncompressed; checked against the md5 of the uncompressed contents where that is known."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except EOFError:
        raise damaged(path, "the gzip stream ends too early, the file is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise damaged(path, f"not readable as gzip ({error})") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if md5 is not None:
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if found != md5:
            raise damaged(path, f"its md5 is {found}, the published file's is {md5}")
    return data


def read_text(path: Path) -> str:
    """A file's text."""
    try:
        return read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, f"not UTF-8 text ({error.reason} at byte {error.start})") from None
