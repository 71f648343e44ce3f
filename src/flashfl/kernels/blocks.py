"""How kernels divide the weights of a stack of models: blocks that do not cross layers."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 4096
Spans = tuple[tuple[int, int], ...]  # the columns of each layer, from one up to another


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
def blocks(spans: Spans, device: torch.device, size: int = BLOCK) -> Blocks:
    """The blocks of these layers. They are kept for good: captured graphs use them."""
    rows: list[tuple[int, int, int, int]] = []
    for i, (start, stop) in enumerate(spans):
        first = len(rows)
        rows += [(i, at, stop, first) for at in range(start, stop, size)]
    table = torch.tensor(rows, dtype=torch.int32).view(-1, 4).T.contiguous().to(device)
    return Blocks(table[0], table[1], table[2], table[3].long())
