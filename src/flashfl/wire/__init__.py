"""What travels between server and clients, as bytes: near the entropy bound, and believed only when it checks out."""

from __future__ import annotations

from .codec import Coding, Encoded, Limits, Message, Parts, decode, encode, seal, size, size_with, value_key
from .errors import Distrusted, UnknownFixed, UnknownMask, WireError
from .sizes import MaskSizes, mask_sizes, rice_bits
from .tensors import fixed_hash
from .unmask import mask_from_bytes, mask_to_bytes
from .values import round_values, segments

__all__ = [
    "Coding",
    "Distrusted",
    "Encoded",
    "Limits",
    "MaskSizes",
    "Message",
    "Parts",
    "UnknownFixed",
    "UnknownMask",
    "WireError",
    "decode",
    "encode",
    "fixed_hash",
    "mask_from_bytes",
    "mask_sizes",
    "mask_to_bytes",
    "rice_bits",
    "round_values",
    "seal",
    "segments",
    "size",
    "size_with",
    "value_key",
]
