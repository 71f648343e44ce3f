"""What all figures share: their size, ticks, names beside points, curves that lie on one another, and the legend."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
    axes.autoscale_view()  # else done when the figure is drawn, which is too late
    places = [(x, y) for _, _, x, y in points]
    at = [axes.transAxes.inverted().transform(axes.transData.transform(place)) for place in places]
    taken = [_Box(x - 0.015, x + 0.015, y - 0.025, y + 0.025) for x, y in at]
    for (label, ink, *_), point, (x, y) in zip(points, places, at, strict=True):
        name = broken(label if len(label) <= 24 else label[:23] + "…", 24)
        wide = 0.02 * len(name)
        first = (1, 0) if x < 0.5 else (-1, 0)
        for sideways, up in (*_SIDES, first):
            left, low = x + sideways * (wide / 2 + 0.02) - wide / 2, y + 0.055 * up - 0.025
            box = _Box(left, left + wide, low, low + 0.05)
            if box.left > 0 and box.right < 1 and not any(map(box.meets, taken)):
                break
        taken.append(box)
        axes.annotate(
            name, point, (6 * sideways, 11 * up), textcoords="offset points", color=ink,
            ha={1: "left", -1: "right", 0: "center"}[sideways], va="center", fontsize="small",
        )  # fmt: skip


_SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


class _Box(NamedTuple):
    """A part of a panel, whose width and height are 1."""

    left: float
    right: float
    low: float
    high: float

    def meets(self, other: _Box) -> bool:
        return self.left < other.right and other.left < self.right and self.low < other.high and other.low < self.high


def whole(axis: Axis) -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def take_turns(panels: Sequence[Axes]) -> None:
    """Draw curves that lie on one another as dashes of all their colours in turns, so that none hides another."""
    stacks: list[list[Line2D]] = []
    for axes in panels:
        own, (low, high) = len(stacks), axes.get_ylim()
        for line in axes.get_lines():
            x, y = map(np.asarray, line.get_data())
            if line.get_linestyle() != "-" or len(x) < 2:
                continue
            for stack in stacks[own:]:
                xs, ys = stack[0].get_data()
                if np.array_equal(xs, x) and np.abs(y - ys).max() < 0.004 * (high - low):
                    stack.append(line)
                    break
            else:
                stacks.append([line])
    for stack in (stack for stack in stacks if len(stack) > 1):
        for turn, line in enumerate(stack):
            line.set_linestyle((-5 * turn, (5, 5 * (len(stack) - 1))))


def grid(count: int, shared: bool = False) -> tuple[Figure, list[Axes], int]:
    """A figure with so many panels in up to three columns. shared: they have the same axes."""
    columns = min(3, count)
    rows = math.ceil(count / columns)
    made = blank((3.8 * columns + 0.6, 3.4 * rows + 0.4))
    every = list(made.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared).flatten())
    for axes in every[count:]:
        axes.set_visible(False)
    return made, every[:count], columns


def divided(count: int, size: tuple[float, float]) -> tuple[Figure, list[Figure | SubFigure]]:
    """A figure of so many parts below one another, each of this size. A single part is the figure itself."""
    made = blank((size[0], size[1] * count))
    return made, [made] if count == 1 else list(made.subfigures(count, 1, squeeze=False).flatten())


def broken(label: str, letters: int) -> str:
    """A label on several lines. A dollar in it must not begin a formula."""
    return textwrap.fill(label.replace("$", r"\$"), letters)


def decades(axis: Axis) -> None:
    """Tick labels of a logarithmic axis that do not overlap: at decades, or at 1, 2 and 5 if there are few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if high < 100 * low:
        axis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


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
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need the matplotlib package: pip install 'flashfl[plots]'") from None
    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(made: Figure, path: Path) -> Path:
    """Write a figure. The file's ending decides the format (png, svg, pdf)."""
    drawn = BytesIO()
    try:
        made.savefig(drawn, dpi=160, format=path.suffix.lower().removeprefix(".") or "png")
    except ValueError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
    put(path, drawn.getvalue())
    return path
