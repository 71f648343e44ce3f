"""Robust sums: a few rogue clients cannot pull an average far, whichever method takes it.

A trimmed mean needs to see single updates, which sums do not keep. On a CPU the updates of a round are written to a
temporary file and read back a stretch of weights at a time. On a GPU they stay on the device.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..aggregate import add, add_statistics
from ..core.exchange import Sums, Update
from ..core.mask import Weights

_STRETCH = 32 << 20  # numbers held in memory at a time, over all clients


class Row(NamedTuple):
    """What the sums need to know about one update beside its weights."""

    n: int
    active: int


class DeviceRow(NamedTuple):
    """One update on a device: a dense vector and the bits of its mask; `start` is the model it was trained from."""

    n: int
    active: int
    values: Tensor
    bits: Tensor
    start: Weights | None  # None: the update has no weights

    def change(self) -> tuple[Tensor, Tensor]:
        """The trained weights before, and how they changed. Those that the order did not have were 0."""
        assert self.start is not None
        trained = self.start.layout.trained_size
        before = self.start.vector[:trained].clone()
        before[: len(self.bits)] *= self.bits
        return before, self.values[:trained] - before


class Rows(Protocol):
    """The updates of a round, as a matrix [clients, size] that is read a few columns at a time."""

    @property
    def rows(self) -> Sequence[Row | DeviceRow]: ...

    def values(self, start: int, stop: int, rows: Sequence[int]) -> Tensor: ...

    def bits(self, start: int, stop: int) -> Tensor: ...


def add_trimmed(sums: Sums, updates: Iterable[Update], trim: float, folder: Path | None = None) -> None:
    """Add updates so that each weight counts by its trimmed mean over the clients that hold it; see `trim_rows`.

    Counts, loss and extras are added as ever. `folder`: where the temporary file would be.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        held = _File(file)
        for update in updates:
            add(sums, replace(update, mask=None, values=None))
            if update.mask is not None:
                held.add(update)
        trim_rows(sums, held, trim)


def trim_rows(sums: Sums, held: Rows, trim: float, device: torch.device | str = "cpu") -> None:
    """Fill in the weights, holders and statistics of `sums`.

    Of a weight's h holders, the floor(trim * h) smallest and largest values are dropped and the rest averaged, each
    client alike. The sum is that mean times the holders' samples. So an average over holders (`wfa`) is the trimmed
    mean itself, and `fedavg` still counts clients that do not hold a weight as holding zero.
    """
    if not held.rows:
        return
    layout, (weights, holders), every = sums.layout, sums.flat(device), range(len(held.rows))
    shares = torch.tensor([row.n for row in held.rows]).to(weights.device)
    most = max(1, _STRETCH // len(held.rows))
    for layer in layout.travelling:
        for start in range(layer.start, layer.stop, most):
            stop = min(start + most, layer.stop)
            values = held.values(start, stop, every)
            if layer.kind == "prunable":
                bits = held.bits(start, stop)
                holders[start:stop] = (bits * shares[:, None]).sum(0)
                weights[start:stop] = trimmed_mean(values, bits, trim) * holders[start:stop]
            else:
                weights[start:stop] = trimmed_mean(values, None, trim) * shares.sum()
    for active in sorted({row.active for row in held.rows}) if layout.size > layout.trained_size else ():
        alike = [i for i in every if held.rows[i].active == active]
        values, n = held.values(layout.trained_size, layout.size, alike), sum(held.rows[i].n for i in alike)
        add_statistics(sums, active, trimmed_mean(values, None, trim) * n, n)


class _File:
    """Updates in a file, as dense vectors; their masks stay in memory at one bit a weight."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.rows: list[Row] = []
        self._masks: list[np.ndarray[Any, Any]] = []

    def add(self, update: Update) -> None:
        assert update.weights is not None
        mask, vector = update.weights.mask, update.weights.vector
        self.rows.append(Row(update.n, mask.active))
        self._masks.append(mask.packed)
        self.file.write(vector.numpy().tobytes())
        self._size = len(vector)

    def values(self, start: int, stop: int, rows: Sequence[int]) -> Tensor:
        return torch.stack([self._read(row, start, stop) for row in rows])

    def _read(self, row: int, start: int, stop: int) -> Tensor:
        self.file.seek(4 * (row * self._size + start))
        return torch.frombuffer(bytearray(self.file.read(4 * (stop - start))), dtype=torch.float32)

    def bits(self, start: int, stop: int) -> Tensor:
        first, last = start // 8, (stop + 7) // 8
        flags = np.unpackbits(np.stack([packed[first:last] for packed in self._masks]), axis=1, bitorder="little")
        return torch.from_numpy(flags[:, start - 8 * first : stop - 8 * first].astype(bool))


class OnDevice:
    """Updates as tensors of one device."""

    def __init__(self, rows: Sequence[DeviceRow]) -> None:
        self.rows = rows

    def values(self, start: int, stop: int, rows: Sequence[int]) -> Tensor:
        return torch.stack([self.rows[row].values[start:stop] for row in rows])

    def bits(self, start: int, stop: int) -> Tensor:
        return torch.stack([row.bits[start:stop] for row in self.rows])


def clip_rows(rows: Sequence[DeviceRow], clip: float) -> None:
    """Shorten, in place, changes that are more than `clip` times the median of all."""
    norms = [(row, float(row.change()[1].double().norm())) for row in rows if row.start is not None]
    most = clip * statistics.median(norm for _, norm in norms) if norms else 0.0
    for row, norm in norms:
        if norm > most:
            before, change = row.change()
            row.values[: len(before)] = before + change * (most / norm)


def trimmed_mean(values: Tensor, bits: Tensor | None, trim: float) -> Tensor:
    """The mean of each column over the values that `bits` marks (all), without the share `trim` at either end."""
    bits = torch.ones_like(values, dtype=torch.bool) if bits is None else bits
    holders = bits.sum(0)
    # Rounded down; the small addend makes up for binary fractions: 0.3 of 10 is 3.
    cut = (holders.double() * trim + 1e-9).long()
    ranked = torch.where(bits, values.double(), torch.inf).sort(0).values  # values of other clients come last
    rank = torch.arange(len(values), device=values.device)[:, None]
    kept = (rank >= cut) & (rank < holders - cut)
    return torch.where(kept, ranked, 0.0).sum(0) / (holders - 2 * cut).clamp(min=1)
