"""From runs to the data of a page: groups of seeds with their summary and their curves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from .. import __version__
from ..measure.comms import per_client
from ..methods import METHODS
from . import curves, paper
from .load import ELSEWHERE, Found, RunData

PHASES = ("train", "aggregate", "evaluate", "record")
DIGESTS = ("task.layout", "task.holdings")  # tell runs apart and readers nothing
MOST_CLIENTS, MOST_CLASSES = 100, 64
Heat = Callable[[RunData], tuple[list[int], Any]]


def groups_of(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Runs that differ in their seed alone, together, under a label that tells the groups apart.

    Runs that have not ended are a group of their own: their accuracy is that of another round.
    """
    keys = {key: i for i, key in enumerate(dict.fromkeys(run.key for run in runs))}
    order = {name: i for i, name in enumerate(METHODS)}  # from the plainest method to the most refined
    groups: dict[tuple[int, int, bool], list[RunData]] = {}
    for run in runs:
        place = (order.get(run.method, len(order)), keys[run.key], not run.ended)
        groups.setdefault(place, []).append(run)
    ordered = [groups[place] for place in sorted(groups)]
    return dict(zip(_labels(ordered), ordered, strict=True))


def titled(groups: Mapping[str, list[RunData]]) -> dict[str, list[RunData]]:
    """The same groups; the label of those that are not finished says how far they are."""
    states = {label: _state(runs) for label, runs in groups.items()}
    return {
        label if states[label] == "finished" else f"{label} ({states[label]}, round {_rounds(runs)})": runs
        for label, runs in groups.items()
    }


def _state(runs: Sequence[RunData]) -> str:
    return ", ".join(sorted({run.state for run in runs}))


def _rounds(runs: Sequence[RunData]) -> str:
    """How far runs are: "5 of 10", or "3 to 5 of 10"."""
    done, wanted = sorted({len(run.stage2) for run in runs}), runs[0].settings.get("train.rounds")
    return " to ".join(map(str, dict.fromkeys((done[0], done[-1])))) + (f" of {wanted}" if wanted else "")


def _labels(groups: Sequence[Sequence[RunData]]) -> list[str]:
    """The method's name, and where several groups share it, the settings in which they differ."""
    labels = []
    for group in groups:
        mine = group[0].settings
        others = {
            g[0].key: g[0].settings for g in groups if g[0].method == group[0].method and g[0].key != group[0].key
        }
        parts = [f"{_short(k)} {_brief(mine[k])}" for k in _telling(mine, list(others.values()))]
        if not group[0].ended and any(g[0].ended and g[0].key == group[0].key for g in groups):
            seeds = sorted(run.seed for run in group)
            parts.append(f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}")
        plain = label = " · ".join([group[0].method, *parts])
        n = 2
        while label in labels:
            label, n = f"{plain} ({n})", n + 1
        labels.append(label)
    return labels


def _telling(mine: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that tell a run from others: three that all have, the method's first, and more if they must be."""
    differ = [k for k in mine if k not in ELSEWHERE and any(o.get(k) != mine[k] for o in others)]
    differ.sort(key=lambda k: not k.startswith("method."))
    named = [k for k in differ if k not in DIGESTS and all(k in o for o in others)][:3]
    while alike := [o for o in others if all(o.get(k) == mine[k] for k in named)]:
        told = {k: sum(o.get(k) != mine[k] for o in alike) for k in differ}
        best = max(told, key=lambda k: told[k], default="")
        if not told.get(best):
            break
        named.append(best)
    return named


def _short(name: str) -> str:
    return name if name.startswith("flower.") else name.rpartition(".")[2]


def _brief(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def page_data(found: Found, heat: Heat = RunData.heat) -> dict[str, Any]:
    """Everything the page shows, as JSON data."""
    groups = groups_of(found.runs)
    return {
        "version": __version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "groups": [_group(label, runs, heat) for label, runs in groups.items()],
        "tasks": _tasks(groups),
        "runs": [_about(label, run) for label, runs in groups.items() for run in runs],
        "problems": [{"folder": p.folder, "why": p.why} for p in found.problems],
    }


def _group(label: str, runs: Sequence[RunData], heat: Heat) -> dict[str, Any]:
    shown = curves.band([curves.accuracy(run) for run in runs])
    rounds = shown["round"]
    shown |= {k: curves.mean_at([curves.total_bytes(run, k) for run in runs], rounds) for k in ("up", "down")}
    last = max(runs, key=lambda run: len(run.stage2))
    return {
        "label": label,
        "summary": summary(runs),
        "paper": paper.match(last.settings),
        "accuracy": shown,
        "before": curves.band([curves.accuracy(run, "before") for run in runs]),
        "mismatch": curves.band([curves.mismatch(run) for run in runs]),
        "layers": last.layers,
        "layer_mismatch": curves.layer_mismatch(runs),
        "heat": curves.heat(runs, heat),
        "densities": curves.mean_densities(runs, lambda run: run.stage2[-1] if run.stage2 else None),
        "points": [_point(run) for run in runs if run.stage2],
        "share": _share(runs),
        "phases": _phases(runs),
    }


def summary(runs: Sequence[RunData]) -> dict[str, Any]:
    """One row of the table: means over seeds. A number nobody recorded is None."""
    last = [list(curves.accuracy(run).values()) for run in runs]
    final = [values[-1] for values in last if values]
    lines = [line for run in runs for line in run.rounds]
    paper_bytes = [line["paper_bytes"] for line in lines if "paper_bytes" in line]
    moved = [list(curves.mismatch(run).values()) for run in runs]
    tails = [statistics.fmean(m[-max(1, len(m) // 6) :]) for m in moved if m]
    up, down = (_mean([run.rounds[-1]["total"][k] for run in runs]) for k in ("up", "down"))
    # What dense FedAvg would send has no first stage; what this method sent in one counts all the same.
    dense = sum(line["paper_bytes"]["dense"] for line in lines if line["stage"] == 2 and "paper_bytes" in line)
    # The paper leaves BatchNorm statistics out. They travel all the same, and dense FedAvg would send them too.
    about = runs[0].header["task"]
    whole = dense * about["values"] / about["trained"]
    flops = [curves.total_flops(run) for run in runs]
    return {
        "seeds": len(runs),
        "state": _state(runs),
        "rounds": _rounds(runs),
        "accuracy": _mean(final),
        "std": curves.spread(final) if final else None,
        "best": _mean([max(values) for values in last if values]),
        "density": _mean([run.stage2[-1]["density"] for run in runs if run.stage2]),
        "up": up,
        "down": down,
        "saving": whole / len(runs) / (up + down) if dense and up and down else None,
        "paper_saving": dense / sum(b["up"] + b["down"] for b in paper_bytes) if dense else None,
        "published_saving": paper.saving(runs[0].settings),
        "flops": _mean([list(f.values())[-1] for f in flops if f]),
        "mismatch": _mean(tails),
        "dropouts": sum(len(line["failures"]) for line in lines),
        "seconds": _mean([sum(_seconds(run).values()) for run in runs]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _seconds(run: RunData) -> dict[str, float]:
    return {k: sum(line["seconds"].get(k, 0.0) for line in run.rounds) for k in PHASES}


def _phases(runs: Sequence[RunData]) -> dict[str, float]:
    """Seconds of each phase, mean over seeds; from the rounds' lines, so interruptions neither add nor lose any."""
    return {k: statistics.fmean(_seconds(run)[k] for run in runs) for k in PHASES}


def _share(runs: Sequence[RunData]) -> dict[str, float]:
    """Bytes of a client and round, beside the paper's formula."""
    lines = [line for run in runs for line in run.stage2]
    if not lines:
        return {}
    clients = sum(len(line["cohort"]) for line in lines)
    share = per_client(lines)
    counted = {"values": share.values, "mask": share.mask, "overhead": share.overhead}
    if all("paper_bytes" in line for line in lines):
        counted["paper"] = sum(b["up"] + b["down"] for line in lines for b in [line["paper_bytes"]]) / clients
    return counted


def _point(run: RunData) -> dict[str, Any]:
    """A run's end in the plane of bytes and FLOPs."""
    judged = list(curves.accuracy(run).values())
    total = run.rounds[-1]["total"]
    flops = list(curves.total_flops(run).values())
    return {
        "seed": run.seed,
        "bytes": total["up"] + total["down"],
        "up": total["up"],
        "flops": flops[-1] if flops else None,
        "accuracy": judged[-1] if judged else None,
    }


def _tasks(groups: Mapping[str, Sequence[RunData]]) -> list[dict[str, Any]]:
    """The ways data are split over clients, each once and by its first seed, cut to what can be shown."""
    seen: dict[str, dict[str, Any]] = {}
    for run in sorted((run for runs in groups.values() for run in runs), key=lambda run: run.seed):
        info, title = run.info, _split(run.info)
        if info.get("histogram") and title not in seen:
            counts = np.array(info["histogram"], dtype=int)
            seen[title] = {"title": f"{title}, seed {run.seed}", "clients": len(counts), **_cut(counts)}
    return list(seen.values())[:6]


def _split(info: Mapping[str, Any]) -> str:
    alpha = f", α = {info['alpha']:g}" if info.get("partition") in ("lda", "dirichlet") else ""
    return f"{info.get('dataset', '')}: {info.get('partition', '')}{alpha}, {info.get('clients', '?')} clients"


def _cut(counts: np.ndarray[Any, Any]) -> dict[str, Any]:
    clients = curves.thin(range(len(counts)), MOST_CLIENTS)
    classes = curves.thin(range(counts.shape[1]), MOST_CLASSES)
    return {"columns": clients, "rows": classes, "counts": counts[np.ix_(clients, classes)].T.tolist()}


def _about(label: str, run: RunData) -> dict[str, Any]:
    end = run.end or {}
    return {
        "label": label,
        "folder": run.folder.name,
        "seed": run.seed,
        "state": run.state,
        "rounds": len(run.stage2),
        "checksum": end.get("checksum"),
        "settings": run.settings,
        "versions": dict(run.header.get("versions", {})),
    }
