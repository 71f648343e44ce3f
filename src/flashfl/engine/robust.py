"""Robust sums: a few rogue clients cannot pull an average far, whichever method takes it.

Clipping and trimming need to see single updates, which sums do not keep. So each update becomes a row: a dense vector
that is NaN where its client holds no weight. On a CPU the rows of a round lie in a temporary file. On a GPU they stay
on the device.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..aggregate import add, add_statistics
from ..core.exchange import Sums, Update
from ..core.layout import Layout
from ..core.mask import Weights
from .trust import Trust

_STRETCH = 32 << 20  # numbers that are ranked at a time, over all clients

Start = Callable[[], Weights]  # makes the model that a client was sent


@dataclass(frozen=True)
class Row:
    """One update. `start` is None if its client trained no weights, only statistics."""

    n: int
    active: int
    values: Tensor
    start: Start | None


def add_updates(
    sums: Sums, updates: Iterable[Update], starts: Mapping[int, Start], trust: Trust, folder: Path | None = None
) -> None:
    """Clip, trim and add updates on a CPU. Counts, loss and extras are added as ever.

    starts: client id -> the model that it was sent. folder: where the temporary file would be.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        rows: list[Row] = []
        for update in updates:
            add(sums, replace(update, mask=None, values=None))
            if (weights := update.weights) is not None:
                file.write(marked(weights.vector, weights.mask.bits).numpy().data)
                rows.append(Row(update.n, weights.mask.active, torch.empty(0), starts.get(update.client)))
        file.flush()
        if rows:
            matrix = torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(len(rows), sums.layout.size)))
            add_rows(sums, [replace(row, values=values) for row, values in zip(rows, matrix, strict=True)], trust)


def nothing(layout: Layout, device: torch.device | str = "cpu") -> Weights:
    """Where clients start that report changes: at 0."""
    return Weights.dense(layout, torch.zeros(layout.size, device=device))


def marked(vector: Tensor, bits: Tensor) -> Tensor:
    """`vector`, in place, with NaN where `bits` marks no weight."""
    vector[: len(bits)].masked_fill_(~bits, torch.nan)
    return vector


def add_rows(sums: Sums, rows: Sequence[Row], trust: Trust) -> None:
    """Clip and trim rows as `trust` says, and add their weights, holders and statistics. Rows may be changed."""
    if trust.clip:
        _clip(rows, trust.clip)
    if trust.trim:
        _add_trimmed(sums, rows, trust.trim)
        return
    weights, holders = sums.flat(rows[0].values.device)
    for row in rows:
        weights.add_(row.values.nan_to_num(0.0), alpha=row.n)
        holders.add_(~row.values[: len(holders)].isnan(), alpha=row.n)
        if tail := sums.layout.size - sums.layout.trained_size:
            add_statistics(sums, row.active, row.values[-tail:].double() * row.n, row.n)


def _clip(rows: Sequence[Row], clip: float) -> None:
    """Shorten changes that are over `clip` times the median. A weight that was not sent counts as 0 before."""

    def change(start: Start, row: Row) -> tuple[Tensor, Tensor]:
        sent = start()
        before = sent.vector[: sent.layout.trained_size]
        return before, row.values[: len(before)] - before

    changed = [(row.start, row) for row in rows if row.start is not None]
    norms = [float(torch.linalg.vector_norm(change(*one)[1].nan_to_num(0.0).double())) for one in changed]
    most = clip * statistics.median(norms) if norms else 0.0
    for one, norm in zip(changed, norms, strict=True):
        if norm > most:
            before, moved = change(*one)
            one[1].values[: len(before)] = before + moved * (most / norm)


def _add_trimmed(sums: Sums, rows: Sequence[Row], trim: float) -> None:
    """Of a weight's h holders, drop the floor(trim * h) smallest and largest values and average the rest.

    Each client counts alike. The sum is that mean times the holders' samples. So an average over holders (`wfa`) is the
    trimmed mean itself, and `fedavg` still counts clients that do not hold a weight as holding zero.
    """
    layout, (weights, holders) = sums.layout, sums.flat(rows[0].values.device)
    shares = torch.tensor([row.n for row in rows]).to(weights.device)
    most = max(1, _STRETCH // len(rows))
    for start in range(0, layout.size, most):
        values = torch.stack([row.values[start : start + most] for row in rows])
        held = (~values.isnan() * shares[:, None]).sum(0)
        weights[start : start + most] = trimmed_mean(values, trim) * held
        holders[start : start + most] = held[: max(0, layout.prunable_size - start)]
    for active in sorted({row.active for row in rows}) if layout.size > layout.trained_size else ():
        alike = [row for row in rows if row.active == active]
        n, tails = sum(row.n for row in alike), [row.values[layout.trained_size :] for row in alike]
        add_statistics(sums, active, trimmed_mean(torch.stack(tails), trim) * n, n)


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """The mean of each column without NaN, and without the share `trim` at either end."""
    holders = (~values.isnan()).sum(0)
    # Rounded down; the small addend makes up for binary fractions: 0.3 of 10 is 3.
    cut = (holders.double() * trim + 1e-9).long()
    ranked = values.double().sort(0).values  # NaN comes last
    rank = torch.arange(len(values), device=values.device)[:, None]
    kept = (rank >= cut) & (rank < holders - cut)
    return torch.where(kept, ranked, 0.0).sum(0) / (holders - 2 * cut).clamp(min=1)
