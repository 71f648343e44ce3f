"""Bytes of a round and client: what was really encoded, beside what the paper's formula says.

The paper counts fp32 values of a model in compressed sparse row format (a column index for each value, a pointer for
each row), values alone where the mask is frozen, and leaves BatchNorm statistics out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.exchange import Local
from ..core.layout import Layout

_VALUE = _INDEX = 4


def dense_bytes(layout: Layout) -> int:
    """A dense model, by the paper's count."""
    return _VALUE * layout.trained_size


def csr_bytes(layout: Layout, counts: Sequence[float], frozen: bool) -> float:
    """A sparse model with these layer counts, by the paper's count; a layer is a matrix of shape[0] rows."""
    dense = layout.trained_size - layout.prunable_size
    total = _VALUE * (dense + sum(counts))
    if frozen:
        return total
    rows = sum(layer.shape[0] + 1 for layer in layout.prunable if layer.shape)
    return total + _INDEX * (sum(counts) + rows)


def paper_bytes(layout: Layout, local: Local, down: Sequence[float], up: Sequence[float]) -> tuple[float, float]:
    """(down, up) of one client in one round: its order had `down` active weights a layer, its update `up`.

    A dense model has no index to send, either way. A client asked for layer counts answers with those alone.
    """
    sent, answer = (
        csr_bytes(layout, counts, local.adapt is None or sum(counts) == layout.prunable_size) for counts in (down, up)
    )
    return sent, _VALUE * len(up) if local.report == "counts" else answer


@dataclass(frozen=True)
class Share:
    """Mean bytes a client and round, both directions: values, mask and overhead add up to up and down."""

    up: float
    down: float
    values: float
    mask: float
    overhead: float


def per_client(lines: Sequence[Mapping[str, Any]]) -> Share:
    """The mean over the clients and rounds of some result lines; a client that failed had its order sent too."""
    clients = sum(len(line["cohort"]) for line in lines)
    total = {k: sum(line["bytes"][k] for line in lines) for k in Share.__dataclass_fields__}
    return Share(**{k: v / max(1, clients) for k, v in total.items()})
