"""One self-contained page: data, style and script in one file that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

_SCRIPTS = ("draw.js", "charts.js", "page.js", "table.js")


@cache
def _piece(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def page(data: Mapping[str, Any]) -> str:
    """The page that shows this data."""
    script = "\n".join(_piece(name) for name in _SCRIPTS)
    head, rest = _piece("page.html").split("/*STYLE*/")
    middle, rest = rest.split("/*DATA*/")
    before, after = rest.split("/*SCRIPT*/")
    return "".join([head, _piece("style.css"), middle, script_json(data), before, script, after])


def script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in; numbers that JSON does not know become null."""
    text = json.dumps(clean(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def clean(value: Any) -> Any:
    """The same data without infinities and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value
