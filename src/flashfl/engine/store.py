"""Masks by hash, on disk: what clients remember and what both sides of the wire know.

One simulated server plays thousands of devices; their masks must not live in its memory. Files are written once,
under the hash of their content, so a reader notices damage and a checkpoint needs to name hashes only.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ..core import files
from ..core.errors import CheckpointError
from ..core.layout import Layout
from ..core.mask import Mask


class MaskStore(Mapping[str, Mask]):
    """hash -> Mask in a folder, with the recently used ones in memory."""

    def __init__(self, layout: Layout, folder: Path | None = None, cache_bytes: int = 64 << 20) -> None:
        self.layout = layout
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="flashfl-")
            self._finalizer = weakref.finalize(self, temporary.cleanup)
            folder = Path(temporary.name)
        self.folder = folder
        self._cache: OrderedDict[str, Mask] = OrderedDict()
        self._safe: set[str] = set()  # what has certainly reached the disk
        self._room = max(2, cache_bytes // max(1, layout.prunable_size))

    def put(self, mask: Mask) -> str:
        """Keep a mask; its hash."""
        path = self._path(mask.hash)
        if not path.exists():  # even if it is in our cache: another process may have dropped it from the folder
            files.put(path, mask.packed.tobytes())
        self._remember(mask)
        return mask.hash

    def __getitem__(self, digest: str) -> Mask:
        if digest in self._cache:
            self._cache.move_to_end(digest)
            return self._cache[digest]
        try:
            packed = np.frombuffer(self._path(digest).read_bytes(), dtype=np.uint8)
        except OSError:
            raise KeyError(digest) from None
        if packed.size != (self.layout.prunable_size + 7) // 8 or (mask := self._read(packed)).hash != digest:
            self._path(digest).unlink(missing_ok=True)  # or `put` would take it for the mask when that comes again
            raise CheckpointError(f"{self._path(digest)} is damaged: its content does not have the hash it is named by")
        self._remember(mask)
        return mask

    def _read(self, packed: np.ndarray) -> Mask:  # type: ignore[type-arg]
        return Mask.unpack(self.layout, packed)

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in self.folder.glob("*.mask"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, digest: object) -> bool:
        return digest in self._cache or (isinstance(digest, str) and self._path(digest).exists())

    def flush(self, digests: Iterable[str]) -> None:
        """See to it that these masks survive a loss of power: a checkpoint is about to name them."""
        for digest in set(digests) - self._safe:
            with contextlib.suppress(FileNotFoundError), self._path(digest).open("rb") as file:
                os.fsync(file.fileno())
                self._safe.add(digest)

    def keep_only(self, digests: Iterable[str]) -> None:
        """Forget every mask that is not named."""
        wanted = set(digests)
        for digest in list(self):
            if digest not in wanted:
                self._path(digest).unlink(missing_ok=True)
                self._cache.pop(digest, None)
                self._safe.discard(digest)

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.mask"

    def _remember(self, mask: Mask) -> None:
        self._cache[mask.hash] = mask
        self._cache.move_to_end(mask.hash)
        while len(self._cache) > self._room:
            self._cache.popitem(last=False)
