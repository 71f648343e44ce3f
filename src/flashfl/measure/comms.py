"""Bytes of a client in a round: those really encoded, and those of the paper's formula.

The paper counts a model as fp32 values in compressed sparse row format: a column index for each value, a pointer for
each row. If the mask is frozen it counts values only. It does not count BatchNorm statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.client import moves_mask
from ..core.exchange import Local
from ..core.layout import Layout

_VALUE = _INDEX = 4


def dense_bytes(layout: Layout) -> int:
    """A dense model, by the paper's count."""
    return _VALUE * layout.trained_size


def csr_bytes(layout: Layout, counts: Sequence[float], frozen: bool) -> float:
    """A sparse model with these layer counts, by the paper's count. A layer is a matrix of shape[0] rows."""
    dense = layout.trained_size - layout.prunable_size
    total = _VALUE * (dense + sum(counts))
    if frozen:
        return total
    rows = sum(layer.shape[0] + 1 for layer in layout.prunable if layer.shape)
    return total + _INDEX * (sum(counts) + rows)


def paper_bytes(layout: Layout, local: Local, down: Sequence[float], up: Sequence[float]) -> tuple[float, float]:
    """(down, up) of one client in one round. Its order had `down` active weights by layer, its update `up`.

    A dense model needs no indices. A client that was asked for layer counts sends nothing else.
    """
    moves_down = local.adapt is not None
    moves_up = moves_down or moves_mask(local.parts)
    sent, answer = (
        csr_bytes(layout, counts, frozen=not moves or sum(counts) == layout.prunable_size)
        for counts, moves in ((down, moves_down), (up, moves_up))
    )
    return sent, _VALUE * len(up) if local.report == "counts" else answer
