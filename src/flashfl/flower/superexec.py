"""`python -m flashfl.flower.superexec ...`: flower-superexec, whose ClientApps are forked and not started anew.

Python's fork server loads Flower once; each message then gets a fresh process of its own, as Flower wants it, without
the second or two that importing takes. All other kinds of tasks are started as ever.
"""

from __future__ import annotations

import multiprocessing as mp
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from .supernode import Instead

_PRELOAD = ["flwr.supernode.cli.flwr_clientapp", "flashfl.flower.client", "flashfl.flower.worker"]


def run_app(command: Sequence[str], quiet: bool) -> None:
    """What `flwr-clientapp` does, in a process that is ready for it."""
    if quiet:
        sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115 - for as long as the process lives
    sys.argv = list(command)
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    flwr_clientapp()


class Starter:
    """Starts processes: ClientApps from the fork server, anything else as it is."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)

    def popen(self, command: Sequence[str], **options: Any) -> Any:
        if command[0] != "flwr-clientapp":
            return subprocess.Popen(command, **options)
        mp.active_children()  # those that have ended are waited for
        quiet = options.get("stdout") == subprocess.DEVNULL
        process = self._context.Process(target=run_app, args=(list(command), quiet), daemon=True)
        process.start()
        return process


def main() -> None:
    """Start a SuperExec with a fork server."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    executor: Any = subprocess_executor
    executor.subprocess = Instead(subprocess, Popen=Starter().popen)
    flower_superexec()


if __name__ == "__main__":
    main()
