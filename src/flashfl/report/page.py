"""One self-contained page: a table, charts of groups of runs, and their settings. It needs no network."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from ..run.config import Settings
from ..run.summary import ACCURACY, WORK, work_seconds
from ..run.table import Table
from . import curves
from .groups import groups_of, groups_table, rounds_of, state_of, tasks_of
from .load import Found, RunData

Data = dict[str, object]  # of the page, as JSON
MOST_CLIENTS, MOST_CLASSES = 100, 64
_ABOUT = "Means over seeds after training. Select a heading to sort."
_NOTES = (
    "s at 1 / 10 / 100 Mbit/s: how many seconds a client's bytes of one round, up and down, take on such a line.",
    "Saving: dense fp32 bytes over the bytes really sent, first phase included.",
    "Paper's formula: the saving as the paper counts it.",
    "Mask mismatch: how much the server's mask differs from that of the round before (0: equal, 1: nothing in common), "
    "averaged over the last sixth of the run.",
)
_SCRIPTS = ("draw.js", "charts.js", "page.js", "table.js")


def page_data(found: Found, heat: bool = True) -> Data:
    """Everything the page shows about runs, a part for each task. heat: compare stored masks too, which is slow."""
    parts = [_part(title, runs, heat) for title, runs in tasks_of(found.runs).items()]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"made": made, "problems": list(found.problems.values()), "parts": parts}


def _part(title: str, runs: Sequence[RunData], heat: bool) -> Data:
    groups, table, metric = groups_of(runs), groups_table(Found([*runs]), marked=True), runs[0].metric
    return {
        "title": title,
        "about": _ABOUT,
        "table": replace(table, notes=[*_NOTES, *table.notes]).to_json(),
        "metric": {"name": metric.name, "percent": metric == ACCURACY, "direction": f" ({metric.direction})"},
        "facts": facts(runs),
        "groups": [_group(label, seeds, heat) for label, seeds in groups.items()],
        "splits": _splits(groups),
        "runs": [_about(label, run) for label, seeds in groups.items() for run in seeds],
    }


def facts(runs: Sequence[RunData]) -> list[tuple[str, str, str]]:
    """What the runs are about: names, values, and what stands smaller behind them.

    Runs that differ list their values, or the range of many numbers.
    """

    def each(value: Callable[[RunData], str]) -> str:
        found = list(dict.fromkeys(v for v in map(value, runs) if v))
        if all(text.replace(".", "").isdecimal() for text in found):
            found.sort(key=float)
            return " to ".join([found[0], found[-1]]) if len(found) > 3 else ", ".join(found)
        return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")

    found = [
        ("Data set", each(lambda run: run.dataset), ""),
        ("Model", each(lambda run: run.model), each(lambda run: f"{run.header['task']['trained']:,} weights")),
        ("Clients", each(lambda run: str(run.header["task"]["clients"])),
         f"({each(lambda run: str(run.settings.get('train.per_round', '')))} a round)"),
        ("Rounds", each(lambda run: str(run.settings.get("train.rounds", ""))), ""),
        ("Density", each(lambda run: f"{run.counted[-1].density:.2g}" if run.counted else ""), "at the end"),
        ("Metric", each(lambda run: run.metric.name), each(lambda run: run.metric.direction)),
        ("Seeds", str(len({run.seed for run in runs})), ""),
    ]  # fmt: skip
    return [fact for fact in found if fact[1] and runs]


def table_page(table: Table, about: str) -> str:
    """The page with a table alone."""
    part = {"title": "", "about": about, "table": table.to_json(), "facts": [], "groups": [], "runs": []}
    return page({**page_data(Found()), "parts": [part]})


def page(data: Data) -> str:
    """The page that shows this data."""
    made = _piece("page.html").replace("/*STYLE*/", _piece("style.css"))
    made = made.replace("/*SCRIPT*/", "\n".join(map(_piece, _SCRIPTS)))
    return made.replace("/*DATA*/", script_json(data))  # last: names in it may look like a mark


def _piece(name: str) -> str:
    return files(__package__).joinpath("template", name).read_text(encoding="utf-8")


def script_json(data: object) -> str:
    """JSON that cannot end the script element it stands in. NaN and infinities become null."""
    text = json.dumps(clean(data), ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def clean(data: object) -> object:
    """The same data without NaN and infinities, which JSON in a browser cannot have."""
    return json.loads(json.dumps(data), parse_constant=lambda _: None)


def _group(label: str, runs: Sequence[RunData], heat: bool) -> Data:
    shown = curves.accuracy(runs)
    shown["up"] = curves.mean_at(runs, lambda record: record.total.up, shown["round"])
    shown["down"] = curves.mean_at(runs, lambda record: record.total.down, shown["round"])
    last = max(runs, key=lambda run: len(run.counted))
    return {
        "label": label,
        "seeds": len(runs),
        "state": state_of(runs),
        "rounds": rounds_of(runs),
        "paper": asdict(last.published) if last.published.mean is not None else None,
        "accuracy": shown,
        "mismatch": curves.mismatch(runs),
        "layers": last.layers,
        "layer_mismatch": dict(zip(("round", "layers"), curves.layer_mismatch(runs), strict=True)),
        "densities": curves.final_densities(runs),
        "points": [_point(run) for run in runs if run.counted],
        "share": _share(runs),
        "work": _work(runs),
        **({"heat": dict(zip(("round", "sm"), curves.heat(runs), strict=True))} if heat else {}),
    }


def _work(runs: Sequence[RunData]) -> dict[str, float]:
    """Seconds of each kind of work, mean over seeds."""
    spent = [work_seconds(run.rounds) for run in runs]
    return {kind: statistics.fmean(one[kind] for one in spent) for kind in WORK}


def _share(runs: Sequence[RunData]) -> dict[str, float]:
    """Bytes of a client in a round by what they carry, beside the paper's formula."""
    records = [record for run in runs for record in run.counted]
    clients = sum(len(record.cohort) for record in records)
    carried = {name: [getattr(record.bytes, name) for record in records] for name in ("values", "mask", "overhead")}
    carried["paper"] = [record.paper_bytes.up + record.paper_bytes.down for record in records]
    return {name: sum(found) / clients for name, found in carried.items()} if records else {}


def _point(run: RunData) -> Data:
    """A run's end in the plane of bytes and FLOPs."""
    n = run.numbers
    return {"seed": run.seed, "bytes": n.up + n.down, "flops": n.flops, "accuracy": n.accuracy}


def _splits(groups: Mapping[str, Sequence[RunData]]) -> list[Data]:
    """How data are split over clients: each way once, as in its first seed, cut to what can be shown."""
    seen: dict[str, Data] = {}
    for run in sorted((run for runs in groups.values() for run in runs), key=lambda run: run.seed):
        info, title = run.info, _split(run.info)
        if info.get("histogram") and title not in seen:
            counts = np.array(info["histogram"], dtype=int)
            seen[title] = {"title": f"{title}, seed {run.seed}", "clients": len(counts), **_cut(counts)}
    return list(seen.values())[:6]


def _split(info: Settings) -> str:
    alpha = f", α = {info['alpha']:g}" if info.get("partition") in ("lda", "dirichlet") else ""
    return f"{info.get('dataset', '')}: {info.get('partition', '')}{alpha}, {info.get('clients', '?')} clients"


def _cut(counts: NDArray[np.int64]) -> Data:
    clients = curves.thin(range(len(counts)), MOST_CLIENTS)
    classes = curves.thin(range(counts.shape[1]), MOST_CLASSES)
    return {"columns": clients, "rows": classes, "counts": counts[np.ix_(clients, classes)].T.tolist()}


def _about(label: str, run: RunData) -> Data:
    return {
        "label": label,
        "folder": run.folder.name,
        "seed": run.seed,
        "state": run.state + (", code changed" if run.mixed else ""),
        "rounds": len(run.counted),
        "checksum": run.end and run.end.get("checksum"),
        "settings": run.settings,
        "versions": dict(run.header.get("versions", {})),
    }
