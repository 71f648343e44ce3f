"""One table for every command: rows of entries, as Markdown, text for a terminal, or data for the page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from .progress import amount
from .summary import ACCURACY, Metric, Summary

Value = float | str | None


@dataclass(frozen=True)
class Entry:
    """What a table shows in one place, and the value it is sorted by."""

    text: str
    value: Value = None


@dataclass(frozen=True)
class Table:
    """Rows under a heading. The first column names the row. Notes stand below."""

    head: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    title: str = ""
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """As GitHub reads it."""
        lines = ["| " + " | ".join(map(_markdown, texts)) + " |" for texts in (self.head, *self._texts())]
        title = [f"**{self.title}**", ""] if self.title else []
        notes = ["", *(f"- {_one_line(note)}" for note in self.notes)] if self.notes else []
        return "\n".join([*title, lines[0], "|" + "---|" * len(self.head), *lines[1:], *notes]) + "\n"

    def terminal(self, width: int = 80) -> str:
        """Aligned columns. Headings are broken into lines of words, and so are entries if the table is too wide."""
        rows = self._texts()
        least = [
            max(len(word) for text in column for word in _words(text)) for column in zip(self.head, *rows, strict=True)
        ]
        widths = [max(w, *map(len, column)) for w, column in zip(least, zip(*rows, strict=True), strict=True)]
        while sum(widths) + 2 * (len(widths) - 1) > width and widths != least:
            widest = max(range(len(widths)), key=lambda i: widths[i] - least[i])
            widths[widest] -= 1
        over, *lines = (
            [textwrap.wrap(text, w) for text, w in zip(row, widths, strict=True)] for row in (self.head, *rows)
        )
        high = max(map(len, over))
        over = [[""] * (high - len(cell)) + cell for cell in over]  # headings stand on the rule
        shown = [over, [["-" * w] for w in widths], *lines]
        texts = [_aligned(line, widths) for cells in shown for line in zip_longest(*cells, fillvalue="")]
        notes = ["", *(textwrap.fill(note, width) for note in self.notes)] if self.notes else []
        return "\n".join([*([*textwrap.wrap(self.title, width), ""] if self.title else []), *texts, *notes])

    def to_json(self) -> dict[str, object]:
        """For the page, which can sort it."""
        rows = [[{"text": e.text, "value": e.value} for e in row] for row in self.rows]
        return {"title": self.title, "head": list(self.head), "rows": rows, "notes": list(self.notes)}

    def _texts(self) -> list[list[str]]:
        return [[e.text for e in row] for row in self.rows]


def _words(text: str) -> list[str]:
    """What a text may be broken into: words, and their parts at hyphens."""
    return textwrap.wrap(text, 1, break_long_words=False) or [""]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A line: the first cell stands at the left of its column, the others at the right."""
    padded = [f"{cell:{'>' if i else '<'}{width}}" for i, (cell, width) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(padded).rstrip()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _markdown(text: str) -> str:
    """On one line, and without what would end the cell. An empty text stays empty."""
    return _one_line(text).replace("|", r"\|")


def number(value: float | None, text: Callable[[float], str]) -> Entry:
    """A number, or a dash if it was not recorded."""
    return Entry("–") if value is None else Entry(text(value), value)


def percent(mean: float, std: float | None) -> str:
    """A figure of the paper, which is in percent already."""
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


TRANSFER = "s at 1 / 10 / 100 Mbit/s"  # seconds that one client's bytes of one round take
_AVERAGED = (
    'Some runs report a running average of the server\'s model. "not averaged" is the metric of the model itself.'
)


def transfer(count: float) -> Entry:
    """How long so many bytes take on slow, medium and fast lines."""
    seconds = [8 * count / (rate * 1e6) for rate in (1, 10, 100)]
    # Two digits that count, as 1300, not as 1.3e+03.
    return Entry(" / ".join(f"{float(f'{s:.2g}'):.10g}" for s in seconds), seconds[0])


COLUMNS: Mapping[str, Callable[[Summary], Entry]] = {
    "seeds": lambda s: Entry(str(s.seeds), s.seeds),
    "accuracy %": lambda s: number(s.accuracy, lambda v: s.metric.text(v, s.std)),
    "best %": lambda s: number(s.best, s.metric.text),
    "not averaged %": lambda s: number(s.plain, s.metric.text),
    "before %": lambda s: number(s.before, s.metric.text),
    "personal %": lambda s: number(s.personal, s.metric.text),
    "density": lambda s: number(s.density, lambda v: f"{v:.4f}"),
    "up / run": lambda s: number(s.up, amount),
    "down / run": lambda s: number(s.down, amount),
    "up / round": lambda s: number(s.up / max(1, s.rounds), amount),
    "down / round": lambda s: number(s.down / max(1, s.rounds), amount),
    TRANSFER: lambda s: transfer((s.up + s.down) / max(1, s.orders)),
    "saving": lambda s: number(s.saving, lambda v: f"{v:.1f}×"),
    "paper's formula": lambda s: number(s.paper_saving, lambda v: f"{v:.1f}×"),
    "FLOPs / run": lambda s: number(s.flops, lambda v: f"{v:.3g}"),
    "mask mismatch": lambda s: number(s.mismatch, lambda v: f"{v:.3f}"),
    "epsilon": lambda s: number(s.epsilon, lambda v: f"{v:.2f}"),
    "dropped": lambda s: number(s.dropped * s.seeds, lambda v: f"{v:.0f}"),
    "seconds / run": lambda s: number(s.seconds, lambda v: f"{v:.1f}"),
}


def summary_table(groups: Mapping[str, Summary], columns: Sequence[str], title: str = "") -> Table:
    """A row for each group of runs, with these of the COLUMNS.

    Averaged models stand beside the plain ones, with a note. Private runs get a column for the epsilon they spent. The
    column of personal models is left out if there are none.
    """
    notes: list[str] = []
    if all(s.personal is None for s in groups.values()):
        columns = [name for name in columns if name != "personal %"]
    if any(s.plain is not None for s in groups.values()) and "accuracy %" in columns:
        at = columns.index("accuracy %") + 1
        columns, notes = [*columns[:at], "not averaged %", *columns[at:]], [_AVERAGED]
    if any(s.epsilon is not None for s in groups.values()) and "epsilon" not in columns:
        columns = [*columns, "epsilon"]
    rows = [[Entry(label, label), *(COLUMNS[name](s) for name in columns)] for label, s in groups.items()]
    metric = shared_metric(s.metric for s in groups.values())
    if metric != ACCURACY:
        named = metric.name if metric.higher_is_better else f"{metric.name} ({metric.direction})"
        columns = [name.replace("accuracy %", named).removesuffix(" %") for name in columns]
    return Table(("method", *columns), rows, title, notes)


def shared_metric(metrics: Iterable[Metric]) -> Metric:
    """The metric of all groups of runs. If they differ, one that fits all."""
    found = set(metrics)
    return Metric("metric") if len(found) > 1 else found.pop() if found else ACCURACY
