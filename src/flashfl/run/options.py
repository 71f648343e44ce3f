"""Settings as the command line sees them: their names, types, defaults and explanations, and their texts as values."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from ..core.errors import ConfigError

_AMOUNTS, _UNITS = ("budget", "max_bytes"), {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# What an error says instead of a type's name.
_WANTED: dict[object, str] = {
    bool: "true or false",
    tuple: "values separated by commas, without parentheses, such as 0.1,0.2",
}
Setting = tuple[tuple[str, ...], object, object]  # its path, its type and its default; MISSING: it is required


def walk(cls: type, prefix: tuple[str, ...] = (), made: object = None) -> Iterator[Setting]:
    """Every setting of a class, with the values of `made` as defaults, if it is given."""
    hints = get_type_hints(cls)
    for f in fields(cls):
        if f.metadata.get("derived"):
            continue  # worked out from other settings, not for a user to choose
        hint, path = hints[f.name], (*prefix, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if is_dataclass(made):
            default = getattr(made, f.name)
        if isinstance(hint, type) and is_dataclass(hint):
            yield from walk(hint, path, default)
        else:
            yield path, hint, default


def parse(text: str, hint: object, name: str) -> object:
    """A command-line text as the type of the field it is for."""
    if name.rpartition(".")[2] in _AMOUNTS:
        return parse_bytes(text, name)
    options = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if str in options or get_origin(hint) is Literal:
        return text
    if get_origin(hint) is tuple and not text.lstrip().startswith("["):
        text = f"[{text}]"
    if text.lower() in ("true", "false"):
        text = text.lower()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        wanted = _WANTED.get(get_origin(hint) or hint, getattr(hint, "__name__", hint))
        raise ConfigError(f"--{name} {text.strip('[]')}: expected {wanted}") from None


def parse_bytes(text: str, name: str) -> int:
    """An amount such as 2.3MB, 500 kB or 2300000, in bytes. MB = 10^6 bytes."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    unit = found[2].upper() if found else ""
    try:
        amount = float(found[1]) * _UNITS[unit] if found else math.nan
    except (ValueError, KeyError):
        amount = math.nan
    if not amount >= 0:
        raise ConfigError(f"{name} = {text!r}: expected a number of bytes, such as 2.3MB, 500kB or 2300000")
    return int(amount)


def options_of(cls: type) -> dict[str, tuple[str, object, str]]:
    """Option -> (type, default, explanation) of a method or a table of settings, for help texts."""
    said, hints = _explained(cls), get_type_hints(cls)
    out = {}
    for path, hint, default in walk(cls):
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        kind = "|".join(map(str, choices)) if choices else getattr(hint, "__name__", str(hint))
        inner = _explained(hints[path[0]]).get(path[1]) if len(path) > 1 else None
        what = inner or said.get(path[0], "")
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default  # as it is typed
        out[".".join(path)] = (kind, "required" if default is MISSING else shown, what)
    return out


def about(cls: type) -> str:
    """A class's docstring, without the paragraphs that explain its settings."""
    return "\n\n".join(text for text in _paragraphs(cls) if not _settings_in(text, cls))


def _paragraphs(cls: type) -> list[str]:
    return inspect.cleandoc(vars(cls).get("__doc__") or "").split("\n\n")


def _settings_in(paragraph: str, cls: type) -> dict[str, str]:
    """What a paragraph such as "rate: how much. first, last: the layers." says of settings; empty if it is another."""
    name = "|".join(f.name for f in fields(cls)) or "-"
    before, *pieces = re.split(rf"(?:^|\s)((?:{name})(?:, (?:{name}))*): ", " ".join(paragraph.split()))
    if before or not pieces:
        return {}
    said = [text.partition(" The other settings are ")[0] for text in pieces[1::2]]
    return {one: text for names, text in zip(pieces[::2], said, strict=True) for one in names.split(", ")}


@functools.cache
def _explained(cls: type) -> Mapping[str, str]:
    """What the docstrings of a class and its parents, or the comments behind fields, say of each field."""
    said: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        for paragraph in _paragraphs(base):
            said |= _settings_in(paragraph, base)
        found = (re.match(r"    (\w+): .*?  # (.+)", line) for line in inspect.getsource(base).splitlines())
        said |= {m[1]: m[2] for m in found if m}
    return said
