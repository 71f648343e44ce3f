"""What all figures share: their size, ticks, names beside points, curves that lie on one another, and the legend."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..core.errors import ConfigError
from ..core.files import put

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D


def dot(x: Sequence[float]) -> str:
    """How to draw a curve: a single point has no line."""
    return "o" if len(x) == 1 else "-"


def name_points(axes: Axes, points: Sequence[tuple[str, str, float, float]]) -> None:
    """Names beside points (name, colour, x, y), each where no other point or name stands."""
    from matplotlib.transforms import Bbox

    axes.autoscale_view()  # else done when the figure is drawn, which is too late
    in_panel = axes.transData - axes.transAxes  # the panel is 1 wide and 1 high
    at = [in_panel.transform((x, y)) for _, _, x, y in points]
    taken = [Bbox.from_bounds(x - 0.015, y - 0.025, 0.03, 0.05) for x, y in at]
    for (label, ink, at_x, at_y), (x, y) in zip(points, at, strict=True):
        name = broken(label if len(label) <= 24 else label[:23] + "…", 24)
        wide = 0.02 * len(name)
        first = (1, 0) if x < 0.5 else (-1, 0)
        for sideways, up in (*_SIDES, first):
            left, low = x + sideways * (wide / 2 + 0.02) - wide / 2, y + 0.055 * up - 0.025
            box = Bbox.from_bounds(left, low, wide, 0.05)
            if box.x0 > 0 and box.x1 < 1 and not box.count_overlaps(taken):
                break
        taken.append(box)
        axes.annotate(
            name, (at_x, at_y), (6 * sideways, 11 * up), textcoords="offset points", color=ink,
            ha={1: "left", -1: "right", 0: "center"}[sideways], va="center", fontsize="small",
        )  # fmt: skip


_SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


def take_turns(panels: Sequence[Axes]) -> None:
    """Draw curves that lie on one another as dashes of all their colours in turns, so that none hides another."""
    for axes in panels:
        stacks: list[list[Line2D]] = []
        low, high = axes.get_ylim()
        for line in axes.get_lines():
            x, y = map(np.asarray, line.get_data())
            if line.get_linestyle() != "-" or len(x) < 2:
                continue
            for stack in stacks:
                xs, ys = stack[0].get_data()
                if np.array_equal(xs, x) and np.abs(y - ys).max() < 0.004 * (high - low):
                    stack.append(line)
                    break
            else:
                stacks.append([line])
        for stack in stacks:
            for turn, line in enumerate(stack):
                line.set_linestyle((-5 * turn, (5, 5 * (len(stack) - 1))) if len(stack) > 1 else "-")


def grid(count: int, shared: bool = False) -> tuple[Figure, list[Axes], int]:
    """A figure with so many panels in up to three columns. shared: they have the same axes."""
    columns = min(3, count)
    rows = math.ceil(count / columns)
    made = blank((3.8 * columns + 0.6, 3.4 * rows + 0.4))
    every = list(made.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared).flatten())
    for axes in every[count:]:
        axes.set_visible(False)
    return made, every[:count], columns


def broken(label: str, letters: int) -> str:
    """A label on several lines. A dollar in it must not begin a formula."""
    return textwrap.fill(label.replace("$", r"\$"), letters)


def decades(axis: Axis) -> None:
    """Tick labels of a logarithmic axis that do not overlap: at decades, or at 1, 2 and 5 if there are few of them."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_view_interval()
    if high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def legend(made: Figure | SubFigure, panels: Sequence[Axes]) -> None:
    """A legend below the panels of a figure, or of a part as wide as it. The figure is made higher for it."""
    named = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    lines, labels = list(named.values()), list(named)
    if not labels:
        return
    root = made.canvas.figure
    wide, high = root.get_size_inches()
    letters = int(14 * wide)  # of the small font, on a line
    texts = [broken(label, letters - 10) for label in labels]
    columns = max(1, min(len(texts), letters // (8 + max(len(line) for text in texts for line in text.split("\n")))))
    rows = sum(text.count("\n") + 1 for text in texts) / columns
    root.set_size_inches(wide, high + 0.18 * math.ceil(rows))
    made.legend(lines, texts, loc="outside lower center", ncols=columns, fontsize="small")


def blank(size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need the matplotlib package: pip install 'flashfl[plots]'") from None
    return Figure(figsize=size, layout="constrained")


def save(made: Figure, path: Path) -> Path:
    """Write a figure. The file's ending decides the format (png, svg, pdf)."""
    drawn = BytesIO()
    try:
        made.savefig(drawn, dpi=160, format=path.suffix.lower().removeprefix(".") or "png")
    except ValueError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
    put(path, drawn.getvalue())
    return path
