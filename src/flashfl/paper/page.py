"""The overview of all tables as one self-contained HTML page, which a phone shows too."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files

from ..run.table import TRANSFER, Entry, Table
from .overview import Overview, Section
from .tables import FAR, MEANINGS, NEAR

# Columns that narrow screens leave out, unless the paper has figures for them.
_MORE = ("best %", "before %", "seeds", "up / client", "down / client", TRANSFER, "seconds")


def page(found: Overview) -> str:
    """The page. It needs no network and no JavaScript."""
    sections = [*found.all(), Section("What the columns mean", "", MEANINGS)]
    links = "".join(f'<li><a href="#s{i}">{_text(section.title)}</a></li>' for i, section in enumerate(sections))
    body = "".join(_section(i, section) for i, section in enumerate(sections))
    said = "".join(f"<p>{_text(text)}</p>" for text in found.said)
    template = files(__package__).joinpath("data", "page.html").read_text(encoding="utf-8")
    for mark, text in (("<!--SAID-->", said), ("<!--LINKS-->", links), ("<!--SECTIONS-->", body)):
        template = template.replace(mark, text)
    return template


def _section(number: int, section: Section) -> str:
    command = f"<p><code>{escape(section.command)}</code></p>" if section.command else ""
    kind = "" if section.command else ' class="words"'  # a table of texts, not of numbers
    notes = "".join(f"<li>{_text(note)}</li>" for note in section.table.notes)
    return (
        f'<section id="s{number}"{kind}><h2>{_text(section.title)}</h2>{command}{_table(section.table)}'
        f"{f'<ul>{notes}</ul>' if notes else ''}</section>"
    )


def _table(table: Table) -> str:
    needed = {name for row in table.rows for name, e in zip(table.head, row, strict=True) if "paper" in e.text}
    kinds = {"method": ' class="name"', **{name: ' class="more"' for name in _MORE if name not in needed}}
    more = [kinds.get(name, "") for name in table.head]
    heads = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(table.head, more, strict=True))
    lines = []
    for row in table.rows:
        named = dict(zip(table.head, row, strict=True))
        cells = "".join(f"<td{kind}>{_figure(e.text)}</td>" for e, kind in zip(row, more, strict=True))
        lines.append(f'<tr class="{_kind(named)}">{cells}</tr>')
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _kind(row: dict[str, Entry]) -> str:
    """How a row is coloured."""
    spreads = row["spreads"].value if "spreads" in row else None
    if isinstance(spreads, float):
        return "near" if spreads <= NEAR else "apart" if spreads <= FAR else "far"
    return "none" if "ours %" in row and row["ours %"].value is None else ""


def _figure(text: str) -> str:
    """A cell's text. Narrow screens show a spread, and what stands in parentheses, on a line of its own."""
    return re.sub(r" (± [\d.]+|\([^)]*\))", r" <small>\1</small>", _text(text)).replace("± ", "±&nbsp;")


def _text(text: str) -> str:
    """Escaped, with code between backticks, emphasis between asterisks and links for addresses."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    text = re.sub(r"\*(\w+)\*", r"<em>\1</em>", text)
    return re.sub(r"https?://[^\s)]*[\w/]", r'<a href="\g<0>">\g<0></a>', text)
