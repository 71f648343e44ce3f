"""The client's settings as JSON: bounded, and in one canonical text."""

from __future__ import annotations

import json

from ..core import parts
from ..core.exchange import Local
from ..core.layout import Layout
from .errors import BadField, NonFinite, TooLarge
from .masks import check_recipe
from .reader import Limits, Reader


def local_bytes(local: Local, layout: Layout) -> bytes:
    """The settings as canonical JSON: sorted keys, no spaces, numbers as their fields' types, defaults left out.

    Nothing is remembered from one call to the next: settings that compare equal (1 and True, 0.0 and -0.0) may have
    different texts.
    """
    if local.start is not None:
        check_recipe(local.start, layout)
    plain = parts.to_json(parts.from_json(parts.to_json(local)))
    try:
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except ValueError as error:
        raise NonFinite(f"the training settings hold an infinity or a not-a-number: {error}") from None


def read_local(reader: Reader, layout: Layout, limits: Limits) -> Local:
    """Only what `local_bytes` could have written is accepted."""
    if reader.left > limits.json:
        raise TooLarge(
            f"the training settings in the message, with their parts, take {reader.left} bytes, at most {limits.json} "
            "are allowed. Keep the fields of parts small, and send tensors with the method's `download`."
        )
    raw = bytes(reader.take(reader.left))
    _check_depth(raw, limits.depth)
    try:
        local = parts.from_json(json.loads(raw))
        canonical = isinstance(local, Local) and local_bytes(local, layout) == raw
    except Exception as error:  # a stranger's settings may fail in any way inside a part's own checks
        raise BadField(f"the training settings in the message cannot be read: {error}") from None
    if not canonical:
        raise BadField(
            "the training settings in the message are not in canonical form (flashfl/wire/FORMAT.md). Most likely the "
            "sender has another version of flashfl or of a custom part: install the same on both sides."
        )
    assert isinstance(local, Local)
    return local


def _check_depth(raw: bytes, most: int) -> None:
    """Brackets inside strings count too: names have none."""
    depth = 0
    for byte in raw:
        depth += (byte in b"[{") - (byte in b"]}")
        if depth > most:
            raise TooLarge(f"the training settings in the message are nested deeper than {most} levels")
