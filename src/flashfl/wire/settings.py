"""The client's settings as JSON and its metrics: bounded, canonical, no surprises."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..core import parts
from ..core.exchange import Local
from .errors import BadCount, BadField, BadOrder, NonFinite, TooLarge
from .reader import Reader, name_bytes

_F64 = struct.Struct("<d")


@dataclass(frozen=True)
class Limits:
    """What a receiver is willing to handle; each is checked before anything of that size is made."""

    message: int = 1 << 31  # bytes of a whole message
    json: int = 1 << 16  # bytes of the client's settings
    depth: int = 8  # nesting of the client's settings
    metrics: int = 64
    extras: int = 64
    elements: int = 1 << 28  # of one extra tensor
    recipes: bool = True  # masks in a few bytes that cost a model's size to make


@lru_cache(maxsize=64)
def local_bytes(local: Local) -> bytes:
    """The settings as canonical JSON: sorted keys, no spaces, values as their types say, defaults left out."""
    plain = parts.to_json(parts.from_json(parts.to_json(local)))
    try:
        return _dump(plain)
    except ValueError as error:
        raise NonFinite(f"the client's settings hold {error}") from None


def _dump(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def read_local(reader: Reader, limits: Limits) -> Local:
    """Only what `local_bytes` could have written is accepted."""
    if reader.left > limits.json:
        raise TooLarge(f"{reader.left} bytes of settings, at most {limits.json} allowed")
    raw = bytes(reader.take(reader.left))
    _check_depth(raw, limits.depth)
    try:
        local = parts.from_json(json.loads(raw))
        canonical = isinstance(local, Local) and local_bytes(local) == raw
    except Exception as error:  # whatever a stranger's settings provoke in a part's own checks
        raise BadField(f"the client's settings cannot be read: {error}") from None
    if not canonical:
        raise BadField("the client's settings are not in canonical form")
    assert isinstance(local, Local)
    return local


def _check_depth(raw: bytes, most: int) -> None:
    """Brackets inside strings count too: names have none."""
    depth = 0
    for byte in raw:
        depth += (byte in b"[{") - (byte in b"]}")
        if depth > most:
            raise TooLarge(f"the client's settings are nested deeper than {most}")


def metrics_bytes(metrics: Mapping[str, float]) -> bytes:
    out = [bytes([len(metrics)])] if len(metrics) < 256 else refuse(f"{len(metrics)} metrics")
    for name in sorted(metrics):
        value = float(metrics[name])
        if not math.isfinite(value):
            raise NonFinite(f"the metric {name!r} is {value}")
        out += [name_bytes(name), _F64.pack(value)]
    return b"".join(out)


def refuse(what: str) -> list[bytes]:
    raise TooLarge(f"{what} in one message, at most 255 can travel")


def read_metrics(reader: Reader, limits: Limits) -> dict[str, float]:
    count = read_count(reader, limits.metrics, "metrics")
    out: dict[str, float] = {}
    for _ in range(count):
        name = next_name(reader, out)
        (value,) = reader.unpack(_F64)
        if not math.isfinite(value):
            raise NonFinite(f"the metric {name!r} is {value}")
        out[name] = value
    reader.end()
    return out


def read_count(reader: Reader, most: int, what: str) -> int:
    count = reader.u8()
    if count == 0:
        raise BadCount(f"an empty section of {what}")
    if count > most:
        raise TooLarge(f"{count} {what}, at most {most} allowed")
    return count


def next_name(reader: Reader, seen: Collection[str]) -> str:
    """A name above all names before it."""
    name = reader.name()
    if seen and name <= max(seen):
        raise BadOrder(f"{reader.what}: the name {name!r} is repeated or out of order")
    return name
