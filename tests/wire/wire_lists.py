"""What `kernels.rice.gap_sums` finds, list by list and gap by gap: the plain twin of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from flashfl.core.layout import Layout


def plain_gap_sums(
    layout: Layout, bits: Tensor, base: Tensor | None, active: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Places held and places in all, [lists, rows, layers], and the sums of gap >> k, k first."""
    rows = max(len(bits), 1 if base is None else len(base))
    mine = bits.expand(rows, -1)
    pairs = [(mine, torch.ones_like(mine))] if active else []  # what a list holds, and its universe
    if base is not None:
        before = base.expand(rows, -1)
        pairs += [(before & ~mine, before), (mine & ~before, ~before)]
    counts, room, sums = (torch.zeros(len(pairs), rows, len(layout.sizes), n, dtype=torch.int64) for n in (1, 1, 32))
    for i, (held, universe) in enumerate(pairs):
        for row in range(rows):
            for j, layer in enumerate(layout.prunable):
                places = universe[row, layer.start : layer.stop]
                flags = held[row, layer.start : layer.stop][places]
                counts[i, row, j], room[i, row, j] = int(flags.sum()), len(flags)
                ranks = (flags if 2 * int(flags.sum()) <= len(flags) else ~flags).nonzero().flatten()
                gaps = ranks.diff(prepend=torch.tensor([-1])) - 1
                sums[i, row, j] = (gaps[:, None] >> torch.arange(32)).sum(0)
    return counts[..., 0], room[..., 0], sums.movedim(-1, 0)
