"""Read a pickled dict of plain data: numbers, texts, bytes, lists, tuples, dicts and arrays of uint8.

Python's own reader does the work, in its version without C, with only the instructions that plain data needs. Nothing
that a file names is imported or called, and no more memory is taken than the file is large.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .files import damaged

_PLAIN = {
    *(pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.STOP),
    *(pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.GET, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.INT, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG, pickle.LONG1, pickle.LONG4),
    *(pickle.STRING, pickle.BINSTRING, pickle.SHORT_BINSTRING),  # bytes of Python 2
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.UNICODE, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BUILD),
}


class _Dict(dict[object, object]):
    """A dict without tuples as keys: a small file can hold a tuple that takes forever to hash."""

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, str | bytes | int):
            raise ValueError("it has a key that is neither a text nor a number")
        super().__setitem__(key, value)


class _Array:
    """Stands for numpy.ndarray, and for the function that makes an empty one."""

    def __init__(self, *_: object) -> None: ...


class _Uint8:
    """Stands for numpy.dtype, and for the one type of array that is read."""

    def __init__(self, name: object, *_: object) -> None:
        if name not in ("u1", b"u1"):
            raise ValueError("it has an array of another type than uint8")


_NAMES = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Uint8,
}


class _Reader(pickle._Unpickler):
    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]]

    def find_class(self, module: str, name: str) -> type:
        known = _NAMES.get(f"{module}.{name}")
        if known is None:
            raise ValueError(f"it asks for {module}.{name}, which is not plain data")
        return known

    def make_dict(self) -> None:
        self.stack.append(_Dict())

    def fill(self) -> None:
        """Put the array in the place of its stand-in. A type has nothing to fill in."""
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, _Array):
            _, shape, _, fortran, data = state
            self.stack[-1] = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")
        elif not isinstance(made, _Uint8):
            raise ValueError("it sets the state of an object that is not an array")

    def refuse(self) -> None:
        raise ValueError("it uses a pickle instruction that plain data does not need")


_Reader.dispatch = {
    code: read if bytes([code]) in _PLAIN else _Reader.refuse for code, read in pickle._Unpickler.dispatch.items()
}
_Reader.dispatch[pickle.EMPTY_DICT[0]] = _Reader.make_dict
_Reader.dispatch[pickle.BUILD[0]] = _Reader.fill


def loads(data: bytes, path: Path) -> dict[object, object]:
    """The dict in a pickle, with texts as keys. The error for anything else names `path`."""
    try:
        held = _Reader(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(held, _Dict):
            raise ValueError("it is not a dict")
        return {str(key, "latin1") if isinstance(key, bytes) else key: value for key, value in held.items()}
    except Exception as error:  # a broken pickle raises almost anything
        why = str(error) or type(error).__name__
        raise damaged(path, f"it must be a pickled dict of uint8 arrays, lists, numbers and texts ({why})") from None
