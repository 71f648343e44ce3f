"""How kernels divide the prunable weights of a stack of models: blocks that do not cross layers."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Layout

BLOCK = 4096


class Blocks(NamedTuple):
    """For each block its layer, its span, and the first block of its layer."""

    layer: Tensor
    start: Tensor
    stop: Tensor
    first: Tensor

    def __len__(self) -> int:  # of blocks, not of fields
        return self.layer.shape[0]

    @property
    def spans(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer, self.start, self.stop

    def before(self, found: Tensor) -> Tensor:
        """What the blocks of the same layer that come before each block found together: [..., blocks]."""
        earlier = found.cumsum(-1) - found
        return earlier - earlier[..., self.first]


@functools.cache
def blocks(layout: Layout, device: torch.device, size: int = BLOCK) -> Blocks:
    rows: list[tuple[int, int, int, int]] = []
    for i, layer in enumerate(layout.prunable):
        first = len(rows)
        rows += [(i, at, layer.stop, first) for at in range(layer.start, layer.stop, size)]
    table = torch.tensor(rows, dtype=torch.int32).view(-1, 4).T.contiguous().to(device)
    return Blocks(table[0], table[1], table[2], table[3].long())
