"""What travels by name: metrics, and extra tensors in their declared forms."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..core.exchange import Extra
from .errors import BadCount, BadField, NonFinite, TooLarge
from .reader import Limits, Piece, Reader, byte_length, name_bytes

DTYPES: dict[torch.dtype, str] = {  # the place in this list is the type's code
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.uint8: "|u1",
}
FORMS = ("masked", "dense", "bits", "scalar")  # the place in this list is the form's code
_F64 = struct.Struct("<d")
_MOST = 255  # items in one section


def _number_of(items: Mapping[str, object], what: str) -> bytes:
    if len(items) > _MOST:
        raise TooLarge(f"{len(items)} {what} in one message, at most {_MOST} can be sent")
    return bytes([len(items)])


def metrics_bytes(metrics: Mapping[str, float]) -> bytes:
    out = [_number_of(metrics, "metrics")]
    for name in sorted(metrics):
        out += [name_bytes(name), _F64.pack(_finite(name, float(metrics[name])))]
    return b"".join(out)


def read_metrics(reader: Reader, limits: Limits) -> dict[str, float]:
    out: dict[str, float] = {}
    for _ in range(reader.count(limits.metrics, "metrics")):
        name = reader.name(out)
        (value,) = reader.unpack(_F64)
        out[name] = _finite(name, value)
    reader.end()
    return out


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise NonFinite(f"the metric {name!r} is {value}; it must be finite")
    return value


def extras_pieces(extras: Mapping[str, Extra], active: int | None) -> list[Piece]:
    """The number of tensors, then a piece of head and a piece of data for each. `active`: weights in the mask."""
    out = [Piece.of(_number_of(extras, "extras"))]
    for name in sorted(extras):
        form = extras[name].form
        pieces = _bits_pieces(extras[name].value) if form == "bits" else _number_pieces(name, extras[name], active)
        out += [Piece.of(name_bytes(name) + bytes([FORMS.index(form)])), *pieces]
    return out


def _bits_pieces(value: Tensor) -> list[Piece]:
    def write() -> tuple[bytes]:
        return (np.packbits(value.to("cpu", torch.bool).flatten().numpy(), bitorder="little").tobytes(),)

    return [Piece.of(value.numel().to_bytes(4, "little")), Piece(byte_length(value.numel()), write)]


def _number_pieces(name: str, extra: Extra, active: int | None) -> list[Piece]:
    form, value = extra.form, extra.value
    if value.dtype not in DTYPES:
        raise BadField(f"the extra {name!r} is {value.dtype}; allowed are {', '.join(map(str, DTYPES))}")
    head = bytes([list(DTYPES).index(value.dtype)])
    if form == "masked":
        if active is None or tuple(value.shape) != (active,):
            raise BadCount(f"the extra {name!r} has shape {tuple(value.shape)}, the mask has {active} active weights")
    elif form == "scalar":
        if value.dim() != 0:
            raise BadField(f"the extra {name!r} is a scalar of shape {tuple(value.shape)}; it must have none")
    else:
        head += bytes([value.dim()]) + b"".join(size.to_bytes(4, "little") for size in value.shape)

    def write() -> tuple[bytes]:
        plain = value.detach().cpu()
        _check_finite(name, plain)
        return (plain.contiguous().numpy().astype(DTYPES[value.dtype], copy=False).tobytes(),)

    return [Piece.of(head), Piece(value.numel() * value.element_size(), write)]


def _check_finite(name: str, value: Tensor) -> None:
    if not bool(torch.isfinite(value).all()):
        raise NonFinite(f"the extra {name!r} holds an infinity or a not-a-number")


def read_extras(reader: Reader, limits: Limits, active: int | None) -> dict[str, Extra]:
    out: dict[str, Extra] = {}
    for _ in range(reader.count(limits.extras, "extras")):
        name, code = reader.name(out), reader.u8()
        if code >= len(FORMS):
            raise BadField(f"the extra {name!r} has form {code}; the forms are 0 to {len(FORMS) - 1}")
        if FORMS[code] == "bits":
            out[name] = Extra("bits", _read_bits(reader, limits, name))
        elif FORMS[code] == "masked":
            if active is None:
                raise BadField(f"the extra {name!r} is masked, but the message has no mask")
            out[name] = Extra("masked", _read_tensor(reader, limits, name, (active,)))
        elif FORMS[code] == "scalar":
            out[name] = Extra("scalar", _read_tensor(reader, limits, name, ()))
        else:
            out[name] = Extra("dense", _read_tensor(reader, limits, name, None))
    reader.end()
    return out


def _read_bits(reader: Reader, limits: Limits, name: str) -> Tensor:
    count = reader.u32()
    if count > limits.elements:
        raise TooLarge(f"the extra {name!r} has {count} bits, at most {limits.elements} are accepted here")
    return torch.from_numpy(reader.bits(count).view(bool))


def _read_tensor(reader: Reader, limits: Limits, name: str, shape: tuple[int, ...] | None) -> Tensor:
    """A type code, a shape unless it is known, the numbers."""
    code = reader.u8()
    if code >= len(DTYPES):
        raise BadField(f"the extra {name!r} has type {code}; the types are 0 to {len(DTYPES) - 1}")
    if shape is None:
        rank = reader.u8()
        if rank > 8:
            raise BadField(f"the extra {name!r} has {rank} dimensions, at most 8 are allowed")
        shape = tuple(reader.u32() for _ in range(rank))
    if math.prod(max(1, size) for size in shape) > limits.elements:
        raise TooLarge(f"the extra {name!r} has shape {shape}, at most {limits.elements} elements are accepted here")
    value = torch.from_numpy(reader.array(list(DTYPES.values())[code], math.prod(shape))).reshape(shape)
    _check_finite(name, value)
    return value
