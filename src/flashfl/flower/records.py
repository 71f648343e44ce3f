"""What our messages look like inside Flower's: one blob of the wire format, or a few plain fields.

A blob travels as an array of bytes, which Flower cuts into chunks and moves in parallel. A config record would travel
in one piece. Every record is read as if a stranger had written it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from ..core.errors import FlashError

log = logging.getLogger("flwr.flashfl")
LONGEST_FIELD = 1 << 20  # characters of one text field
Field = str | int | float


class BadRecord(FlashError):
    """A reply that does not have the form it must have."""


def printable(text: str, longest: int = 500) -> str:
    """A stranger's text, safe to log, print and store: cut, and on one line without control characters."""
    cut = text[:longest] + ("..." if len(text) > longest else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def blob(name: str, data: bytes) -> RecordDict:
    """A record with one blob."""
    return RecordDict({name: ArrayRecord({"blob": to_array(data)})})


def to_array(data: bytes) -> Array:
    return Array("uint8", (len(data),), "flash.v1", data)


def read_array(array: Array, limit: int | None = None) -> bytes:
    """The bytes of an array, whatever it says that they are; BadRecord if there are more than `limit`."""
    if limit is not None and len(array.data) > limit:
        raise BadRecord(f"the reply has {len(array.data)} bytes, at most {limit} are allowed for this order")
    return bytes(array.data)


def read_blob(content: RecordDict, *names: str, limit: int | None = None) -> tuple[str, bytes]:
    """Which of the named blobs this is, and its bytes."""
    for name in names:
        record = content.get(name)
        if isinstance(record, ArrayRecord) and list(record) == ["blob"]:
            return name, read_array(record["blob"], limit)
    found = ", ".join(sorted(content)[:8]) or "nothing"
    raise BadRecord(
        f"the message holds {found}, expected {' or '.join(names)}: check that server and node have the same version "
        "of flashfl, and that the node runs its client_app"
    )


def fields(name: str, values: Mapping[str, Field]) -> RecordDict:
    """A record of plain fields."""
    return RecordDict({name: ConfigRecord(dict(values))})


def read_fields(content: RecordDict, name: str) -> dict[str, Field]:
    """The plain fields under a name; empty if there are none."""
    record = content.config_records.get(name, ConfigRecord())
    plain = {key: value for key, value in record.items() if isinstance(value, str | int | float)}
    for value in plain.values():
        if isinstance(value, str) and len(value) > LONGEST_FIELD:
            raise BadRecord(f"a text has {len(value)} characters, at most {LONGEST_FIELD} are allowed")
    return plain


def failure(content: RecordDict) -> str | None:
    """Why a client says it has nothing to send, if that is what it says."""
    why = read_fields(content, "failed").get("why")
    return None if why is None else printable(str(why))
