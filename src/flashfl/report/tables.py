"""The same numbers as text: one line a group for papers (Markdown), one line a round for other tools (CSV)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from ..run.progress import amount
from ..run.results import reported
from . import paper
from .gather import groups_of, summary, titled
from .load import Found, RunData

_HEAD = ("method", "seeds", "accuracy %", "best %", "paper %", "density", "up", "down", "saving", "FLOPs", "mismatch")
_COLUMNS = (
    "run", "method", "group", "seed", "stage", "round", "accuracy", "test_loss", "train_loss", "density", "mismatch",
    "up", "down", "values", "mask", "overhead", "paper_up", "paper_down", "total_up", "total_down", "flops", "clients",
    "failures", "seconds",
)  # fmt: skip


def markdown(found: Found) -> str:
    """A table of groups, as GitHub and most papers' tools read it; folders that are no runs are named below it."""
    rows = [_HEAD, tuple("---" if i == 0 else "---:" for i in range(len(_HEAD)))]
    rows += [_row(label, runs) for label, runs in titled(groups_of(found.runs)).items()]
    lines = ["| " + " | ".join(_cell(text) for text in row) + " |" for row in rows]
    lines += ["", *(f"- not shown: {_line(problem.why)}" for problem in found.problems)] if found.problems else []
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    """On one line, and without what would end the cell."""
    return _line(text).replace("|", r"\|")


def _row(label: str, runs: list[RunData]) -> tuple[str, ...]:
    s, there = summary(runs), paper.match(runs[0].settings)
    known = there is not None and not there["differs"]
    spread = f" ± {there['std']:.2f}" if there and there["std"] is not None else ""
    return (
        label,
        str(s["seeds"]),
        _text(s["accuracy"], lambda v: f"{100 * v:.2f}" + (f" ± {100 * s['std']:.2f}" if s["seeds"] > 1 else "")),
        _text(s["best"], lambda v: f"{100 * v:.2f}"),
        f"{there['mean']:.2f}{spread}" if known and there else "–",
        _text(s["density"], lambda v: f"{v:.4f}"),
        _text(s["up"], amount),
        _text(s["down"], amount),
        _text(s["saving"], lambda v: f"{v:.1f}×"),
        _text(s["flops"], lambda v: f"{v:.3g}"),
        _text(s["mismatch"], lambda v: f"{v:.3f}"),
    )


def _text(value: Any, words: Any) -> str:
    return "–" if value is None else str(words(value))


def rounds_csv(found: Found) -> str:
    """Every round of every run: what was recorded, one line each; an empty field was not."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for label, runs in groups_of(found.runs).items():
        for run in runs:
            about = {"run": str(run.folder), "method": run.method, "group": label, "seed": run.seed}
            writer.writerows({**about, **_round(line)} for line in run.rounds)
    return out.getvalue()


def _round(line: Mapping[str, Any]) -> dict[str, Any]:
    judged, counted = reported(line), line.get("paper_bytes", {})
    return {
        "stage": line["stage"],
        "round": line["round"] + 1,
        "accuracy": judged.get("metric", ""),
        "test_loss": judged.get("loss", ""),
        "train_loss": line["loss"],
        "density": line["density"],
        "mismatch": line.get("mismatch", ""),
        **{k: line["bytes"].get(k, "") for k in ("up", "down", "values", "mask", "overhead")},
        **{f"paper_{k}": counted.get(k, "") for k in ("up", "down")},
        **{f"total_{k}": line["total"][k] for k in ("up", "down")},
        "flops": line.get("flops", ""),
        "clients": len(line["cohort"]),
        "failures": len(line["failures"]),
        "seconds": round(sum(line["seconds"].get(k, 0.0) for k in ("train", "aggregate", "evaluate", "record")), 4),
    }
