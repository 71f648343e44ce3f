"""Messages between server and clients as bytes: close to the entropy bound, and checked strictly when read."""

from __future__ import annotations

from .codec import decode, encode, size_with
from .errors import Distrusted, UnknownMask, WireError
from .feedback import Feedback
from .frame import seal
from .masks import mask_from_bytes, mask_to_bytes
from .message import Encoded, Message, value_key
from .reader import Limits
from .sizes import mask_sizes
from .values import round_values, segments

__all__ = [
    "Distrusted",
    "Encoded",
    "Feedback",
    "Limits",
    "Message",
    "UnknownMask",
    "WireError",
    "decode",
    "encode",
    "mask_from_bytes",
    "mask_sizes",
    "mask_to_bytes",
    "round_values",
    "seal",
    "segments",
    "size_with",
    "value_key",
]
