"""Masks and notes by hash: what clients remember, what the server knows about them, what a run keeps as snapshots.

Notes are the tensors that a client's parts remember, all in one file. Masks and notes are written once, under the hash
of their content. So a reader notices damage, and a checkpoint only names hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from ..core import files
from ..core.errors import CheckpointError, FlashError
from ..core.exchange import Extra
from ..core.layout import Layout
from ..core.mask import Mask
from ..wire import mask_from_bytes, mask_to_bytes
from ..wire.tensors import notes_from_bytes, notes_to_bytes

_HASH = re.compile("[0-9a-f]{16}")


def temporary_folder(owner: object) -> Path:
    """A new folder that is removed with its owner."""
    path = Path(tempfile.mkdtemp(prefix="flashfl-"))
    weakref.finalize(owner, shutil.rmtree, path, ignore_errors=True)
    return path


class Folder(MutableMapping[str, bytes]):
    """Bytes by hash in the files of a folder; without a path in a temporary folder that is removed with this object.

    Every name must be a hash, 16 hex digits. No other name, whoever wrote it, leads to a file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or temporary_folder(self)

    def __getitem__(self, digest: str) -> bytes:
        try:
            return self._file(digest).read_bytes()
        except OSError:
            raise KeyError(digest) from None

    def __setitem__(self, digest: str, data: bytes) -> None:
        files.put(self._file(digest), data)

    def __delitem__(self, digest: str) -> None:
        self._file(digest).unlink(missing_ok=True)

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, str) and _HASH.fullmatch(digest) is not None and self._file(digest).exists()

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in self.path.glob("*.mask") if _HASH.fullmatch(path.stem))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def sync(self, digests: Iterable[str]) -> None:
        """Make these files survive a loss of power."""
        for digest in digests:
            with contextlib.suppress(FileNotFoundError), self._file(digest).open("rb") as file:
                os.fsync(file.fileno())

    def _file(self, digest: str) -> Path:
        if not _HASH.fullmatch(digest):
            raise CheckpointError(f"{digest[:40]!r} is not the name of a mask: expected 16 hex digits")
        return self.path / f"{digest}.mask"


class MaskStore:
    """hash -> Mask, over any mapping of bytes, with the recently used masks decoded in memory."""

    def __init__(self, layout: Layout, backend: MutableMapping[str, bytes], cache_bytes: int = 64 << 20) -> None:
        self.layout, self.backend = layout, backend
        self._cache: dict[str, Mask] = {}  # by last use
        self._room = max(2, cache_bytes // max(1, layout.prunable_size))

    @staticmethod
    def in_folder(layout: Layout, path: Path | None = None) -> MaskStore:
        """A store in the files of a folder; by default a temporary one."""
        return MaskStore(layout, Folder(path))

    @property
    def folder(self) -> Path | None:
        return self.backend.path if isinstance(self.backend, Folder) else None

    def put(self, mask: Mask) -> str:
        """Store a mask; its hash."""
        if mask.hash not in self.backend:  # even if it is cached: another process may have deleted the file
            self.backend[mask.hash] = mask_to_bytes(mask)
        if not mask.bits.is_cuda:
            self._remember(mask.hash, mask)
        return mask.hash

    def __getitem__(self, digest: str) -> Mask:
        """The mask. A missing one is a KeyError, a damaged one a CheckpointError that names it."""
        mask = self._cache.get(digest) or self._read(digest)
        self._remember(digest, mask)
        return mask

    def find(self, digest: str | None) -> Mask | None:
        """The mask; None if it is missing or damaged, or if there is no hash."""
        try:
            return None if digest is None else self[digest]
        except (KeyError, FlashError):
            return None

    def keep(self, mask: Mask, own: bool = False) -> Kept:
        """A mask that a client holds. On a CPU it is stored now."""
        return Kept(self.put(mask), None, own) if mask.bits.device.type == "cpu" else Kept("", mask, own)

    def put_notes(self, notes: Mapping[str, Extra]) -> str:
        """Store what a client's parts remember; its hash."""
        data = notes_to_bytes(notes)
        digest = _digest(data)
        if digest not in self.backend:
            self.backend[digest] = data
        return digest

    def notes(self, digest: str) -> dict[str, Extra]:
        """What `put_notes` stored. Missing notes are a KeyError, damaged ones a CheckpointError."""
        data = self.backend[digest]
        if _digest(data) != digest:
            raise self._damaged(digest)
        return notes_from_bytes(data)

    def find_notes(self, digest: str | None) -> dict[str, Extra]:
        """What `put_notes` stored; nothing if it is missing or damaged, or if there is no hash."""
        try:
            return {} if digest is None else self.notes(digest)
        except (KeyError, FlashError):
            return {}

    def _read(self, digest: str) -> Mask:
        data = self.backend[digest]
        try:
            mask = mask_from_bytes(data, self.layout)
        except FlashError as error:
            raise self._damaged(digest, str(error)) from None
        if mask.hash != digest:
            raise self._damaged(digest)
        return mask

    def _damaged(self, digest: str, why: str = "its content does not match its name") -> CheckpointError:
        del self.backend[digest]  # or `put` would take it for the mask when that comes again
        return CheckpointError(f"{self.folder or 'memory'}/{digest}.mask is damaged: {why}")

    def __contains__(self, digest: object) -> bool:
        return digest in self.backend

    def sync(self, digests: Iterable[str]) -> None:
        """Make these masks survive a loss of power: a checkpoint is about to name them."""
        if isinstance(self.backend, Folder):
            self.backend.sync(digests)

    def keep_only(self, digests: Iterable[str]) -> None:
        """Delete all other masks."""
        for digest in set(self.backend) - set(digests):
            del self.backend[digest]
            self._cache.pop(digest, None)

    def _remember(self, digest: str, mask: Mask) -> None:
        self._cache.pop(digest, None)
        self._cache[digest] = mask
        while len(self._cache) > self._room:
            del self._cache[next(iter(self._cache))]


@dataclass(eq=False)
class Kept:
    """A mask or notes that a client holds: its hash. On a GPU the thing itself, as hashing waits for the GPU."""

    digest: str = ""
    loaded: Mask | None = None
    own: bool = False  # the client's own mask, not that of an order
    notes: Mapping[str, Extra] | None = None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
