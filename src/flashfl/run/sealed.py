"""A checkpoint's JSON record: sealed with a digest, and signed if the user gives a key.

The digest finds damage. Whoever can write to the folder can make it right again. The signature, an HMAC with a key that
is not in the folder, finds forgery too.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigError
from ..core.files import put

FORMAT = 3
KEY = "FLASHFL_CHECKPOINT_KEY"  # the environment variable that names the file of the key
_SHORTEST = 16  # bytes of a key


class Unusable(CheckpointError):
    """A checkpoint that is damaged or has another format. The one before it may be good."""


class Unsigned(ConfigError):
    """A key was given, and it cannot be used, or the signature does not fit it. No other checkpoint is tried."""


def write_record(path: Path, content: Mapping[str, object]) -> None:
    """Write a record whole or not at all."""
    text = json.dumps({"flashfl checkpoint": FORMAT, **content})
    record = json.loads(text)
    signed = {} if (key := given_key()) is None else {"signature": _signature(record, key)}
    put(path, json.dumps({**record, "digest": digest(record), **signed}).encode(), sync=True)


def read_record(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON, if it is whole and, where a key is given, signed with it. Its tensors are not looked at."""
    try:
        record = json.loads(path.read_bytes())
        if not isinstance(record, dict) or "flashfl checkpoint" not in record:
            raise Unusable(f"{path.name} is not a flashfl checkpoint")
        if (found := record["flashfl checkpoint"]) != FORMAT:
            raise Unusable(f"{path.name} has format {found!s:.20}, and this version of flashfl reads format {FORMAT}")
        wanted, signature = record.pop("digest", None), record.pop("signature", None)
        if (key := given_key()) is not None and not hmac.compare_digest(_signature(record, key), str(signature)):
            if signature is None:
                raise Unsigned(
                    f"{path} is not signed: its run had no key. If you trust the file, resume without --checkpoint-key "
                    f"and without {KEY}. Otherwise start the run again."
                )
            raise Unsigned(
                f"{path} is signed with another key, or was changed since. Give the key of the run that wrote it, with "
                f"--checkpoint-key FILE or {KEY}, or start the run again."
            )
        if wanted != digest(record):
            raise Unusable(f"{path.name} is damaged: its content does not match its digest")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise Unusable(f"{path.name} cannot be read ({error})") from None
    return record


def digest(record: Mapping[str, object]) -> str:
    """The digest of a record's JSON text."""
    return hashlib.blake2b(json.dumps(record).encode()).hexdigest()


def _signature(record: Mapping[str, object], key: bytes) -> str:
    """An HMAC over what the digest covers; through the tensors' own digest it covers them too."""
    return hmac.new(key, json.dumps(record).encode(), hashlib.sha256).hexdigest()


def given_key() -> bytes | None:
    """The key, if the user gives one."""
    return _read_key(path) if (path := os.environ.get(KEY)) else None


@functools.lru_cache(1)
def _read_key(path: str) -> bytes:
    try:
        key = Path(path).read_bytes()
    except OSError as error:
        raise Unsigned(f"the checkpoint key {path} cannot be read ({error.strerror})") from None
    if len(key) < _SHORTEST:
        raise Unsigned(
            f"the checkpoint key {path} has {len(key)} bytes, and at least {_SHORTEST} are needed: make one with "
            f"openssl rand -hex 32 > {path}"
        )
    return key
