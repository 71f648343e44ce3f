"""Files are written whole, and nothing but files is replaced."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from flashfl.core import files


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "report.html"
    files.put(path, b"first")
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*report\.html'"):
        files.put(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path], "no half of it is left behind"


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path, data: bytes) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_bytes", forbidden)
    with pytest.raises(PermissionError, match=r"report\.html'$"):
        files.put(tmp_path / "report.html", b"page")


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    files.put(path, b"through")
    assert os.read(end, 20) == b"through"
    os.close(end)
    assert path.is_fifo()
