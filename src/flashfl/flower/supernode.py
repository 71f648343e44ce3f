"""`python -m flashfl.flower.supernode ...`: flower-supernode with less waiting. Takes the same arguments.

Flower's SuperNode looks for messages every 3 s and for its app's reply every 0.5 s, its SuperExec looks for work every
second and then starts an interpreter for every message. Here all look every FLASHFL_POLL seconds (0.2 unless set), and
apps are forked from a process that has Flower loaded (`flashfl.flower.superexec`). What Flower has no setting for is
changed by giving its modules another clock and another way to start processes; should a later version be built
otherwise, it runs as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class Instead:
    """A module in which some names are others."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def short_sleep(most: float) -> Callable[[float], None]:
    """A sleep that never lasts longer than this."""
    return lambda seconds: time.sleep(min(seconds, most))


def popen_ours(command: Sequence[str], **options: Any) -> Any:
    """Start a process; a SuperExec is ours."""
    if command[0] == "flower-superexec":
        command = [sys.executable, "-m", "flashfl.flower.superexec", *command[1:]]
    return subprocess.Popen(command, **options)


def main() -> None:
    """Start a SuperNode that does not dawdle."""
    most = max(0.01, float(os.environ.get("FLASHFL_POLL", "0.2")))
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", str(most))
    try:
        from flwr.supernode import start_client_internal
        from flwr.supernode.cli import flower_supernode
    except ImportError as error:
        sys.exit(f"flashfl: a SuperNode needs Flower ({error}): pip install 'flashfl[flower]'")

    loop: Any = start_client_internal
    loop.time = Instead(time, sleep=short_sleep(most))
    loop.subprocess = Instead(subprocess, Popen=popen_ours)
    flower_supernode()


if __name__ == "__main__":
    main()
