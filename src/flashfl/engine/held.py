"""Updates that wait until they can be added: in memory while they are few, beyond that in a temporary file."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from ..core.exchange import Extra, Update
from ..core.layout import Layout
from ..core.mask import Mask

_ROOM = 256 << 20

Array = np.ndarray[Any, Any]


class _Waiting(NamedTuple):
    """An update as plain arrays; `bits` is its mask at one bit a weight, None if it has its order's mask or none."""

    n: int
    values: Array | None
    bits: Array | None
    counts: tuple[int, ...]
    metrics: dict[str, float]
    extra: dict[str, tuple[Any, Array]]

    @property
    def bytes(self) -> int:
        arrays = [self.values, self.bits, *(value for _, value in self.extra.values())]
        return sum(array.nbytes for array in arrays if array is not None)


class Held:
    """Decoded updates by client. The file has no name, so nothing is left behind."""

    def __init__(self, layout: Layout, folder: Path | None = None, room: int = _ROOM) -> None:
        """folder: where the file would be. The system's temporary folder may be in memory."""
        self.layout, self._folder, self._room = layout, folder, room
        self._file: IO[bytes] | None = None
        self._memory: dict[int, _Waiting] = {}
        self._places: dict[int, int] = {}  # client -> where its update lies in the file
        self._shared: dict[int, Mask] = {}  # client -> the order's mask, if the update has the same

    def __contains__(self, client: int) -> bool:
        return client in self._memory or client in self._places

    def clients(self) -> list[int]:
        return sorted([*self._memory, *self._places])

    def put(self, update: Update, order: Mask | None) -> None:
        """Hold an update; `order` is its order's mask."""
        bits = None
        if update.mask is not None and update.mask is order:
            self._shared[update.client] = update.mask
        elif update.mask is not None:
            bits = update.mask.packed
        extra = {name: (extra.form, extra.value.numpy()) for name, extra in update.extra.items()}
        values = None if update.values is None else update.values.numpy()
        waiting = _Waiting(update.n, values, bits, update.counts, dict(update.metrics), extra)
        self._room -= waiting.bytes
        if self._room >= 0:
            self._memory[update.client] = waiting
            return
        self._room += waiting.bytes
        if self._file is None:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (closed with this object)
        self._places[update.client] = self._file.seek(0, 2)
        pickle.dump(waiting, self._file, protocol=5)

    def pop(self, client: int) -> Update:
        """An update that was held; it is held no longer."""
        if client in self._memory:
            waiting = self._memory.pop(client)
            self._room += waiting.bytes
        else:
            assert self._file is not None
            self._file.seek(self._places.pop(client))
            waiting = pickle.load(self._file)
        mask = self._shared.pop(client, None)
        if waiting.bits is not None:
            mask = Mask(self.layout, Mask.unpack(self.layout, waiting.bits).bits, waiting.counts)
        values = None if waiting.values is None else torch.from_numpy(waiting.values)
        extra = {name: Extra(form, torch.from_numpy(value)) for name, (form, value) in waiting.extra.items()}
        return Update(client, waiting.n, mask, values, waiting.counts, waiting.metrics, extra)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
