"""Reading pickles that hold plain data, and nothing else.

A pickle is a program: it may name any function and call it. This reader knows stand-ins for the three names numpy
arrays need and for the one bytes need, and refuses every other, so nothing a file says is ever imported or run.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from .files import damaged

_PLAIN = re.compile(r"[<>|=]?[biuf][1248]")


class _Dtype:
    """Stands in for numpy.dtype: remembers the name of a plain number type and its byte order."""

    def __init__(self, name: Any, *_: Any) -> None:
        text = name.decode("ascii") if isinstance(name, bytes) else name
        if not isinstance(text, str) or not _PLAIN.fullmatch(text):
            raise pickle.UnpicklingError(f"an array of type {text!r}")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        if state[1] in (">", b">"):
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """Stands in for numpy.ndarray while its contents are still to come."""

    array: np.ndarray[Any, Any]

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes) or not all(isinstance(n, int) for n in shape):
            raise pickle.UnpicklingError("an array that does not hold plain numbers")
        flat = np.frombuffer(data, dtype.dtype)
        self.array = flat.reshape(shape, order="F" if fortran else "C")


class _Reconstruct:
    """Stands in for numpy's function that makes an empty array."""

    def __call__(self, *_: Any) -> _Array:
        return _Array()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it gives a state to a function")


class _Encode(_Reconstruct):
    """Stands in for _codecs.encode, by which old protocols write bytes."""

    def __call__(self, text: Any = None, encoding: Any = "latin1", *_: Any) -> Any:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("an encoding other than latin1")
        return text.encode("latin1")


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Encode(),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not plain data") from None


def loads(data: bytes, path: Path) -> Any:
    """What a pickle of plain data holds; `path` is named if it holds anything else."""
    try:
        return _plain(_Reader(io.BytesIO(data), encoding="bytes").load(), set())
    except Exception as error:  # a broken pickle raises almost anything
        what = str(error) or type(error).__name__
        raise damaged(path, f"refused as a pickle of arrays and plain containers: {what}") from None


def _plain(value: Any, seen: set[int]) -> Any:
    """`value` with arrays in place of their stand-ins. A container inside itself, or met twice, is refused."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, _Array):
        return value.array
    if not isinstance(value, dict | list | tuple):
        raise pickle.UnpicklingError(f"it holds a {type(value).__name__}, which is not plain data")
    if value and id(value) in seen:
        raise pickle.UnpicklingError("it holds the same container twice")
    seen.add(id(value))
    if isinstance(value, dict):
        return {_plain(k, seen): _plain(v, seen) for k, v in value.items()}
    return type(value)(_plain(item, seen) for item in value)
