"""The one family of errors that speak to the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlashError(Exception):
    """Something the user can mend: the message says what was given, what is allowed, what to do."""


class ConfigError(FlashError):
    """A value or a name in a configuration is not usable."""


class DataError(FlashError):
    """A data file is missing or damaged."""


class CheckpointError(FlashError):
    """A checkpoint cannot be used."""


class RunStopped(FlashError):
    """A run cannot go on; what it had earned is kept."""


def unknown(what: str, given: str, known: Iterable[str]) -> ConfigError:
    """An error for a name nobody knows, naming the nearest one somebody does."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near and len(names) > 12 else f"known: {', '.join(names)}"
    if near and len(names) <= 12:
        hint = f"did you mean {near[0]!r}? {hint}"
    return ConfigError(f"unknown {what} {given!r}: {hint}")
