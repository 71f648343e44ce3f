"""Read pickles of plain data: numbers, texts, bytes, lists, tuples, dicts and arrays of numbers.

A pickle is a program for a stack machine. This one runs the instructions that plain data needs and refuses all others.
It imports nothing that a file names: it has its own versions of the few functions that arrays and bytes need.
Containers cannot be shared and cannot be keys, so time and memory stay in proportion to the size of the file.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import damaged

_DEEPEST = 16  # containers inside containers
_NUMBERS = re.compile(r"[<>|=]?[biuf][1248]")


class _Dtype:
    """Stands for numpy.dtype."""

    def __init__(self, name: object, *_: object) -> None:
        text = name.decode("ascii") if isinstance(name, bytes) else name
        if not isinstance(text, str) or not _NUMBERS.fullmatch(text):
            raise ValueError(f"an array of type {text!r}")
        self.dtype = np.dtype(text)

    def fill(self, _: object, order: object, *more: object) -> None:
        if order in (">", b">"):
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """Stands for numpy.ndarray, and for the function that makes an empty one."""

    def __init__(self, *_: object) -> None:
        self.values: NDArray[np.generic] | None = None

    def fill(self, _: object, shape: object, dtype: object, fortran: object, data: object) -> None:
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes) or not isinstance(shape, tuple):
            raise ValueError("an array of something other than numbers")
        self.values = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if fortran else "C")


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """Stands for _codecs.encode, with which old protocols write bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise ValueError("an encoding other than latin1")
    return text.encode("latin1")


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "numpy.core.multiarray _reconstruct": _Array,
    "numpy._core.multiarray _reconstruct": _Array,
    "numpy ndarray": _Array,
    "numpy dtype": _Dtype,
    "_codecs encode": _encode,
}


def _function(name: list[Any]) -> object:
    known = _FUNCTIONS.get(" ".join(name))
    if known is None:
        raise ValueError(f"it asks for {'.'.join(name)}, which is not plain data")
    return known


def _call(items: list[Any]) -> object:
    function, args = items
    if function not in _FUNCTIONS.values():
        raise ValueError("it calls something that is not a function")
    made: object = function(*args)
    return made


def _fill(items: list[Any]) -> object:
    made, state = items
    if not isinstance(made, _Array | _Dtype):
        raise ValueError("it gives a state to something other than an array")
    made.fill(*state)
    return made


def _add(items: list[Any]) -> object:
    """A list with items added, or a dict with keys and values added."""
    container, *new = items
    if isinstance(container, list):
        container.extend(new)
    elif isinstance(container, dict) and all(isinstance(key, str | bytes | int) for key in new[::2]):
        container.update(zip(new[::2], new[1::2], strict=True))
    else:
        raise ValueError("it has a key that is neither a text nor a number")
    return container


_PUSH = {  # instructions that carry the number, text or bytes they push
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_MAKE: dict[str, tuple[int, Callable[[list[Any]], object]]] = {
    # How many items an instruction takes, and what it makes of them. Some also take all items since the last mark.
    "NONE": (0, lambda items: None),
    "NEWTRUE": (0, lambda items: True),
    "NEWFALSE": (0, lambda items: False),
    "EMPTY_LIST": (0, list),
    "EMPTY_TUPLE": (0, tuple),
    "EMPTY_DICT": (0, dict),
    "LIST": (0, list),
    "DICT": (0, lambda items: _add([{}, *items])),
    "TUPLE": (0, tuple),
    "TUPLE1": (1, tuple),
    "TUPLE2": (2, tuple),
    "TUPLE3": (3, tuple),
    "APPEND": (2, _add),
    "APPENDS": (1, _add),
    "SETITEM": (3, _add),
    "SETITEMS": (1, _add),
    "STACK_GLOBAL": (2, _function),
    "REDUCE": (2, _call),
    "BUILD": (2, _fill),
}


def loads(data: bytes, path: Path) -> object:
    """The plain value in a pickle. The error for anything else names `path`."""
    try:
        return _plain(_run(data))
    except Exception as error:  # a broken pickle raises almost anything
        why = str(error) or type(error).__name__
        raise damaged(path, f"refused as a pickle of arrays and plain containers: {why}") from None


def _plain(value: object, depth: int = 0) -> object:
    """`value` with its arrays unwrapped; an error if it holds anything that is not plain data."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, _Array) and value.values is not None:
        return value.values
    if not isinstance(value, dict | list | tuple):
        raise ValueError("it holds something that is not plain data")
    if depth == _DEEPEST:
        raise ValueError(f"its containers are nested more than {_DEEPEST} deep")
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    return type(value)(_plain(item, depth + 1) for item in value)


def _run(data: bytes) -> object:
    """Run a pickle, and return the value that it leaves."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, object] = {}
    encoded = 0
    arg: Any
    for op, arg, _ in pickletools.genops(data):  # refuses an instruction that claims more bytes than the file has
        if op.name in _PUSH:
            stack.append(arg)
        elif op.name in ("STRING", "BINSTRING", "SHORT_BINSTRING"):  # bytes of Python 2
            stack.append(arg.encode("latin1"))
        elif op.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif op.name in ("GET", "BINGET", "LONG_BINGET"):
            if isinstance(memo[arg], dict | list | tuple):
                raise ValueError("it holds the same container twice")
            stack.append(memo[arg])
        elif op.name == "GLOBAL":
            stack.append(_function(arg.split(" ")))
        elif op.name == "MARK":
            marks.append(len(stack))
        elif op.name in _MAKE:
            count, make = _MAKE[op.name]
            start = (marks.pop() if pickletools.markobject in op.stack_before else len(stack)) - count
            made = make(stack[start:])
            stack[start:] = [made]
            encoded += len(made) if isinstance(made, bytes) else 0
            if encoded > len(data):
                raise ValueError("it makes more bytes than it has")
        elif op.name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"it has the instruction {op.name}, which plain data does not need")
    (value,) = stack
    return value
