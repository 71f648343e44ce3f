"""What a client remembers between messages: masks at one bit a weight, by their hash, checked when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..core.layout import Layout
from ..core.mask import Mask


class HeldMasks:
    """hash -> Mask over packed bytes; a damaged entry is as good as none."""

    def __init__(self, layout: Layout, packed: Mapping[str, bytes]) -> None:
        self.layout, self.packed = layout, dict(packed)
        self._read: dict[str, Mask] = {}

    def __getitem__(self, digest: str) -> Mask:
        if digest not in self._read:
            data = self.packed[digest]
            if len(data) != (self.layout.prunable_size + 7) // 8:
                raise KeyError(digest)
            mask = Mask.unpack(self.layout, np.frombuffer(data, dtype=np.uint8))
            if mask.hash != digest:
                raise KeyError(digest)
            self._read[digest] = mask
        return self._read[digest]

    def put(self, mask: Mask) -> str:
        self._read[mask.hash] = mask
        self.packed[mask.hash] = mask.packed.tobytes()
        return mask.hash

    def only(self, digests: Iterable[str]) -> dict[str, bytes]:
        """The packed masks of these hashes."""
        return {digest: self.packed[digest] for digest in sorted(set(digests))}
