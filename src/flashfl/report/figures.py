"""The paper's figures by name, drawn from any runs with matplotlib (the optional extra `plots`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from ..core.errors import FlashError, unknown
from ..paper.tables import Panels
from ..run.summary import ACCURACY, Metric
from . import curves
from .drawing import blank, broken, decades, dot, grid, legend, name_points, take_turns
from .groups import Groups, groups_of, tasks_of, titled
from .load import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = ("#2563c9", "#d9621f", "#16915f", "#b8397f", "#7a4fd0", "#a3780a", "#0e8aa3", "#b3303b", "#5b6472", "#4f8a1c")

Rows = Sequence[Sequence[float]]
Panel = tuple["Axes", Sequence[RunData], list[int], Rows]  # its axes, runs, and their rows of values by round


def accuracy_rounds(axes: Axes, groups: Groups) -> None:
    """Test accuracy by round, mean and standard deviation over seeds, and the paper's figure if it has one."""
    for (label, runs), ink in zip(groups.items(), cycle(_INK)):
        shown = curves.accuracy(runs)
        _line(axes, shown["round"], shown, label, ink, runs[0].metric)
        there = runs[0].published
        if there.mean is not None and not there.differs and shown["round"]:
            at = shown["round"][-1]
            axes.errorbar([at], [there.mean], [there.std or 0], marker="D", mfc="white", color=ink, capsize=3)
    axes.set(xlabel="round", ylabel=_metric_label(groups))
    axes.locator_params("x", integer=True)


def accuracy_bytes(axes: Axes, groups: Groups) -> None:
    """Test accuracy by bytes sent up and down, on a log scale."""
    for (label, runs), ink in zip(groups.items(), cycle(_INK)):
        shown = curves.accuracy(runs)
        sent = curves.mean_at(runs, lambda record: record.total.up + record.total.down, shown["round"])
        _line(axes, [b / 1e6 for b in sent], shown, label, ink, runs[0].metric)
    axes.set(xlabel="communicated (MB, up and down)", ylabel=_metric_label(groups), xscale="log")
    decades(axes.xaxis)


def _metric_label(groups: Groups) -> str:
    metric = next(iter(groups.values()))[0].metric
    better = "" if metric.higher_is_better else f" ({metric.direction})"
    return "accuracy (%)" if metric == ACCURACY else f"{metric.name}{better}"


def _line(axes: Axes, x: Sequence[float], shown: curves.Band, label: str, ink: str, metric: Metric = ACCURACY) -> None:
    mean, std = ([metric.scale * v for v in shown[name]] for name in ("mean", "std"))
    axes.plot(x, mean, dot(x), color=ink, label=label, linewidth=1.6)
    low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=ink, alpha=0.15, linewidth=0)


def mismatch_rounds(axes: Axes, groups: Groups) -> None:
    """Mismatch between the masks of consecutive rounds."""
    for (label, runs), ink in zip(groups.items(), cycle(_INK)):
        shown = curves.mismatch(runs)
        axes.plot(shown["round"], shown["mean"], dot(shown["round"]), color=ink, label=label, linewidth=1.6)
    top = axes.get_ylim()[1]
    axes.set(xlabel="round", ylabel="mask mismatch", ylim=(-0.03 * top, top))
    axes.locator_params("x", integer=True)


def layer_sensitivity(axes: Axes, groups: Groups) -> None:
    """Layer densities at the end, and as a first phase measured them (dashed)."""
    for (label, runs), ink in zip(groups.items(), cycle(_INK)):
        final = curves.final_densities(runs)
        axes.plot(range(1, len(final) + 1), final, "o-", color=ink, label=label, markersize=3, linewidth=1.4)
        learned = [r.cohort_densities for run in runs for r in run.rounds if not r.counts and r.cohort_densities]
        if learned:
            means = np.mean(learned, axis=0)
            axes.plot(range(1, len(means) + 1), means, "--", color=ink, linewidth=1, label=f"{label}, first phase")
    names = brief(max((runs[0].layers for runs in groups.values()), key=len))
    ticks = curves.thin(range(len(names)), 24)
    axes.set(ylabel="density", yscale="log")
    axes.set_xticks([t + 1 for t in ticks], [names[t] for t in ticks], rotation=40, ha="right", fontsize="small")


def brief(names: Sequence[str]) -> list[str]:
    """Layers without the ending that all of them share."""
    shared = all(name.endswith(".weight") for name in names)
    return [name.removesuffix(".weight") if shared else name for name in names]


def flops_bytes(axes: Axes, groups: Groups) -> None:
    """Training FLOPs against bytes, one point for each run."""
    axes.set(xlabel="communicated (MB, up and down)", ylabel="training FLOPs", xscale="log", yscale="log")
    _points(axes, groups, lambda run: run.numbers.flops, statistics.geometric_mean)
    decades(axes.yaxis)


def accuracy_total(axes: Axes, groups: Groups) -> None:
    """Where each run ends: test accuracy by all bytes, up and down."""
    axes.set(xlabel="communicated in all (MB, up and down)", ylabel=_metric_label(groups), xscale="log")
    _points(
        axes, groups, lambda run: run.numbers.accuracy and run.metric.scale * run.numbers.accuracy, statistics.fmean
    )


def _points(
    axes: Axes, groups: Groups, value: Callable[[RunData], float | None], mean: Callable[[Sequence[float]], float]
) -> None:
    """A value of each run by its bytes. The name of a group stands at the middle of its points."""
    axes.margins(0.2)
    middles: list[tuple[str, str, float, float]] = []
    for (label, runs), ink in zip(groups.items(), cycle(_INK)):
        ends = [(run.numbers.up + run.numbers.down, value(run)) for run in runs]
        known = [(sent / 1e6, found) for sent, found in ends if found is not None]
        if known:
            x, y = zip(*known, strict=True)
            axes.plot(x, y, "o", color=ink, label=label)
            middles.append((label, ink, statistics.geometric_mean(x), mean(y)))
    name_points(axes, middles)
    decades(axes.xaxis)


def _panels(
    name: str, groups: Groups, find: Callable[[Sequence[RunData]], tuple[list[int], Rows]]
) -> tuple[Figure, list[Panel], float]:
    """A figure with a panel for each group that has something to show, and the end of the scale that all share."""
    found = [(label, runs, *find(runs)) for label, runs in groups.items()]
    found = [one for one in found if one[-1]]
    if not found:
        raise FlashError(f"{name}: there is nothing to draw, as the masks of these runs never move or are not stored")
    made, every, _ = grid(len(found))
    panels = []
    for axes, (label, runs, rounds, rows) in zip(every, found, strict=True):
        axes.set_title(broken(label, 34), fontsize="small")
        panels.append((axes, runs, rounds, rows))
    return made, panels, 1.02 * max(0.1, *(np.max(rows) for *_, rows in found))


def sm_heatmap(groups: Groups) -> Figure:
    """Mismatch between the masks of every two rounds, a panel for each group."""
    made, panels, most = _panels("sm-heatmap", groups, curves.heat)
    for axes, _, rounds, rows in panels:
        image = axes.imshow(rows, origin="lower", cmap="viridis", vmin=0, vmax=most)
        ticks = curves.thin(range(len(rounds)), 6)
        names = [str(rounds[t]) for t in ticks]
        axes.set_xticks(ticks, names)
        axes.set_yticks(ticks, names)
        axes.set(xlabel="round", ylabel="round")
    made.colorbar(image, ax=made.axes, label="mask mismatch", shrink=0.8)
    return made


def sm_layers(groups: Groups) -> Figure:
    """Mismatch of each layer's mask between consecutive rounds, a panel for each group."""
    made, panels, most = _panels("sm-layers", groups, curves.moving_layers)
    from matplotlib import colormaps  # after _panels, which says so if matplotlib is missing

    # A layer has the same colour in all panels.
    names = list(dict.fromkeys(name for runs in groups.values() for name in brief(runs[0].layers)))
    inks = {name: colormaps["turbo"](0.05 + 0.9 * i / max(1, len(names) - 1)) for i, name in enumerate(names)}
    for axes, runs, rounds, rows in panels:
        for name, row in zip(brief(runs[0].layers), rows, strict=True):
            axes.plot(rounds, row, dot(row), color=inks[name], linewidth=1.2, label=name)
        axes.set(xlabel="round", ylabel="mask mismatch", ylim=(-0.03 * most, most))
        axes.locator_params("x", integer=True)
    legend(made, made.axes)
    take_turns(made.axes)
    return made


Draw = Callable[["Axes", Groups], None]
ONE: dict[str, Draw] = {
    "accuracy-rounds": accuracy_rounds,
    "accuracy-bytes": accuracy_bytes,
    "layer-sensitivity": layer_sensitivity,
    "flops-bytes": flops_bytes,
    "mismatch-rounds": mismatch_rounds,
    "accuracy-total": accuracy_total,
}
# Figures with a panel for each group.
EACH: dict[str, Callable[[Groups], Figure]] = {"sm-heatmap": sm_heatmap, "sm-layers": sm_layers}
NAMES = (*EACH, *ONE)


def figure(name: str, runs: Sequence[RunData]) -> Figure:
    """The figure of that name as a matplotlib Figure."""
    if name not in NAMES:
        raise unknown("figure", name, NAMES)
    if name in EACH:
        return EACH[name](titled(groups_of(runs)))
    return _by_task(runs, [ONE[name]], (6.4, 4))


def _by_task(runs: Sequence[RunData], draws: Sequence[Draw], size: tuple[float, float]) -> Figure:
    """A figure with these panels. Each task has its own: different metrics or data have no axis in common."""
    tasks = tasks_of(runs)
    made = blank((size[0], size[1] * len(tasks)))
    parts = [made] if len(tasks) == 1 else made.subfigures(len(tasks), squeeze=False).flatten()
    for part, (title, those) in zip(parts, tasks.items(), strict=True):
        panels = part.subplots(-(-len(draws) // 3), min(3, len(draws)), squeeze=False).flatten().tolist()
        groups = titled(groups_of(those))
        for axes, draw in zip(panels, draws, strict=True):
            draw(axes, groups)
            axes.grid(alpha=0.25)
        if len(tasks) > 1:
            part.suptitle(broken(title, int(10 * size[0])), fontsize="medium")
        legend(part, panels[:1])
        take_turns(panels)
    return made


def accuracy_bytes_of_cells(panels: Panels) -> Figure:
    """Accuracy by bytes from stored results.

    The points of a curve are round, accuracy, bytes up, bytes down.
    """
    made, every, columns = grid(len(panels), shared=True)
    inks = dict(zip(dict.fromkeys(label for lines in panels.values() for label in lines), cycle(_INK)))
    for axes, (title, lines) in zip(every, panels.items(), strict=True):
        for label, seeds in lines.items():
            shown = curves.band([{int(r): a for r, a, _, _ in seed} for seed in seeds])
            taken = curves.band([{int(r): up + down for r, _, up, down in seed} for seed in seeds])
            _line(axes, [both / 1e6 for both in taken["mean"]], shown, label, inks[label])
        axes.set(title=title, ylabel="accuracy (%)", xscale="log")
        decades(axes.xaxis)
        axes.label_outer()
        axes.grid(alpha=0.25)
    for axes in every[-columns:]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("communicated (MB, up and down)")
    named = {label: line for axes in made.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    made.legend(named.values(), named.keys(), loc="outside upper center", ncols=len(named), fontsize="small")
    return made


def overview(runs: Sequence[RunData]) -> Figure:
    """Everything in one image: accuracy by rounds and bytes, mismatch, layer densities, FLOPs, where each run ends."""
    return _by_task(runs, list(ONE.values()), (14, 8))
