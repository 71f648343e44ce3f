"""A place for many byte strings that are read back once: in memory while they are few, on disk beyond that."""

from __future__ import annotations

import tempfile
from pathlib import Path


class Spool:
    """Byte strings by name or number, in a temporary file that stays in memory up to 16 MB."""

    def __init__(self, memory: int = 16 << 20, folder: Path | None = None) -> None:
        """`folder`: where the file would be; where temporary files are kept in memory, that is no place for it."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        # Closed with the object; a context manager would force its owner into one too.
        self._file = tempfile.SpooledTemporaryFile(max_size=memory, dir=None if folder is None else str(folder))  # noqa: SIM115
        self._at: dict[int | str, tuple[int, int]] = {}

    def put(self, name: int | str, data: bytes) -> None:
        start = self._file.seek(0, 2)
        self._file.write(data)
        self._at[name] = (start, len(data))

    def get(self, name: int | str) -> bytes:
        start, length = self._at[name]
        self._file.seek(start)
        return self._file.read(length)

    def __contains__(self, name: int | str) -> bool:
        return name in self._at

    def close(self) -> None:
        self._file.close()
