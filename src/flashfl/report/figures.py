"""The paper's figures by name, drawn from any runs with matplotlib (the optional extra `plots`)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, FlashError, unknown
from ..core.files import put
from ..run.summary import ACCURACY, Metric
from ..run.table import shared_metric
from . import curves
from .groups import Groups, groups_of, titled
from .load import RunData

_INK = ("#2563c9", "#d9621f", "#16915f", "#b8397f", "#7a4fd0", "#a3780a", "#0e8aa3", "#b3303b", "#5b6472", "#4f8a1c")

Rows = Sequence[Sequence[float]]


def _ink(i: int) -> str:
    return _INK[i % len(_INK)]


def accuracy_rounds(axes: Any, groups: Groups) -> None:
    """Test accuracy by round, mean and standard deviation over seeds, and the paper's figure if it has one."""
    for i, (label, runs) in enumerate(groups.items()):
        shown = curves.band([curves.accuracy(run) for run in runs])
        _line(axes, shown["round"], shown, label, _ink(i), runs[0].metric)
        there = runs[0].published
        if there.applies and shown["round"]:
            at = shown["round"][-1]
            axes.errorbar([at], [there.mean], [there.std or 0], marker="D", mfc="white", color=_ink(i), capsize=3)
    axes.set(xlabel="round", ylabel=_metric_label(groups))


def accuracy_bytes(axes: Any, groups: Groups) -> None:
    """Test accuracy by bytes sent up and down, on a log scale."""
    for i, (label, runs) in enumerate(groups.items()):
        shown = curves.band([curves.accuracy(run) for run in runs])
        sent = [curves.over_rounds(run, lambda record: record.total.up + record.total.down) for run in runs]
        _line(axes, [b / 1e6 for b in curves.mean_at(sent, shown["round"])], shown, label, _ink(i), runs[0].metric)
    axes.set(xlabel="communicated (MB, up and down)", ylabel=_metric_label(groups), xscale="log")
    _decades(axes.xaxis)


def _metric_label(groups: Groups) -> str:
    metric = shared_metric(runs[0].metric for runs in groups.values())
    return "accuracy (%)" if metric == ACCURACY else metric.name


def _line(
    axes: Any, x: Sequence[float], shown: Mapping[str, Sequence[float]], label: str, ink: str, metric: Metric = ACCURACY
) -> None:
    mean, std = ([metric.scale * v for v in shown[name]] for name in ("mean", "std"))
    axes.plot(x, mean, _dot(x), color=ink, label=label, linewidth=1.6)
    low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=ink, alpha=0.15, linewidth=0)


def _dot(x: Sequence[float]) -> str:
    """How to draw a curve: a single point has no line."""
    return "o" if len(x) == 1 else "-"


def mismatch_rounds(axes: Any, groups: Groups) -> None:
    """Mismatch between the masks of consecutive rounds."""
    for i, (label, runs) in enumerate(groups.items()):
        shown = curves.band([curves.mismatch(run) for run in runs])
        axes.plot(shown["round"], shown["mean"], _dot(shown["round"]), color=_ink(i), label=label, linewidth=1.6)
    axes.set(xlabel="round", ylabel="mask mismatch", ylim=(0, None))


def layer_sensitivity(axes: Any, groups: Groups) -> None:
    """Layer densities at the end, and as a first stage measured them (dashed)."""
    for i, (label, runs) in enumerate(groups.items()):
        final = curves.final_densities(runs)
        axes.plot(range(1, len(final) + 1), final, "o-", color=_ink(i), label=label, markersize=3, linewidth=1.4)
        learned = [r.cohort_densities for run in runs for r in run.rounds if not r.counts and r.cohort_densities]
        if learned:
            means = [sum(column) / len(learned) for column in zip(*learned, strict=True)]
            axes.plot(range(1, len(means) + 1), means, "--", color=_ink(i), linewidth=1, label=f"{label}, stage 1")
    axes.set(xlabel="layer", ylabel="density", yscale="log")
    axes.xaxis.get_major_locator().set_params(integer=True)


def flops_bytes(axes: Any, groups: Groups) -> None:
    """Training FLOPs against bytes, one point for each run."""
    for i, (label, runs) in enumerate(groups.items()):
        known = [((n.up + n.down) / 1e6, n.flops) for n in (run.numbers for run in runs) if n.flops]
        if known:
            axes.plot(*zip(*known, strict=True), "o", color=_ink(i), label=label)
    axes.set(xlabel="communicated (MB, up and down)", ylabel="training FLOPs", xscale="log", yscale="log")
    _decades(axes.xaxis)
    _decades(axes.yaxis)


def _sm_heatmap(axes: Any, rounds: Sequence[int], rows: Rows, most: float) -> Any:
    image = axes.imshow(rows, origin="lower", cmap="viridis", vmin=0, vmax=most)
    ticks = curves.thin(range(len(rounds)), 6)
    axes.set_xticks(ticks, [rounds[t] for t in ticks])
    axes.set_yticks(ticks, [rounds[t] for t in ticks])
    axes.set(xlabel="round", ylabel="round")
    return image


def _sm_layers(axes: Any, rounds: Sequence[int], rows: Rows, most: float) -> None:
    from matplotlib import colormaps

    count = max(2, len(rows))
    for i, row in enumerate(rows):
        ink = colormaps["turbo"](0.05 + 0.9 * i / (count - 1))
        axes.plot(rounds, row, _dot(row), color=ink, linewidth=1.2, label=i + 1)
    axes.set(xlabel="round", ylabel="mask mismatch", ylim=(0, most))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
    axes.legend(title="layer", fontsize="x-small", ncols=min(7, count), **below)


ONE: dict[str, Callable[[Any, Groups], None]] = {
    "accuracy-rounds": accuracy_rounds,
    "accuracy-bytes": accuracy_bytes,
    "layer-sensitivity": layer_sensitivity,
    "flops-bytes": flops_bytes,
    "mismatch-rounds": mismatch_rounds,
}
# One panel for each group: what it shows, and how.
EACH: dict[str, tuple[Callable[[Sequence[RunData]], tuple[list[int], Rows]], Callable[..., Any]]] = {
    "sm-heatmap": (curves.heat, _sm_heatmap),
    "sm-layers": (curves.moving_layers, _sm_layers),
}
NAMES = (*EACH, *ONE)


def figure(name: str, runs: Sequence[RunData]) -> Any:
    """The figure of that name as a matplotlib Figure."""
    if name not in NAMES:
        raise unknown("figure", name, NAMES)
    groups = _titled(runs)
    if name in EACH:
        return _panels(name, groups)
    made = _blank((6.4, 4))
    axes = made.subplots()
    ONE[name](axes, groups)
    axes.grid(alpha=0.25)
    _legend(made, axes)
    return made


def _titled(runs: Sequence[RunData]) -> Groups:
    if not runs:
        raise FlashError("there is no run to draw: give folders that contain runs")
    return titled(groups_of(runs))


def accuracy_bytes_of_cells(panels: Mapping[str, Mapping[str, Sequence[Sequence[Sequence[float]]]]]) -> Any:
    """Accuracy by bytes from stored results: title -> label -> one curve for each seed.

    The points of a curve are round, accuracy, bytes up, bytes down.
    """
    made, every, columns = _grid(len(panels), sharex=True, sharey=True)
    inks = {label: _ink(i) for i, label in enumerate(dict.fromkeys(x for lines in panels.values() for x in lines))}
    for axes, (title, lines) in zip(every, panels.items(), strict=True):
        for label, seeds in lines.items():
            shown = curves.band([{int(r): a for r, a, _, _ in seed} for seed in seeds])
            taken = curves.band([{int(r): up + down for r, _, up, down in seed} for seed in seeds])
            _line(axes, [both / 1e6 for both in taken["mean"]], shown, label, inks[label])
        axes.set(title=title, ylabel="accuracy (%)", xscale="log")
        _decades(axes.xaxis)
        axes.label_outer()
        axes.grid(alpha=0.25)
    for axes in every[-columns:]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("communicated (MB, up and down)")
    named = {label: line for axes in made.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    made.legend(named.values(), named.keys(), loc="outside upper center", ncols=len(named), fontsize="small")
    return made


def _panels(name: str, groups: Groups) -> Any:
    """One panel for each group that has something to show, all on one scale."""
    find, draw = EACH[name]
    found = {label: find(runs) for label, runs in groups.items()}
    found = {label: (rounds, rows) for label, (rounds, rows) in found.items() if rows}
    if not found:
        raise FlashError(f"{name}: there is nothing to draw, as the masks of these runs never move or are not stored")
    most = 1.02 * max([0.1, *(float(v) for _, rows in found.values() for row in rows for v in row)])
    made, every, _ = _grid(len(found))
    images = []
    for axes, (label, (rounds, rows)) in zip(every, found.items(), strict=True):
        images.append(draw(axes, rounds, rows, most))
        axes.set_title(_broken(label, 34), fontsize="small")
    if images[0] is not None:
        made.colorbar(images[0], ax=made.axes, label="mask mismatch", shrink=0.8)
    return made


def _grid(count: int, **shared: bool) -> tuple[Any, list[Any], int]:
    """A figure with so many panels in up to three columns."""
    columns = min(3, count)
    rows = math.ceil(count / columns)
    made = _blank((3.8 * columns + 0.6, 3.4 * rows + 0.4))
    every = list(made.subplots(rows, columns, squeeze=False, **shared).flatten())
    for axes in every[count:]:
        axes.set_visible(False)
    return made, every[:count], columns


def _broken(label: str, letters: int) -> str:
    """A label on several lines. A dollar in it must not begin a formula."""
    return textwrap.fill(label.replace("$", r"\$"), letters)


def _decades(axis: Any) -> None:
    """Tick labels of a logarithmic axis that do not overlap: at decades, or at 1, 2 and 5 if there are few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if high < 100 * low:
        axis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def overview(runs: Sequence[RunData]) -> Any:
    """Everything in one image: accuracy by rounds and bytes, mismatch, layer densities, FLOPs."""
    groups, made = _titled(runs), _blank((14, 8))
    every = made.subplots(2, 3).flatten()
    for axes, draw in zip(every, ONE.values(), strict=False):
        draw(axes, groups)
        axes.grid(alpha=0.25)
    _legend(made, every[0])
    every[-1].set_visible(False)
    return made


def _legend(made: Any, axes: Any) -> None:
    """A legend below the panels, in a figure that is made higher for it."""
    lines, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    wide, high = made.get_size_inches()
    letters = int(14 * wide)  # of the small font, on a line
    texts = [_broken(label, letters - 10) for label in labels]
    columns = max(1, min(len(texts), letters // (8 + max(len(line) for text in texts for line in text.split("\n")))))
    rows = sum(text.count("\n") + 1 for text in texts) / columns
    made.set_size_inches(wide, high + 0.18 * math.ceil(rows))
    made.legend(lines, texts, loc="outside lower center", ncols=columns, fontsize="small")


def _blank(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need the matplotlib package: pip install 'flashfl[plots]'") from None
    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    return made


def save(made: Any, path: Path) -> Path:
    """Write a figure. The file's ending decides the format (png, svg, pdf)."""
    drawn = BytesIO()
    try:
        made.savefig(drawn, dpi=160, format=path.suffix.lower().removeprefix(".") or "png")
    except ValueError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
    put(path, drawn.getvalue())
    return path
