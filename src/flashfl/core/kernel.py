"""Triton kernels by name, for code that also has a plain way."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


@functools.cache
def kernel(module: str, name: str) -> Callable[..., Any] | None:
    """A function of `flashfl.kernels`, loaded when it is first asked for. None if Triton is not installed."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(f"flashfl.kernels.{module}"), name)
    except ImportError:
        return None
    return found
