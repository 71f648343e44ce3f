"""Updates that wait until they can be added: in memory while there is room, beyond that in a temporary file."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ..core.exchange import Update
from ..core.layout import Layout
from ..core.mask import Mask

_ROOM = 1 << 30  # bytes of memory


class Held:
    """Decoded updates by client. The file has no name, so nothing is left behind."""

    def __init__(self, layout: Layout, folder: Path | None = None, room: int = _ROOM) -> None:
        """folder: where the file would be. The system's temporary folder may be in memory."""
        self.layout, self.folder, self.room = layout, folder, room
        self._memory: dict[int, tuple[Update, int]] = {}  # client -> its update, and the room it takes
        # Client -> place in the file; its mask and start, if they are its order's.
        self._places: dict[int, tuple[int, Mask | None, Tensor | None]] = {}
        self._file: IO[bytes] | None = None

    def __iter__(self) -> Iterator[Update]:
        """The updates, in ascending client id."""
        return map(self._read, self._clients())

    def _clients(self) -> list[int]:
        return sorted([*self._memory, *self._places])

    def put(self, update: Update, order: Mask | None) -> None:
        """Hold an update; `order` is its order's mask."""
        values, mask, start = update.values, update.mask, update.start
        own = mask is not None and mask is not order
        need = (values.nbytes if values is not None else 0) + 2 * self.layout.prunable_size * own  # mask and places
        need += start.nbytes if own and start is not None else 0
        if need <= self.room:
            self.room -= need
            self._memory[update.client] = (update, need)
            return
        if self._file is None:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (closed with this object)
            weakref.finalize(self, self._file.close)
        self._places[update.client] = (self._file.seek(0, 2), *((None, None) if own else (mask, start)))
        arrays = [
            values.numpy() if values is not None else None,
            mask.packed if own and mask is not None else None,
            start.numpy() if own and start is not None else None,
        ]
        pickle.dump((replace(update, mask=None, values=None, start=None), *arrays), self._file, protocol=5)

    def take(self, before: int | None) -> Iterator[Update]:
        """The updates of all clients before this one, in ascending client id. They are held no longer. None: all."""
        for client in self._clients():
            if before is not None and client > before:
                return
            update = self._read(client)
            self.room += self._memory.pop(client, (update, 0))[1]
            if self._places.pop(client, None) is not None and not self._places and self._file is not None:
                self._file.truncate(0)
            yield update

    def _read(self, client: int) -> Update:
        if client in self._memory:
            return self._memory[client][0]
        assert self._file is not None
        place, mask, start = self._places[client]
        self._file.seek(place)
        update: Update
        update, values, bits, began = pickle.load(self._file)
        if bits is not None:
            mask = Mask(self.layout, Mask.unpack(self.layout, bits).bits, update.counts)
        if began is not None:
            start = torch.from_numpy(began)
        return replace(update, mask=mask, values=None if values is None else torch.from_numpy(values), start=start)
