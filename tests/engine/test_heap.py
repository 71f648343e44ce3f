"""Freed memory is kept while a process trains."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from flashfl.engine.heap import keep_freed_memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def grown():
    before = faults()
    for _ in range(10):
        torch.zeros(16_000_000)  # 64 MB: glibc returns so large a block whenever it is freed
    return faults() - before
torch.set_num_threads(1)
plain = grown()
keep_freed_memory()
torch.zeros(16_000_000)
kept = grown()
print(plain, kept)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
def test_freed_memory_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    plain, kept = map(int, done.stdout.split())
    assert kept < plain / 4
