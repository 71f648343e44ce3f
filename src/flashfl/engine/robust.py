"""Robust sums: what a few rogue clients send cannot pull an average far, whichever method takes it.

A trimmed mean needs to see single updates, which additive sums do not keep. So the updates of a round are written to a
temporary file as they are decoded, and read back a stretch of weights at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..aggregate import add, add_statistics
from ..core.exchange import Sums, Update
from ..core.layout import Layout

_STRETCH = 32 << 20  # numbers held in memory at a time, over all clients


class _Held(NamedTuple):
    """An update in the file."""

    at: int  # where it lies
    bits: np.ndarray[Any, Any]  # its mask, packed
    active: int
    n: int


def trimmed_sums(layout: Layout, updates: Iterable[Update], trim: float) -> Sums:
    """Sums of a round in which each weight counts by its trimmed mean over those who hold it.

    Of h holders' values the floor(trim * h) smallest and largest are left out and the rest averaged, each client
    alike. The sum is that mean times the holders' samples, so an average over holders (`wfa`) is the trimmed mean
    itself, and `fedavg` still counts those who do not hold a weight as holding zero. Counts, loss and extras are added
    up as ever.
    """
    sums = Sums(layout)
    with tempfile.TemporaryFile() as file:
        held: list[_Held] = []
        for update in updates:
            add(sums, replace(update, weights=None))
            if update.weights is None:
                continue
            if sums.holders is None:
                sums.holders = torch.zeros(layout.prunable_size, dtype=torch.int64)
            sums.holders.add_(update.weights.mask.bits.cpu(), alpha=update.n)
            mask = update.weights.mask
            held.append(_Held(file.tell(), mask.packed, mask.active, update.n))
            file.write(update.weights.vector.cpu().numpy().tobytes())
        if held:
            sums.weights = _weights(layout, sums, file, held, trim)
        for active in {one.active for one in held} if layout.size > layout.trained_size else ():
            alike = [one for one in held if one.active == active]
            values = torch.stack([_read(file, one.at, layout.trained_size, layout.size) for one in alike])
            n = sum(one.n for one in alike)
            add_statistics(sums, active, trimmed_mean(values, None, trim) * n, n)
    return sums


def _weights(layout: Layout, sums: Sums, file: Any, held: list[_Held], trim: float) -> Tensor:
    out = torch.empty(layout.size, dtype=torch.float64)
    most = max(1, _STRETCH // len(held))
    for layer in layout.travelling:
        for start in range(layer.start, layer.stop, most):
            stop = min(start + most, layer.stop)
            values = torch.stack([_read(file, one.at, start, stop) for one in held])
            if layer.kind == "prunable":
                bits = torch.stack([_bits(one.bits, start, stop) for one in held])
                assert sums.holders is not None
                out[start:stop] = trimmed_mean(values, bits, trim) * sums.holders[start:stop]
            else:
                out[start:stop] = trimmed_mean(values, None, trim) * sums.n
    return out


def _read(file: Any, at: int, start: int, stop: int) -> Tensor:
    file.seek(at + 4 * start)
    return torch.frombuffer(bytearray(file.read(4 * (stop - start))), dtype=torch.float32)


def _bits(packed: np.ndarray[Any, Any], start: int, stop: int) -> Tensor:
    first = start // 8
    bits = np.unpackbits(packed[first : (stop + 7) // 8], bitorder="little")[start - 8 * first : stop - 8 * first]
    return torch.from_numpy(bits.astype(bool))


def trimmed_mean(values: Tensor, bits: Tensor | None, trim: float) -> Tensor:
    """Column by column the mean of the values that `bits` marks (all), less the share `trim` of them at either end."""
    bits = torch.ones_like(values, dtype=torch.bool) if bits is None else bits
    holders = bits.sum(0)
    # Rounded down; the small addend undoes what binary fractions lose of a share such as 0.3 of 10.
    cut = (holders.double() * trim + 1e-9).long()
    ranked = torch.where(bits, values.double(), torch.inf).sort(0).values  # those who do not hold it come last
    rank = torch.arange(len(values))[:, None]
    kept = (rank >= cut) & (rank < holders - cut)
    return torch.where(kept, ranked, 0.0).sum(0) / (holders - 2 * cut).clamp(min=1)
