"""Files that are written whole or not at all, and files that processes share."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .errors import ConfigError


def make_folder(folder: Path) -> None:
    """Make a folder, unless it is there. If a file is in its way, the error says which."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), folder)
        raise ConfigError(f"{folder} cannot be a folder, because {file} is a file: choose another folder") from None


def put(path: Path, data: bytes | Callable[[Path], None], sync: bool = False) -> None:
    """Write a file through a temporary one that is moved into its place; `sync`: after it has reached the disk.

    data: the content, or a function that writes it to the path it is given. A device or a pipe is written to directly.
    Errors name `path`.
    """
    whole = path.is_file() or not path.exists()
    through = path.with_name(f"{path.name}.{os.getpid()}.partial") if whole else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if whole:
            through.unlink(missing_ok=True)  # a link there would lead to another file
        if isinstance(data, bytes):
            through.write_bytes(data)
        else:
            data(through)
        if sync:
            with through.open("rb") as file:
                os.fsync(file.fileno())
        if whole:
            through.replace(path)
    except OSError as error:
        if whole:
            with contextlib.suppress(OSError):
                through.unlink(missing_ok=True)
        if error.filename in (None, str(through)):
            error.filename = str(path)
        raise


def shared_file() -> tuple[IO[bytes], str]:
    """A temporary file, and a path by which other processes open it while this one has it open.

    On Linux the file has no name, so that a killed process leaves nothing behind. Elsewhere `close` removes it.
    """
    if not os.path.exists(opened := f"/proc/{os.getpid()}/fd"):
        named = tempfile.NamedTemporaryFile(prefix="flashfl-")  # noqa: SIM115
        return named, named.name
    file = tempfile.TemporaryFile()  # noqa: SIM115
    return file, f"{opened}/{file.fileno()}"
