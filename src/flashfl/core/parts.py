"""Small dataclasses that travel as JSON: registered by name, read back strictly."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from .errors import ConfigError, unknown

T = TypeVar("T")
_PARTS: dict[str, type] = {}


def part(cls: type[T]) -> type[T]:
    """Register a dataclass so that it can stand inside a message."""
    _PARTS[cls.__name__] = cls
    return cls


def modules_of_parts() -> list[str]:
    """The modules that define the registered parts: another process knows them once it has imported these."""
    return sorted({cls.__module__ for cls in _PARTS.values()} - {"__main__"})


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
    if f.default is not dataclasses.MISSING:
        return bool(getattr(value, f.name) == f.default)
    return f.default_factory is not dataclasses.MISSING and bool(getattr(value, f.name) == f.default_factory())


def from_json(data: Any) -> Any:
    """The part that `to_json` described. Unknown names, unknown fields and wrong types are errors."""
    if not isinstance(data, dict) or not isinstance(data.get("is"), str):
        raise ConfigError(f"not the description of a part: {str(data)[:80]}")
    cls = _PARTS.get(data["is"])
    if cls is None:
        raise ConfigError(
            f"{unknown('part', data['is'], _PARTS)}. A rule of one's own has to be imported wherever clients train"
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


_PLAIN: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real, str: str, bool: bool}


def check_fields(value: Any) -> None:
    """An error if a field of this dataclass, made in Python where nothing checks it, is not of its type or none of
    its choices. Fields of other types are its own business."""
    try:
        hints = get_type_hints(type(value))
    except Exception:  # a class whose annotations mean nothing here
        return
    for f in dataclasses.fields(value):
        hint, found = hints[f.name], getattr(value, f.name)
        if _at_default(value, f):
            continue
        if get_origin(hint) is typing.Literal:
            coerce(found, hint, f.name)
        elif hint in _PLAIN and (not isinstance(found, _PLAIN[hint]) or (hint is not bool and isinstance(found, bool))):
            raise ConfigError(f"{f.name} = {found!r}: expected {hint.__name__}, got {type(found).__name__}")
        elif dataclasses.is_dataclass(found) and not isinstance(found, type):
            check_fields(found)


def coerce(value: Any, hint: Any, name: str) -> Any:
    """`value` as the annotated type `hint`, or an error that says what was expected."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return from_json(value) if isinstance(value, dict) and "is" in value else value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, hint, args, name)
    if origin is typing.Literal:
        if value in args:
            return value
        raise ConfigError(f"{name} = {value!r}: expected one of {', '.join(map(repr, args))}")
    if origin in (tuple, list) and isinstance(value, tuple | list):
        each = args[0] if args else Any
        return tuple(coerce(item, each, f"{name}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping) or hint is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif isinstance(hint, type):
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            return from_json(value) if "is" in value else build(hint, value, name)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, hint) and not (hint in (int, float) and isinstance(value, bool)):
            return value
    wanted = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{name} = {value!r}: expected {wanted}, got {type(value).__name__}")


def _coerce_union(value: Any, hint: Any, args: tuple[Any, ...], name: str) -> Any:
    if value is None and type(None) in args:
        return None
    if isinstance(value, dict) and "is" in value:
        return from_json(value)
    for arg in args:
        try:
            return coerce(value, arg, name)
        except ConfigError:
            continue
    raise ConfigError(f"{name} = {value!r}: expected {hint}, got {type(value).__name__}")
