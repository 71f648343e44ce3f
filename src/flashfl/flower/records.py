"""What our messages look like inside Flower's: one blob of the wire format, or a few plain fields.

A blob travels as an array of bytes, which Flower cuts into chunks and moves in parallel; a config record would go in
one piece. Whoever reads a record treats it as written by a stranger.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from ..core.errors import FlashError

STYPE = "flash.v1"
Field = str | int | float


class BadRecord(FlashError):
    """A reply that does not have the form it must have."""


def blob(name: str, data: bytes) -> RecordDict:
    """A record with one blob."""
    return RecordDict({name: ArrayRecord({"blob": to_array(data)})})


def to_array(data: bytes) -> Array:
    return Array("uint8", (len(data),), STYPE, data)


def read_array(array: Array) -> bytes:
    """The bytes of an array that `to_array` made."""
    if array.stype != STYPE or array.dtype != "uint8" or tuple(array.shape) != (len(array.data),):
        raise BadRecord(f"an array of type {array.dtype}, {array.stype} where bytes were expected")
    return bytes(array.data)


def read_blob(content: RecordDict, *names: str) -> tuple[str, bytes]:
    """Which of the named blobs this is, and its bytes."""
    for name in names:
        record = content.get(name)
        if isinstance(record, ArrayRecord) and list(record) == ["blob"]:
            return name, read_array(record["blob"])
    raise BadRecord(f"a record with {', '.join(sorted(content)) or 'nothing'} where {' or '.join(names)} was expected")


def fields(name: str, values: Mapping[str, Field]) -> RecordDict:
    """A record of plain fields."""
    return RecordDict({name: ConfigRecord(dict(values))})


def read_fields(content: RecordDict, name: str) -> dict[str, Field]:
    """The plain fields under a name; empty if there are none."""
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        return {}
    return {key: value for key, value in record.items() if isinstance(value, str | int | float)}


def failure(content: RecordDict) -> str | None:
    """Why a client says it has nothing to send, if that is what it says."""
    why = read_fields(content, "failed").get("why")
    return None if why is None else str(why)[:300]
