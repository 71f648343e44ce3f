"""Settings as the command line sees them: names, types, defaults, explanations, and the commands that list them."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from ..core.errors import ConfigError

DIGITS_DENSITY = 0.02  # of runs of the embedded digits, which need no configuration file
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


def flag_of(option: str) -> str:
    """A setting as it is typed on the command line."""
    return f"--{option.replace('_', '-')}"


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
        raise ConfigError(f"--{name} {text.strip('[]') or '(empty)'}: expected {wanted}") from None


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


def add_listings(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the commands to a command line. Returns `methods`, which shares options with others."""
    methods = add("methods", _methods, "list every method with its settings and defaults, or describe one method")
    methods.add_argument("name", nargs="?", default="", metavar="NAME", help="describe this method only")
    add("settings", _settings, "list every setting of training and tasks with its default")
    return methods


def _methods(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from ..methods import METHODS

    if args.name:
        _describe(args.name, "".join(f" --load {file}" for file in args.load))
        return 0
    for name, cls in METHODS.items():
        print(f"{name}\n{textwrap.indent(about(cls), '  ')}")
        _print_options(cls)
    print("`flashfl methods NAME` describes one method, what its settings mean, and how to run it.")
    return 0


def _describe(name: str, load: str) -> None:
    """One method: its description, its settings with defaults and meanings, and a command that runs it."""
    from .config import known_method

    cls = known_method(name)
    print(f"{name}\n{textwrap.indent(about(cls), '  ')}\n\n  Settings, with defaults:")
    _print_options(cls)
    if cls.recipe:
        recipe = " ".join(f"{flag_of(key)} {value}" for key, value in cls.recipe.items())
        print(f"  Unless you set them yourself, its runs have:\n    {recipe}\n")
    words = [f"flashfl run{load} --method {name}"]
    for option, (_, default, _) in options_of(cls).items():
        if default == "required" or option == "density":
            words.append(f"{flag_of(option)} {'VALUE' if default == 'required' else default}")
    print(f"  Example:\n    {' '.join(words)}")


def _settings(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    from ..data.tasks import TaskConfig
    from .config import TrainConfig

    for title, cls in (("training", TrainConfig), ("task", TaskConfig)):
        print(title)
        _print_options(cls)
    return 0


def _print_options(cls: type) -> None:
    """Every setting with its default, its type and what it means."""
    for option, (kind, default, said) in options_of(cls).items():
        digits = f"; {DIGITS_DENSITY} without a configuration file" if option == "density" else ""
        print(f"    {flag_of(option)} {default if default != '' else repr('')}  ({kind}{digits})")
        if said:
            print(textwrap.fill(said, 100, initial_indent=" " * 8, subsequent_indent=" " * 8))
    print()
