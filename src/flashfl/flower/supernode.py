"""`python -m flashfl.flower.supernode ...`: flower-supernode that waits less and comes back after a crash.

Takes the same arguments as flower-supernode. It differs in three ways:
- Flower's SuperNode looks for messages every 3 s and for its app's reply every 0.5 s; its SuperExec looks for work
  every second. Here all look every FLASHFL_POLL seconds (default: 0.2).
- Flower starts an interpreter for every message. Here ClientApps are forked from a process that has loaded Flower.
- Flower's SuperNode exits with code 305 if the SuperLink still counts its predecessor as online, as it does for up to a
  minute after a crash. Here it waits and tries again.

Flower has no settings for this, so its modules are given another clock, another way to start processes, and another
way to join. If a later version of Flower is built differently, those names are not found and the command says so.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from types import ModuleType, SimpleNamespace
from typing import Any

_SUPEREXEC = "from flashfl.flower.supernode import superexec; superexec()"
REJOIN = 120.0  # seconds to try again; the SuperLink forgets a crashed node after 60
_PRELOAD = ["flwr.supernode.cli.flwr_clientapp", "flashfl.flower.client", "flashfl.flower.worker"]


def instead(module: ModuleType, **names: Any) -> SimpleNamespace:
    """A module in which some names are replaced."""
    return SimpleNamespace(**{**vars(module), **names})


def start_superexec(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process; in place of a SuperExec, start ours."""
    if command[0] == "flower-superexec":
        command = [sys.executable, "-c", _SUPEREXEC, *command[1:]]
    return subprocess.Popen(command, **options)


def try_again(activate: Callable[[], Any], seconds: float = REJOIN, pause: float = 5.0) -> Any:
    """Activate a node. As long as the SuperLink says that it cannot be activated now, try again."""
    end = time.monotonic() + seconds
    while True:
        try:
            return activate()
        except Exception as error:
            left = end - time.monotonic()
            if not not_activated(error) or left < pause:
                raise
            print(
                "flashfl: the SuperLink refuses this node. Either the SuperLink does not know this node's key: "
                "register it there. Or an earlier process of this node crashed and still counts as online: wait until "
                f"the SuperLink notices. Trying again for up to {left:.0f} s.",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(pause)


def not_activated(error: Exception) -> bool:
    """Whether the SuperLink said that a node cannot be activated now."""
    import httpx
    from flwr.supercore.error import ApiErrorCode, FlowerError

    if not isinstance(error, httpx.HTTPStatusError):
        return False
    found = FlowerError.from_json(error.response.text)
    return found is not None and found.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED


def run_app(command: Sequence[str], quiet: bool) -> None:
    """What `flwr-clientapp` does, in a process that has loaded Flower."""
    if quiet:
        sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115 - for as long as the process lives
    sys.argv = list(command)
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    flwr_clientapp()


def start_app(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes] | ForkServerProcess:
    """Start a process: a ClientApp from Python's fork server, any other as usual."""
    if command[0] != "flwr-clientapp":
        return subprocess.Popen(command, **options)
    mp.active_children()  # collects those that have ended
    quiet = options.get("stdout") == subprocess.DEVNULL
    process = mp.get_context("forkserver").Process(target=run_app, args=(list(command), quiet), daemon=True)
    process.start()
    return process


def superexec() -> None:
    """Start a SuperExec with a fork server."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    mp.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    executor: Any = subprocess_executor
    executor.subprocess = instead(subprocess, Popen=start_app)
    flower_superexec()


def main() -> None:
    """Start a SuperNode."""
    most = max(0.01, float(os.environ.get("FLASHFL_POLL", "0.2")))
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", str(most))
    try:
        from flwr.supernode import start_client_internal
        from flwr.supernode.cli import flower_supernode
        from flwr.supernode.fleet_http_client import FleetHttpClient

        client: Any = FleetHttpClient
        activate = client.ActivateNode
    except (ImportError, AttributeError) as error:
        sys.exit(f"flashfl: a SuperNode needs Flower 1.41 or 1.42 ({error}): pip install 'flashfl[flower]'")
    client.ActivateNode = lambda self, request: try_again(lambda: activate(self, request))
    loop: Any = start_client_internal
    loop.time = instead(time, sleep=lambda seconds: time.sleep(min(seconds, most)))
    loop.subprocess = instead(subprocess, Popen=start_superexec)
    flower_supernode()


if __name__ == "__main__":
    main()
