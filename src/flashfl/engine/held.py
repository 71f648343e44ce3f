"""Updates that wait until they can be added: in memory while they are few, beyond that in a temporary file."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.exchange import Update
from ..core.layout import Layout
from ..core.mask import Mask

_ROOM = 256 << 20


class Held:
    """Decoded updates by client. The file has no name, so nothing is left behind."""

    def __init__(self, layout: Layout, folder: Path | None = None, room: int = _ROOM) -> None:
        """folder: where the file would be. The system's temporary folder may be in memory."""
        self.layout = layout
        where = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            where = str(folder)
        self._file = tempfile.SpooledTemporaryFile(room, dir=where)  # noqa: SIM115 (closed with this object)
        self.close = weakref.finalize(self, self._file.close)  # also without being called
        self._places: dict[int, int] = {}  # client -> where its update lies
        self._shared: dict[int, Mask] = {}  # client -> the order's mask, if the update has the same

    def clients(self) -> list[int]:
        """Whose updates are held, in ascending id."""
        return sorted(self._places)

    def put(self, update: Update, order: Mask | None) -> None:
        """Hold an update; `order` is its order's mask."""
        bits = None
        if update.mask is not None and update.mask is order:
            self._shared[update.client] = update.mask
        elif update.mask is not None:
            bits = update.mask.packed
        self._places[update.client] = self._file.seek(0, 2)
        values = None if update.values is None else update.values.numpy()
        pickle.dump((replace(update, mask=None, values=None), values, bits), self._file, protocol=5)

    def pop(self, client: int) -> Update:
        """An update that was held; it is held no longer."""
        self._file.seek(self._places.pop(client))
        loaded: tuple[Update, np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None] = pickle.load(self._file)
        update, values, bits = loaded
        if not self._places:
            self._file.truncate(0)
        mask = self._shared.pop(client, None)
        if bits is not None:
            mask = Mask(self.layout, Mask.unpack(self.layout, bits).bits, update.counts)
        return replace(update, mask=mask, values=None if values is None else torch.from_numpy(values))
