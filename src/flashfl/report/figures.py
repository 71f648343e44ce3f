"""The paper's figures by name, drawn from any runs with matplotlib (the optional extra `plots`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
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
    from matplotlib.image import AxesImage

_INK = ("#2563c9", "#d9621f", "#16915f", "#b8397f", "#7a4fd0", "#a3780a", "#0e8aa3", "#b3303b", "#5b6472", "#4f8a1c")

Rows = Sequence[Sequence[float]]
Inks = dict[str, tuple[float, float, float, float]]  # a colour for each layer


def _ink(i: int) -> str:
    return _INK[i % len(_INK)]


def accuracy_rounds(axes: Axes, groups: Groups) -> None:
    """Test accuracy by round, mean and standard deviation over seeds, and the paper's figure if it has one."""
    for i, (label, runs) in enumerate(groups.items()):
        shown = curves.band([curves.accuracy(run) for run in runs])
        _line(axes, shown["round"], shown, label, _ink(i), runs[0].metric)
        there = runs[0].published
        if there.mean is not None and not there.differs and shown["round"]:
            at = shown["round"][-1]
            axes.errorbar([at], [there.mean], [there.std or 0], marker="D", mfc="white", color=_ink(i), capsize=3)
    axes.set(xlabel="round", ylabel=_metric_label(groups))
    axes.locator_params("x", integer=True)


def accuracy_bytes(axes: Axes, groups: Groups) -> None:
    """Test accuracy by bytes sent up and down, on a log scale."""
    for i, (label, runs) in enumerate(groups.items()):
        shown = curves.band([curves.accuracy(run) for run in runs])
        sent = [curves.over_rounds(run, lambda record: record.total.up + record.total.down) for run in runs]
        _line(axes, [b / 1e6 for b in curves.mean_at(sent, shown["round"])], shown, label, _ink(i), runs[0].metric)
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
    for i, (label, runs) in enumerate(groups.items()):
        shown = curves.band([curves.mismatch(run) for run in runs])
        axes.plot(shown["round"], shown["mean"], dot(shown["round"]), color=_ink(i), label=label, linewidth=1.6)
    top = axes.get_ylim()[1]
    axes.set(xlabel="round", ylabel="mask mismatch", ylim=(-0.03 * top, top))
    axes.locator_params("x", integer=True)


def layer_sensitivity(axes: Axes, groups: Groups) -> None:
    """Layer densities at the end, and as a first phase measured them (dashed)."""
    for i, (label, runs) in enumerate(groups.items()):
        final = curves.final_densities(runs)
        axes.plot(range(1, len(final) + 1), final, "o-", color=_ink(i), label=label, markersize=3, linewidth=1.4)
        learned = [r.cohort_densities for run in runs for r in run.rounds if not r.counts and r.cohort_densities]
        if learned:
            means = np.mean(learned, axis=0)
            axes.plot(range(1, len(means) + 1), means, "--", color=_ink(i), linewidth=1, label=f"{label}, first phase")
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
    for i, (label, runs) in enumerate(groups.items()):
        ends = [(run.numbers.up + run.numbers.down, value(run)) for run in runs]
        known = [(sent / 1e6, found) for sent, found in ends if found is not None]
        if known:
            x, y = zip(*known, strict=True)
            axes.plot(x, y, "o", color=_ink(i), label=label)
            middles.append((label, _ink(i), statistics.geometric_mean(x), mean(y)))
    name_points(axes, middles)
    decades(axes.xaxis)


def _sm_heatmap(axes: Axes, rounds: Sequence[int], rows: Rows, most: float, inks: Inks) -> AxesImage:
    image = axes.imshow(rows, origin="lower", cmap="viridis", vmin=0, vmax=most)
    ticks = curves.thin(range(len(rounds)), 6)
    names = [str(rounds[t]) for t in ticks]
    axes.set_xticks(ticks, names)
    axes.set_yticks(ticks, names)
    axes.set(xlabel="round", ylabel="round")
    return image


def _sm_layers(axes: Axes, rounds: Sequence[int], rows: Rows, most: float, inks: Inks) -> None:
    for (name, ink), row in zip(inks.items(), rows, strict=True):
        axes.plot(rounds, row, dot(row), color=ink, linewidth=1.2, label=name)
    axes.set(xlabel="round", ylabel="mask mismatch", ylim=(-0.03 * most, most))
    axes.locator_params("x", integer=True)


def _layer_inks(groups: Groups) -> Inks:
    """A colour for each layer, from the first to the last, the same in all panels."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(name for runs in groups.values() for name in brief(runs[0].layers)))
    return {name: colormaps["turbo"](0.05 + 0.9 * i / max(1, len(names) - 1)) for i, name in enumerate(names)}


Draw = Callable[["Axes", Groups], None]
ONE: dict[str, Draw] = {
    "accuracy-rounds": accuracy_rounds,
    "accuracy-bytes": accuracy_bytes,
    "layer-sensitivity": layer_sensitivity,
    "flops-bytes": flops_bytes,
    "mismatch-rounds": mismatch_rounds,
    "accuracy-total": accuracy_total,
}
# One panel for each group: what it shows, and how.
EACH: dict[str, tuple[Callable[[Sequence[RunData]], tuple[list[int], Rows]], Callable[..., AxesImage | None]]] = {
    "sm-heatmap": (curves.heat, _sm_heatmap),
    "sm-layers": (curves.moving_layers, _sm_layers),
}
NAMES = (*EACH, *ONE)


def figure(name: str, runs: Sequence[RunData]) -> Figure:
    """The figure of that name as a matplotlib Figure."""
    if name not in NAMES:
        raise unknown("figure", name, NAMES)
    if name in EACH:
        return _panels(name, titled(groups_of(runs)))
    return _by_task(runs, [ONE[name]], (6.4, 4))


def _by_task(runs: Sequence[RunData], draws: Sequence[Draw], size: tuple[float, float]) -> Figure:
    """A figure with these panels. Each task has its own: different metrics or data have no axis in common."""
    tasks = tasks_of(runs)
    made = blank((size[0], size[1] * len(tasks)))
    parts = [made] if len(tasks) == 1 else made.subfigures(len(tasks), squeeze=False).flatten()
    for part, (title, those) in zip(parts, tasks.items(), strict=True):
        panels = part.subplots(-(-len(draws) // 3), min(3, len(draws)), squeeze=False).flatten().tolist()
        for axes, draw in zip(panels, draws, strict=True):
            draw(axes, titled(groups_of(those)))
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
    inks = {label: _ink(i) for i, label in enumerate(dict.fromkeys(x for lines in panels.values() for x in lines))}
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


def _panels(name: str, groups: Groups) -> Figure:
    """One panel for each group that has something to show, all on one scale."""
    find, draw = EACH[name]
    found = {label: find(runs) for label, runs in groups.items()}
    found = {label: (rounds, rows) for label, (rounds, rows) in found.items() if rows}
    if not found:
        raise FlashError(f"{name}: there is nothing to draw, as the masks of these runs never move or are not stored")
    most = 1.02 * max(0.1, *(np.max(rows) for _, rows in found.values()))
    made, every, _ = grid(len(found))
    images, inks = [], _layer_inks(groups)
    for axes, (label, (rounds, rows)) in zip(every, found.items(), strict=True):
        images.append(draw(axes, rounds, rows, most, {name: inks[name] for name in brief(groups[label][0].layers)}))
        axes.set_title(broken(label, 34), fontsize="small")
    if images[0] is not None:
        made.colorbar(images[0], ax=made.axes, label="mask mismatch", shrink=0.8)
    legend(made, every)
    take_turns(every)
    return made


def overview(runs: Sequence[RunData]) -> Figure:
    """Everything in one image: accuracy by rounds and bytes, mismatch, layer densities, FLOPs, where each run ends."""
    return _by_task(runs, list(ONE.values()), (14, 8))
