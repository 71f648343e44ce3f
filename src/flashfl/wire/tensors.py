"""Extra tensors by their declared form, and fixed tensors: sent once, then by hash."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from ..core.exchange import Extra
from ..core.layout import Layout
from .errors import BadCount, BadField, BadLength, NonFinite, TooLarge, UnknownFixed
from .reader import Array, Chunk, Piece, Reader, byte_length, name_bytes
from .settings import Limits, next_name, read_count, refuse

DTYPES: tuple[tuple[str, torch.dtype], ...] = (
    ("<f4", torch.float32),
    ("<f8", torch.float64),
    ("<i4", torch.int32),
    ("<i8", torch.int64),
    ("|u1", torch.uint8),
)
EXTRA_FORMS = ("masked", "dense", "bits", "scalar")


def extras_pieces(extras: Mapping[str, Extra], active: int | None) -> list[Piece]:
    """One piece of head and one of data for each tensor, after the number of tensors."""
    out = [Piece.of(b"".join([bytes([len(extras)])] if len(extras) < 256 else refuse(f"{len(extras)} extras")))]
    for name in sorted(extras):
        form, value = extras[name].form, extras[name].value
        if form == "bits":
            value = value.flatten()
            head = value.numel().to_bytes(4, "little")
            data = Piece(byte_length(value.numel()), lambda value=value: (_bits(value),))  # type: ignore[misc]
        else:
            code = [dtype for _, dtype in DTYPES].index(_dtype(name, value))
            if form == "masked" and (active is None or tuple(value.shape) != (active,)):
                raise BadCount(
                    f"the extra {name!r} has shape {tuple(value.shape)}, the mask has {active} active weights"
                )
            if form == "scalar" and value.dim() != 0:
                raise BadField(f"the extra {name!r} is a scalar of shape {tuple(value.shape)}")
            shape = b"".join(size.to_bytes(4, "little") for size in value.shape) if form == "dense" else b""
            head = bytes([code]) + (bytes([value.dim()]) + shape if form == "dense" else b"")
            data = Piece(
                value.numel() * value.element_size(),
                lambda name=name, value=value, code=code: (_plain(name, value, code),),  # type: ignore[misc]
            )
        out += [Piece.of(name_bytes(name) + bytes([EXTRA_FORMS.index(form)]) + head), data]
    return out


def _dtype(name: str, value: Tensor) -> torch.dtype:
    if value.dtype not in [dtype for _, dtype in DTYPES]:
        raise BadField(f"the tensor {name!r} is {value.dtype}: allowed are {', '.join(str(d) for _, d in DTYPES)}")
    return value.dtype


def _bits(value: Tensor) -> bytes:
    return np.packbits(value.to("cpu", torch.bool).numpy(), bitorder="little").tobytes()


def _plain(name: str, value: Tensor, code: int) -> bytes:
    array = value.detach().cpu().contiguous().numpy().astype(DTYPES[code][0], copy=False)
    _check_finite(name, array)
    return array.tobytes()


def _check_finite(name: str, array: Array) -> None:
    if not np.isfinite(array).all():
        raise NonFinite(f"the tensor {name!r} holds an infinity or a not-a-number")


def read_extras(reader: Reader, limits: Limits, active: int | None) -> dict[str, Extra]:
    out: dict[str, Extra] = {}
    for _ in range(read_count(reader, limits.extras, "extras")):
        name = next_name(reader, out)
        code = reader.u8()
        if code >= len(EXTRA_FORMS):
            raise BadField(f"the extra {name!r} has the unknown form {code}")
        if EXTRA_FORMS[code] == "bits":
            out[name] = Extra("bits", _read_bits(reader, limits, name))
        elif EXTRA_FORMS[code] == "masked":
            if active is None:
                raise BadField(f"the extra {name!r} needs a mask and there is none")
            out[name] = Extra("masked", _read_tensor(reader, limits, name, (active,)))
        elif EXTRA_FORMS[code] == "scalar":
            out[name] = Extra("scalar", _read_tensor(reader, limits, name, ()))
        else:
            out[name] = Extra("dense", _read_tensor(reader, limits, name, None))
    reader.end()
    return out


def _read_bits(reader: Reader, limits: Limits, name: str) -> Tensor:
    count = reader.u32()
    if count > limits.elements:
        raise TooLarge(f"the extra {name!r} has {count} bits, at most {limits.elements} allowed")
    bits = np.unpackbits(np.frombuffer(reader.take(byte_length(count)), np.uint8), bitorder="little")
    if bits[count:].any():
        raise BadField("padding bits are not zero")
    return torch.from_numpy(bits[:count].astype(bool))


def _read_tensor(reader: Reader, limits: Limits, name: str, shape: tuple[int, ...] | None) -> Tensor:
    """A dtype code, a shape unless it is known, the numbers."""
    code = reader.u8()
    if code >= len(DTYPES):
        raise BadField(f"the tensor {name!r} has the unknown type {code}")
    if shape is None:
        rank = reader.u8()
        if rank > 8:
            raise BadField(f"the tensor {name!r} has {rank} dimensions")
        shape = tuple(reader.u32() for _ in range(rank))
    count = math.prod(shape)
    if math.prod(max(1, size) for size in shape) > limits.elements:
        raise TooLarge(f"the tensor {name!r} has {count} elements, at most {limits.elements} allowed")
    array = reader.array(DTYPES[code][0], count)
    _check_finite(name, array)
    return torch.from_numpy(array).reshape(shape)


def fixed_hash(value: Tensor) -> str:
    """16 hex digits over a fixed tensor's numbers."""
    return hashlib.blake2b(value.detach().cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def fixed_pieces(fixed: Mapping[str, Tensor], layout: Layout, held: Collection[str]) -> list[Piece]:
    """Every fixed tensor, in the layout's order: its hash, and its numbers unless the other side holds them."""
    layers = layout.of_kind("fixed")
    if {layer.name for layer in layers} != set(fixed):
        raise BadField(f"fixed tensors {sorted(fixed)} given, the layout has {sorted(x.name for x in layers)}")
    out: list[Piece] = []
    for layer in layers:
        value, name = fixed[layer.name], fixed_hash(fixed[layer.name])
        if tuple(value.shape) != layer.shape:
            raise BadField(f"the fixed tensor {layer.name!r} has shape {tuple(value.shape)}, not {layer.shape}")
        code = [dtype for _, dtype in DTYPES].index(_dtype(layer.name, value))
        if name in held:
            out.append(Piece.of(b"\0" + bytes.fromhex(name)))
            continue
        size = value.numel() * value.element_size()

        def write(name: str = layer.name, value: Tensor = value, code: int = code) -> tuple[Chunk, ...]:
            return (_plain(name, value, code),)

        out += [Piece.of(bytes([1, code])), Piece(size, write)]
    return out


def read_fixed(
    reader: Reader, layout: Layout, limits: Limits, known: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The fixed tensors by name, and the hashes of those that were only named."""
    out: dict[str, Tensor] = {}
    held: list[str] = []
    sent: list[str] = []
    for layer in layout.of_kind("fixed"):
        code = reader.u8()
        if code == 1:
            out[layer.name] = _read_tensor(reader, limits, layer.name, layer.shape)
            sent.append(layer.name)
            continue
        if code != 0:
            raise BadField(f"the fixed tensor {layer.name!r} is neither sent nor named")
        name = reader.hash()
        if name not in known:
            raise UnknownFixed(layer.name, name)
        if tuple(known[name].shape) != layer.shape:
            raise BadLength(f"the fixed tensor {layer.name!r} is not of shape {layer.shape}")
        out[layer.name] = known[name]
        held.append(name)
    reader.end()
    if held and any(fixed_hash(out[name]) in held for name in sent):
        raise BadField("a fixed tensor is sent, and named elsewhere in the message")
    return out, tuple(held)
