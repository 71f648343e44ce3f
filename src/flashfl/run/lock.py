"""What must be one process's alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ..core.errors import ConfigError
from ..core.files import make_folder


@contextmanager
def claim(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether a file is this process's alone, until the block ends or the process does, however it ends.

    wait: until no other process has it.
    A claim within a claim of the same file is granted, and its end is the end of both. Where there are no locks, on
    this system or in this folder, whoever starts two processes must keep them apart.
    """
    make_folder(path.parent)
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, and opening it could change another file: remove it")
    with path.open("w") as file:
        ours = True
        try:
            import fcntl

            # Of this process, not of those it forks.
            fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            ours = False
        except (ImportError, OSError):
            pass
        yield ours


@contextmanager
def alone(folder: Path | None) -> Iterator[None]:
    """A run's folder is this process's alone, if there is one; it is an error if another process uses it."""
    with claim(folder / "lock") if folder else nullcontext(True) as ours:
        if not ours:
            raise ConfigError(
                f"{folder} is being used by another process: wait for it to end, or choose another folder"
            )
        yield
