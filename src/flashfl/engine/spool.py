"""A place for many byte strings that are read back once: in memory while they are few, on disk beyond that."""

from __future__ import annotations

import tempfile


class Spool:
    """Byte strings by number, in a temporary file that stays in memory up to 64 MB."""

    def __init__(self, memory: int = 64 << 20) -> None:
        # Closed with the object; a context manager would force its owner into one too.
        self._file = tempfile.SpooledTemporaryFile(max_size=memory)  # noqa: SIM115
        self._at: dict[int, tuple[int, int]] = {}

    def put(self, number: int, data: bytes) -> None:
        start = self._file.seek(0, 2)
        self._file.write(data)
        self._at[number] = (start, len(data))

    def get(self, number: int) -> bytes:
        start, length = self._at[number]
        self._file.seek(start)
        return self._file.read(length)

    def close(self) -> None:
        self._file.close()
