"""Runs in groups: seeds of one experiment together, under a label that tells groups apart; and tables of them."""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from ..core.record import RoundRecord
from ..methods import METHODS
from ..paper.published import ELSEWHERE
from ..run.config import Settings
from ..run.summary import WORK, Metric, Summary, summarise
from ..run.table import TRANSFER, Entry, Table, Value, percent, shared_metric, summary_table
from .load import LONGER, STARTED, Found, RunData

DIGESTS = "task.digests."  # these settings tell runs apart, but tell a reader nothing
Groups = Mapping[str, Sequence[RunData]]


def tasks_of(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Runs by what they learn: data set, model and metric. Only runs of one task belong on the same axes."""
    tasks: dict[tuple[str, str, Metric], list[RunData]] = {}
    for run in runs:
        tasks.setdefault((run.dataset, run.model, run.metric), []).append(run)
    titles: list[str] = []
    for dataset, model, metric in tasks:
        titles.append(_unlike(titles, " · ".join(filter(None, dict.fromkeys((dataset, model, metric.name))))))
    return dict(zip(titles, tasks.values(), strict=True))


def groups_of(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Runs that differ only in their seed, by label.

    Runs that have not ended form their own group: their accuracy is that of an earlier round.
    """
    keys = {key: i for i, key in enumerate(dict.fromkeys(run.key for run in runs))}
    order = {name: i for i, name in enumerate(METHODS)}  # from the simplest method to the most refined

    def place(run: RunData) -> tuple[int, int, bool]:
        return order.get(run.method, len(order)), keys[run.key], not run.ended

    ordered = [list(group) for _, group in itertools.groupby(sorted(runs, key=place), place)]
    return dict(zip(_labels(ordered), ordered, strict=True))


def titled(groups: Groups) -> dict[str, Sequence[RunData]]:
    """The same groups. Labels say how far unfinished runs are, and whether code changed before a run was resumed."""
    made: dict[str, Sequence[RunData]] = {}
    for label, runs in groups.items():
        marks = [] if (state := state_of(runs)) == "finished" else [f"{state}, round {rounds_of(runs)}"]
        marks += ["code changed"] if any(run.mixed for run in runs) else []
        made[f"{label} ({', '.join(marks)})" if marks else label] = runs
    return made


def state_of(runs: Sequence[RunData]) -> str:
    return ", ".join(sorted({run.state for run in runs}))


def rounds_of(runs: Sequence[RunData]) -> str:
    """How far runs are: "5 of 10", or "3 to 5 of 10"."""
    done, wanted = sorted({len(run.counted) for run in runs}), runs[0].settings.get("train.rounds")
    return " to ".join(map(str, dict.fromkeys((done[0], done[-1])))) + (f" of {wanted}" if wanted else "")


def _labels(groups: Sequence[Sequence[RunData]]) -> list[str]:
    """The method's name, whether runs were extended, and the settings that tell groups of one method apart."""
    labels: list[str] = []
    for group in groups:
        named, rest = _differing(group, groups)
        if longer := [name for name in LONGER if name in group[0].settings]:  # another schedule, and so always named
            named = [*(name for name in named if name not in (*LONGER, "train.rounds")), *longer]
            rest = [name for name in rest if name not in named]
        parts = _settings(group, named)
        if not group[0].ended and any(g[0].ended and g[0].key == group[0].key for g in groups):
            seeds = sorted(run.seed for run in group)
            parts.append(f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}")
        parts += [f"and {len(rest)} more"] if rest else []
        labels.append(_unlike(labels, " · ".join([group[0].method, *parts])))
    return labels


def _settings(group: Sequence[RunData], names: Iterable[str]) -> list[str]:
    return [f"{_short(name)} {_brief(group[0].settings[name])}" for name in names]


def _unlike(taken: Sequence[str], label: str) -> str:
    """The label, with a number if it is taken."""
    numbered = (f"{label} ({n})" for n in itertools.count(2))
    return label if label not in taken else next(one for one in numbered if one not in taken)


def _differing(group: Sequence[RunData], groups: Iterable[Sequence[RunData]]) -> tuple[list[str], list[str]]:
    """In which settings a group differs from others of its method: those that its label names, and the rest.

    Named are up to three that all have, the method's first, and more if needed. So is the rest if it is only one: that
    takes no more room than to count it.
    """
    method, key, mine = group[0].method, group[0].key, group[0].settings
    unlike = {g[0].key: g[0].settings for g in groups if g[0].method == method and g[0].key != key}
    others = list(unlike.values())

    def differs(other: Settings, k: str) -> bool:
        return other.get(k) != mine[k] and (k in other or other[STARTED] == mine[STARTED])

    differ = [k for k in mine if k not in ELSEWHERE and any(differs(o, k) for o in others)]
    differ.sort(key=lambda k: not k.startswith("method."))
    telling = [k for k in differ if not k.startswith((DIGESTS, STARTED))]
    named = [k for k in telling if all(k in o for o in others)][:3]
    while alike := [o for o in others if not any(differs(o, k) for k in named)]:
        told = Counter(k for k in differ for o in alike if differs(o, k))
        if not told:
            break
        named.append(told.most_common(1)[0][0])
    rest = [k for k in telling if k not in named]
    return (named, rest) if len(rest) > 1 else (named + rest, [])


def _short(name: str) -> str:
    return name if name.startswith("flower.") else name.rpartition(".")[2]


def _brief(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def summary_of(runs: Sequence[RunData]) -> Summary:
    return summarise([run.numbers for run in runs], runs[0].metric)


_COLUMNS = (
    "seeds", "accuracy %", "best %", "personal %", "density", "up / run", "down / run", TRANSFER, "saving",
    "paper's formula", "FLOPs / run", "mask mismatch", "dropped", "seconds / run",
)  # fmt: skip


def groups_table(found: Found, marked: bool = False, title: str = "") -> Table:
    """One row a group. The paper's figure stands beside runs with the paper's settings, if there are any.

    marked: it stands beside other runs too, with a mark and a note that says what differs.
    """
    groups = titled(groups_of(found.runs))
    made = {label: summary_of(runs) for label, runs in groups.items()}
    table = summary_table(made, _COLUMNS)
    entries, notes = [], []
    for label, runs in groups.items():
        there = runs[0].published
        if there.mean is not None and (marked or not there.differs):
            text = percent(there.mean, there.std) + (" †" if there.differs else "")
            entries.append(Entry(text, there.mean))
        else:
            entries.append(Entry("–"))
        notes += [f"† {label}: {'; '.join(there.differs)}."] if there.differs else []
        notes += [f"{label}: the paper states a saving of {there.saving:g}×."] if there.saving is not None else []
    if not marked:
        notes = [f"not shown: {why}" for why in found.problems.values()]
    for label, runs in groups.items():
        if rest := _differing(runs, groups.values())[1]:
            notes.append(f"{label}: {', '.join(_settings(runs, rest))}.")
        if mixed := sorted({name for run in runs for name in run.mixed}):
            notes.append(f"{label}: resumed with other code of {', '.join(mixed)}, so the results mix two versions.")
    at = table.head.index("density")
    added = {"paper %": entries} if any(entry.value is not None for entry in entries) else {}
    rounds = [int(runs[0].settings.get("train.rounds", len(runs[0].counted))) for runs in groups.values()]
    if len(set(rounds)) > 1:  # then accuracies cannot be compared as they stand
        added["rounds"] = [Entry(str(n), n) for n in rounds]
    rows = [[*row[:at], *some, *row[at:]] for row, *some in zip(table.rows, *added.values(), strict=True)]
    return Table((*table.head[:at], *added, *table.head[at:]), rows, title, [*table.notes, *notes])


def task_tables(found: Found) -> str:
    """A Markdown table for each task. Folders that cannot be shown are listed at the end."""
    tasks = tasks_of(found.runs)
    parts = {title if len(tasks) > 1 else "": Found(runs) for title, runs in tasks.items()}
    parts[list(parts)[-1]].problems.update(found.problems)
    return "\n".join(groups_table(part, title=title).markdown() for title, part in parts.items())


def rounds_csv(found: Found) -> str:
    """Every round of every run, with what was recorded about it, for other tools. An empty field was not recorded."""
    name = shared_metric(run.metric for run in found.runs).name
    rows = [
        {"run": run.folder, "method": run.method, "group": label, "seed": run.seed, "task": task, **_round(one, name)}
        for task, those in tasks_of(found.runs).items()
        for label, runs in groups_of(those).items()
        for run in runs
        for one in run.rounds
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _round(record: RoundRecord, metric: str) -> dict[str, Value]:
    score, paper = record.score, record.paper_bytes
    return {
        "phase": record.phase,
        "round": record.round + 1,
        metric: score and score.metric,
        "test_loss": score and score.loss,
        "train_loss": record.loss,
        "density": record.density,
        "mismatch": record.mismatch,
        **asdict(record.bytes),
        "paper_up": paper.up,
        "paper_down": paper.down,
        "total_up": record.total.up,
        "total_down": record.total.down,
        "flops": record.flops,
        "clients": len(record.cohort),
        "failures": len(record.failures),
        "seconds": round(sum(record.seconds.get(k, 0.0) for k in WORK), 4),
    }
