"""What travels by name: metrics, and extra tensors in their declared forms."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ..core.client import Form
from ..core.exchange import Extra
from . import rice
from .errors import BadCount, BadField, NonFinite, TooLarge
from .reader import Chunk, Limits, Reader, byte_length, name_bytes, pack

DTYPES: dict[torch.dtype, str] = {  # the place in this list is the type's code
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.uint8: "|u1",
}
FORMS: tuple[Form, ...] = ("masked", "dense", "bits", "scalar", "indices")  # the place in this list is the form's code
_F64, _NUMBER = struct.Struct("<d"), struct.Struct("<B")
_OURS = Limits(extras=255, elements=1 << 32)  # for what this side wrote itself: all that the format can hold


def metrics_bytes(metrics: Mapping[str, float]) -> bytes:
    out = [pack(_NUMBER, len(metrics))]
    for name in sorted(metrics):
        out += [name_bytes(name), _F64.pack(_finite(name, float(metrics[name])))]
    return b"".join(out)


def read_metrics(reader: Reader, limits: Limits) -> dict[str, float]:
    out: dict[str, float] = {}
    for _ in range(reader.count(limits.metrics, "metrics")):
        name = reader.name(out)
        (value,) = reader.unpack(_F64)
        out[name] = _finite(name, value)
    return out


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise NonFinite(f"the metric {name!r} is {value}; it must be finite")
    return value


def extras_chunks(extras: Mapping[str, Extra], active: int | None) -> list[Chunk]:
    """The number of tensors, then each. `active`: weights in the mask."""
    if len(extras) > 255:
        raise BadField(f"the message has {len(extras)} extra tensors, at most 255 can be sent. Put several into one.")
    out: list[Chunk] = [pack(_NUMBER, len(extras))]
    for name in sorted(extras):
        extra = extras[name]
        body = _bits_bytes(extra) if extra.form in ("bits", "indices") else _number_bytes(name, extra, active)
        out += [name_bytes(name), bytes([FORMS.index(extra.form)]), body]
    return out


def notes_to_bytes(notes: Mapping[str, Extra]) -> bytes:
    """What a client remembers, as it is stored: in the form of extras."""
    return b"".join(extras_chunks(notes, None))


def notes_from_bytes(data: bytes) -> dict[str, Extra]:
    reader = Reader(memoryview(data), "notes")
    found = read_extras(reader, _OURS, None)
    reader.end()
    return found


def _bits_bytes(extra: Extra) -> bytes:
    """The length, and the bits; or how many are set, and their positions as one Rice-coded list."""
    bits = extra.value.to("cpu", torch.bool).flatten().numpy()
    length = len(bits).to_bytes(4, "little")
    if extra.form == "bits":
        return length + np.packbits(bits, bitorder="little").tobytes()
    held = rice.Coded.of(bits)
    return length + held.count.to_bytes(4, "little") + rice.write([held])


def extras_size(extras: Mapping[str, Extra]) -> int:
    """The length of `extras_chunks`, in closed form: only positions are looked at, and only of the form indices."""
    total = 1
    for name, extra in extras.items():
        count = extra.value.numel()
        total += 1 + len(name) + 1
        if extra.form == "bits":
            total += 4 + byte_length(count)
        elif extra.form == "indices":
            total += len(_bits_bytes(extra))
        else:
            shape = 1 + 4 * extra.value.dim() if extra.form == "dense" else 0
            total += 1 + shape + count * extra.value.element_size()
    return total


def _number_bytes(name: str, extra: Extra, active: int | None) -> bytes:
    value = extra.value.detach().cpu()
    if value.dtype not in DTYPES:
        raise BadField(f"the extra {name!r} is {value.dtype}; allowed are {', '.join(map(str, DTYPES))}")
    head = bytes([list(DTYPES).index(value.dtype)])
    shape = (active,) if extra.form == "masked" else ()
    if extra.form == "dense":
        head += bytes([value.dim()]) + b"".join(size.to_bytes(4, "little") for size in value.shape)
    elif tuple(value.shape) != shape:
        raise BadCount(f"the extra {name!r} is {extra.form} and has shape {tuple(value.shape)}; it must have {shape}")
    _check_finite(name, value)
    return head + value.contiguous().numpy().astype(DTYPES[value.dtype], copy=False).tobytes()


def _check_finite(name: str, value: Tensor) -> None:
    if not bool(torch.isfinite(value).all()):
        raise NonFinite(f"the extra {name!r} holds an infinity or a not-a-number")


def read_extras(reader: Reader, limits: Limits, active: int | None) -> dict[str, Extra]:
    out: dict[str, Extra] = {}
    for _ in range(reader.count(limits.extras, "extras")):
        name, code = reader.name(out), reader.number(1)
        if code >= len(FORMS):
            raise BadField(f"the extra {name!r} has form {code}; the forms are 0 to {len(FORMS) - 1}")
        form = FORMS[code]
        if form == "masked" and active is None:
            raise BadField(f"the extra {name!r} is masked, but the message has no mask")
        shape = {"masked": (active or 0,), "scalar": ()}.get(form)
        if form in ("bits", "indices"):
            value = _read_bits(reader, limits, name, form)
        else:
            value = _read_tensor(reader, limits, name, shape)
        out[name] = Extra(form, value)
    return out


def _read_bits(reader: Reader, limits: Limits, name: str, form: Form) -> Tensor:
    count = reader.number(4)
    if count > limits.elements:
        raise TooLarge(f"the extra {name!r} has {count} bits, at most {limits.elements} are accepted here")
    if form == "bits":
        return torch.from_numpy(reader.bits(count))
    held = reader.number(4)
    if held > count:
        raise BadCount(f"the extra {name!r} claims {held} set bits, but has only {count} bits")
    return torch.from_numpy(rice.read_flags(reader, [held], [count]))


def _read_tensor(reader: Reader, limits: Limits, name: str, shape: tuple[int, ...] | None) -> Tensor:
    """A type code, a shape unless it is known, the numbers."""
    code = reader.number(1)
    if code >= len(DTYPES):
        raise BadField(f"the extra {name!r} has type {code}; the types are 0 to {len(DTYPES) - 1}")
    if shape is None:
        rank = reader.number(1)
        if rank > 8:
            raise BadField(f"the extra {name!r} has {rank} dimensions, at most 8 are allowed")
        shape = tuple(reader.number(4) for _ in range(rank))
    if math.prod(max(1, size) for size in shape) > limits.elements:
        raise TooLarge(f"the extra {name!r} has shape {shape}, at most {limits.elements} elements are accepted here")
    value = torch.from_numpy(reader.array(list(DTYPES.values())[code], math.prod(shape))).reshape(shape)
    _check_finite(name, value)
    return value
