"""Where a GPU has a faster way: a Triton kernel by name, or nothing where Triton is not installed."""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def kernel(module: str, name: str) -> Any:
    """The function of that name in `flashfl.kernels`, loaded when it is first asked for; None without Triton."""
    try:
        return getattr(importlib.import_module(f"flashfl.kernels.{module}"), name)
    except ImportError:
        return None
