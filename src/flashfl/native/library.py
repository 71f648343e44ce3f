"""The compiled kernels: which of them this machine can run, and the shapes they are told."""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

SAMPLES = 16  # in a block: as many as the widest vectors hold
_SETS = {"AVX512": ["avx512", "avx2"], "AVX2": ["avx2"]}  # by torch's name for what the processor can do


def _fields(names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(name, ctypes.c_int64) for name in names.split()]


class Conv(ctypes.Structure):
    """A convolution. `members`: how many planes share one list of weights, 1 or 4."""

    _fields_ = _fields("blocks in_ out h w oh ow in_pad out_pad kh kw sh sw ph pw dh dw groups members threads")


class Shape(ctypes.Structure):
    """A batch of images as the kernels hold it."""

    _fields_ = _fields("blocks planes h w pad samples threads")


class Window(ctypes.Structure):
    """The windows of a pooling layer."""

    _fields_ = _fields("kh kw sh sw ph pw")


_P, _I, _F, _N = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_FUNCTIONS: dict[str, list[type]] = {
    "plan": [_P, _P, _I, _P, _P, _P],
    "plan_input": [_P, _P, _I, _P, _P, _P],
    "pack": [_P, _P, _I, _P],
    "forward": [_P, _P, _P, _P, _P, _P, _P],
    "input_gradient": [_P, _P, _P, _P, _P, _P],
    "weight_gradient": [_P, _P, _P, _P, _I, _P, _P, _P],
    "norm": [_P, _P, _P, _P, _P, _N, _N, _F, _P, _P, _P],
    "norm_gradient": [_P, _P, _P, _P, _P, _P, _P, _N, _F, _P, _P, _P, _P],
    "pool": [_P, _P, _P, _P, _P],
    "pool_gradient": [_P, _P, _P, _P, _P, _P, _P],
}


class Library:
    """One compiled library. `functions` are those of kernels.h, norm.h and pool.h."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        self.functions = {name: library[f"flashfl_{name}"] for name in _FUNCTIONS}
        for name, function in self.functions.items():
            function.argtypes = _FUNCTIONS[name]
            function.restype = ctypes.c_int64 if name.startswith("plan") else None


def _as_c(argument: ctypes.Structure | Tensor | int | float | None) -> object:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous()
        return argument.data_ptr()
    return ctypes.addressof(argument) if isinstance(argument, ctypes.Structure) else argument


def instruction_sets() -> list[str]:
    """Instruction sets of this processor that kernels are compiled for, fastest first."""
    return [*_SETS.get(torch.backends.cpu.get_cpu_capability(), []), "portable"]


def find(name: str) -> Path | None:
    """The compiled library for an instruction set, if the package was built with it."""
    here = Path(__file__).parent
    return next((p for suffix in EXTENSION_SUFFIXES if (p := here / f"_{name}{suffix}").exists()), None)


@functools.cache
def kernels() -> Library | None:
    """The fastest library that this machine can run, or None."""
    for name in instruction_sets():
        if path := find(name):
            with suppress(OSError):  # built for another machine
                return Library(path)
    return None


def call(name: str, *arguments: ctypes.Structure | Tensor | int | float | None) -> int:
    """Call a kernel. A tensor stands for its address: it must be contiguous and on the CPU."""
    library = kernels()
    assert library is not None
    result: int | None = library.functions[name](*map(_as_c, arguments))
    return result or 0


def status() -> str:
    """Whether native kernels are on, in one line."""
    library = kernels()
    if library is None:
        return (
            "native kernels are off: none were built for this machine. Install a C++ compiler, then reinstall flashfl"
        )
    return f"native kernels are on ({library.path.name.split('.')[0].lstrip('_')})"
