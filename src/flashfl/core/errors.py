"""The one family of errors that speak to the user."""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import sys
import warnings
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from types import CodeType
from typing import Any

_PACKAGE = str(Path(__file__).parents[1])


class FlashError(Exception):
    """Something the user can fix. The message says what was given, what is allowed, what to do."""


class ConfigError(FlashError):
    """A value or a name in a configuration is not usable."""


class DataError(FlashError):
    """A data file is missing or damaged."""


class CheckpointError(FlashError):
    """A checkpoint cannot be used."""


class RunStopped(FlashError):
    """A run cannot continue. Its finished rounds are kept."""


def unknown(what: str, given: str, known: Iterable[str]) -> ConfigError:
    """An error for an unknown name that suggests the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    hints = [f"did you mean {near[0]!r}?"] if near else []
    hints += [f"known: {', '.join(names)}"] if len(names) <= 12 or not near else []
    return ConfigError(f"unknown {what} {given!r}: {' '.join(hints)}")


def check_range(allowed: str, hint: str = "", **values: object) -> None:
    """Refuse values outside an interval, written as in mathematics: "[0, 1)", or "[1, inf)" without a largest value.

    A value that is no number, or NaN, lies outside every interval. `hint` is added to the message.
    """
    low, high = (float(end) for end in allowed[1:-1].split(","))
    for name, value in values.items():
        number: Any = value if isinstance(value, Real) else math.nan
        above = number >= low if allowed[0] == "[" else number > low
        below = number <= high if allowed[-1] == "]" else number < high
        if not (above and below):
            least = f"{'at least' if allowed[0] == '[' else 'above'} {low:.10g}"
            most = f" and {'at most' if allowed[-1] == ']' else 'below'} {high:.10g}" if high < math.inf else ""
            kind = "" if abs(number) < math.inf else "a finite number, "
            raise ConfigError(f"{name} = {value!r}: must be {kind}{least}{most}{'. ' + hint if hint else ''}")


def _inside(code: CodeType) -> bool:
    """Whether this is our code, or what Python puts between it and the user's: cached properties, made __init__s."""
    made = code.co_filename == "<string>" and code.co_name == "__init__"
    return made or code.co_filename.startswith((_PACKAGE, functools.__file__, contextlib.__file__))


def warn(message: str) -> None:
    """Warn the user, pointing at the line outside this package that led here."""
    level, frame = 2, sys._getframe(1)
    while _inside(frame.f_code) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)
