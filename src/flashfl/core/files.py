"""Files that are either there or not."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def put(path: Path, data: bytes, sync: bool = False) -> None:
    """Write a file whole: through another one that is moved into its place, after it has reached the disk if `sync`.

    A device or a pipe is written to and never replaced. An error names the file, as that of a full disk does not.
    """
    whole = path.is_file() or not path.exists()
    through = path.with_suffix(f".{os.getpid()}") if whole else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        through.write_bytes(data)
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
