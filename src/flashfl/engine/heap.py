"""Freed memory of a process that trains: kept during a job, where every step needs it again, and returned after it.

Without this the C library returns every large block at once. The next step then gets new pages, which the system has to
clear first: up to a fifth of a step's time. Other C libraries than glibc do as they like.
"""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names of these settings
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep what is freed from now on, until `return_freed_memory`."""
    with contextlib.suppress(OSError, AttributeError):
        for setting in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(setting, _LARGEST)


def return_freed_memory() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
