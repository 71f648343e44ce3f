"""Show a partition, in the terminal or as a plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError

_SHADES = " ▁▂▃▄▅▆▇█"


def render(counts: NDArray[np.int64], rows: int = 40, columns: int = 100) -> str:
    """A histogram (clients by classes) as text: one line a client, with a bar for each class.

    With more than `rows` clients, an even choice of them is shown. With more than `columns` classes, neighbours are
    grouped.
    """
    clients, classes = counts.shape
    sizes = counts.sum(1)
    held = (counts > 0).sum(1)
    chosen = np.unique(np.linspace(0, clients - 1, min(rows, clients)).round().astype(int))
    edges = np.unique(np.linspace(0, classes, min(columns, classes) + 1).round().astype(int))[:-1]
    lines = [
        f"{clients} clients, {sizes.sum()} samples, {sizes.min()} to {sizes.max()} a client (median "
        f"{int(np.median(sizes))}), {held.min()} to {held.max()} of {classes} classes a client"
    ]
    for client in chosen:
        grouped = np.add.reduceat(counts[client], edges)
        levels = np.ceil(grouped / max(1, grouped.max()) * (len(_SHADES) - 1)).astype(int)
        lines.append(f"{client:>5} {sizes[client]:>6} |{''.join(_SHADES[level] for level in levels)}|")
    if len(chosen) < clients:
        lines.append(f"({clients - len(chosen)} clients not shown)")
    return "\n".join(lines)


def plot(counts: NDArray[np.int64], path: str | Path, title: str = "") -> None:
    """Draw a histogram (clients by classes) as stacked bars, one a client. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need the matplotlib package: pip install 'flashfl[plots]'") from None
    clients, classes = counts.shape
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(np.arange(clients), counts.T, labels=map(str, range(classes)), step="mid", linewidth=0)
    axes.set(xlabel="client", ylabel="samples", xlim=(-0.5, max(0.5, clients - 0.5)), title=title)
    if classes <= 20:
        axes.legend(title="class", loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(path, dpi=150)
