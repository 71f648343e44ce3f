"""Small dataclasses that travel as JSON: registered by name, read back strictly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import numbers
import types
import typing
from collections.abc import Mapping
from inspect import get_annotations
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from .errors import ConfigError, unknown

T = TypeVar("T")
_NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}  # numpy's too
_PARTS: dict[str, type] = {}


def part(cls: type[T]) -> type[T]:
    """Register a dataclass so that it can stand inside a message. Its name must be its own.

    Classes derived from `core.client.Part` are registered without this decorator.
    """
    known = _PARTS.get(cls.__name__, cls)
    if known.__module__.rpartition(".")[2] != cls.__module__.rpartition(".")[2]:  # a file may be imported twice
        raise ConfigError(f"two parts are called {cls.__name__}, one of them in {known.__module__}: rename one")
    _PARTS[cls.__name__] = cls
    return cls


def modules_of_parts() -> list[str]:
    """The modules that define the registered parts: another process knows them once it has imported these."""
    return sorted({cls.__module__ for cls in _PARTS.values()} - {"__main__"})


def check_part(value: object) -> None:
    """Refuse a part or a rule that could not travel to clients: unregistered, no dataclass, or with odd fields."""
    kind = type(value)
    if kind.__name__ not in _PARTS:
        raise ConfigError(
            f"{kind.__name__} is not registered, so clients would not know it: put @part (from flashfl.core.parts) "
            "above its @dataclass(frozen=True)"
        )
    check_dataclass(value)
    try:
        json.dumps(to_json(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{kind.__name__} has a field that cannot be sent to clients ({error}): use numbers, texts, tuples and "
            "other parts"
        ) from None


def check_dataclass(value: object) -> None:
    """Refuse an object with settings that are no fields: they would not travel, or have the parent class's values."""
    kind = type(value)
    declared = "__dataclass_fields__" in vars(kind)
    hints = {} if declared else get_annotations(kind)
    own = [name for name, hint in hints.items() if "ClassVar" not in str(hint)]
    known = {*own, *getattr(kind, "__dataclass_fields__", ())}
    rest = [name for name in getattr(value, "__dict__", ()) if name not in known]
    own += [name for name in rest if not isinstance(getattr(kind, name, None), functools.cached_property)]
    if own and declared:
        raise ConfigError(
            f"{kind.__name__} has settings that are no fields and would be lost: {', '.join(own)}. List them as "
            "fields, or compute them in a functools.cached_property"
        )
    if own:
        raise ConfigError(
            f"{kind.__name__} is not a dataclass, so its settings {', '.join(own)} would be lost: put "
            "@dataclass(frozen=True) above the class and list its settings as fields"
        )


def to_json(value: Any) -> Any:
    """Plain JSON data for a part, its fields' parts included; fields at their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if not _at_default(value, f)
        }
        return {"is": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    return value


def _at_default(value: Any, f: dataclasses.Field[Any]) -> bool:
    default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    return bool(getattr(value, f.name) == default)


def from_json(data: Any) -> Any:
    """The part that `to_json` described. Unknown names, unknown fields and wrong types are errors."""
    if not isinstance(data, dict) or not isinstance(data.get("is"), str):
        raise ConfigError(f"{str(data)[:80]}: expected a part or a rule as a table, such as {{'is': 'Multiply'}}")
    cls = _PARTS.get(data["is"])
    if cls is None:
        raise ConfigError(
            f"{unknown('part', data['is'], _PARTS)}. If it is your own, import the file that defines it, on the server "
            "and on every client."
        )
    return build(cls, {k: v for k, v in data.items() if k != "is"})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """A class's annotations as types; finding them is slow, and messages are built all the time."""
    return get_type_hints(cls)


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """A dataclass from plain values, each checked against its field's type; unknown keys name the nearest field."""
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = {f.name for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise unknown(f"setting{' in ' + where if where else ''}", name, fields)
        made[name] = coerce(value, hints[name], f"{where}.{name}" if where else name)
    try:
        return cls(**made)
    except TypeError as error:
        raise ConfigError(f"{where or cls.__name__}: {error}") from None


def coerced(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that was made in Python, each as its field's type."""
    hints = _hints(type(value))  # type: ignore[arg-type]
    return {name: coerce(getattr(value, name), hint, name) for name, hint in hints.items()}


def check_fields(value: Any) -> None:
    """Check the numbers, texts and choices of a dataclass that was made in Python. Other fields check themselves."""
    try:
        hints = _hints(type(value))  # type: ignore[arg-type]
    except NameError:  # annotations of a class defined inside a function
        return
    for f in dataclasses.fields(value):
        hint, found = hints[f.name], getattr(value, f.name)
        if dataclasses.is_dataclass(found):
            check_fields(found)
        elif not _at_default(value, f) and (hint in (int, float, str, bool) or get_origin(hint) is typing.Literal):
            coerce(found, hint, f.name)


def coerce(value: Any, hint: Any, name: str) -> Any:
    """`value` as the annotated type `hint`, or an error that says what was expected."""
    if type(value) is hint:
        return value
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(value, Mapping) and "is" in value and origin in (None, types.UnionType):
        made = from_json(value)
        if hint is Any or isinstance(made, hint):
            return made
    elif hint is Any or (value is None and type(None) in args):
        return value
    elif origin in (typing.Union, types.UnionType):
        for arg in args:
            with contextlib.suppress(ConfigError):
                return coerce(value, arg, name)
    elif origin is typing.Literal:
        if value in args:
            return value
        raise ConfigError(f"{name} = {value!r}: expected one of {', '.join(map(repr, args))}")
    elif origin is tuple and isinstance(value, tuple | list):
        return tuple(coerce(item, args[0], f"{name}[{i}]") for i, item in enumerate(value))
    elif origin is Mapping and isinstance(value, Mapping):
        key, of = args  # the keys of JSON are texts
        return {key(k): coerce(v, of, f"{name}.{k}") for k, v in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, name)  # type: ignore[arg-type]
    elif hint in _NUMBERS and isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool):
        return hint(value)
    elif isinstance(hint, type) and hint not in _NUMBERS and isinstance(value, hint):
        return value
    wanted = getattr(hint, "__name__", str(hint))
    if dataclasses.is_dataclass(hint) and (names := [f.name for f in dataclasses.fields(hint)]):
        wanted += f" (a table, in Python a dict, with any of {', '.join(names)})"
    raise ConfigError(f"{name} = {value!r}: expected {wanted}, got {type(value).__name__}")
