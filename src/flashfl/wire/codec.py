"""Messages to bytes and back, as FORMAT.md describes; nothing here builds a dense vector."""

from __future__ import annotations

from .decoder import decode
from .encoder import encode, size, size_with
from .frame import seal
from .message import Coding, Encoded, Message, Parts, value_key
from .settings import Limits

__all__ = [
    "Coding",
    "Encoded",
    "Limits",
    "Message",
    "Parts",
    "decode",
    "encode",
    "seal",
    "size",
    "size_with",
    "value_key",
]
