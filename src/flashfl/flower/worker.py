"""A process that outlives messages: it keeps torch, the model and the data, which Flower would load every time.

Flower starts a new process for every message of a deployed client. That process hands the work to this one, and
imports neither torch nor the data. The two talk over a socket that only the same user can reach, so objects may travel
as pickles. The worker ends with the process that starts Flower's processes (the node's SuperExec), or after half an
hour without work.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from flwr.app import Context, Message, RecordDict

IDLE = 1800.0  # seconds without work after which a worker ends
_started: list[subprocess.Popen[bytes]] = []  # workers outlive the process that starts them


def ask(reference: str, message: Message, context: Context) -> RecordDict | None:
    """The content of the worker's reply to a message; None if there can be no worker here."""
    parent, folder = os.getppid(), _folder()
    if folder is None or parent <= 1:
        return None
    mine = json.dumps([parent, reference, sys.path, sys.executable])
    name = hashlib.blake2b(mine.encode(), digest_size=8).hexdigest()
    with _connect(folder / f"{name}.sock", parent, reference) as connection:
        connection.send((message, context))
        reply, context.state = connection.recv()
    if not isinstance(reply, RecordDict):
        raise RuntimeError(
            f"the worker process of this node failed: {reply}. For the whole traceback, start the SuperNode with "
            "worker=false in --node-config."
        )
    return reply


def _folder() -> Path | None:
    """The folder of our sockets, which only this user can enter; None if there is no such folder."""
    if os.name != "posix":
        return None
    folder = Path(tempfile.gettempdir()) / f"flashfl-{os.getuid()}"
    with suppress(FileExistsError):  # it may be another user's, or no folder
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077 else None


def _connect(socket: Path, parent: int, reference: str) -> Connection:
    """A connection to the worker behind this socket; starts the worker if there is none."""
    command = [sys.executable, "-m", "flashfl.flower.worker", str(socket), str(parent), reference, json.dumps(sys.path)]
    process = None
    while True:
        try:
            return Client(str(socket), family="AF_UNIX")  # type: ignore[return-value]
        except OSError:
            if process is None:
                socket.unlink(missing_ok=True)
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
                _started.append(process)
            elif process.poll() is not None:
                raise RuntimeError(
                    f"the process that loads this node's task did not start (exit code {process.poll()}). If it "
                    "printed an error, look for it above."
                ) from None
            time.sleep(0.02)


def serve(socket: Path, parent: int, reference: str) -> None:
    """Answer one message after another. `_watch` ends the process."""
    last = [time.monotonic()]
    threading.Thread(target=_watch, args=(socket, parent, last), daemon=True).start()
    with Listener(str(socket), family="AF_UNIX") as listener:  # opened before torch is loaded: callers wait
        while True:
            try:
                with listener.accept() as connection:
                    last[0] = float("inf")
                    _answer(connection, reference)
            except (EOFError, OSError, ValueError) as error:
                print(f"flashfl worker: lost the connection to a client app ({error!r})", file=sys.stderr)
            last[0] = time.monotonic()


def _answer(connection: Connection, reference: str) -> None:
    message, context = connection.recv()
    reply: RecordDict | str
    try:
        from ..engine.heap import keep_freed_memory, return_freed_memory
        from .host import find

        keep_freed_memory()
        reply = find(reference, context).serve(message, context)
        return_freed_memory()
    except Exception as error:  # the caller raises it again, as Flower expects of an app
        reply = f"{type(error).__name__}: {error}"
    connection.send((reply, context.state))


def _watch(socket: Path, parent: int, last: list[float]) -> None:
    while _alive(parent) and time.monotonic() - last[0] < IDLE:
        time.sleep(0.5)
    socket.unlink(missing_ok=True)
    os._exit(0)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # a zombie is not alive
    except FileNotFoundError:  # there is no /proc on this system
        return True
    except OSError:
        return False


if __name__ == "__main__":
    _, _socket, _parent, _reference, _path = sys.argv
    sys.path[:] = json.loads(_path)
    serve(Path(_socket), int(_parent), _reference)
