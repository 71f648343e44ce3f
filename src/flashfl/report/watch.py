"""Serve the page on this machine, and refresh it while runs go on."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ..core.errors import ConfigError
from ..run.results import RESULTS
from .load import folders, load
from .page import Data, clean, page, page_data

REFRESH_MS = 2000
_HOSTS = ("127.0.0.1", "localhost")


class Feed:
    """The page's data for a folder of runs, computed again only when a results file has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._data: Data = {}

    def data(self) -> Data:
        with self._lock:
            stamp = self._now()
            if stamp != self._data.get("stamp"):
                self._data = {**page_data(load([self.folder])), "live": REFRESH_MS, "stamp": stamp}
            return self._data

    def _now(self) -> str:
        """Changes whenever a run has progressed, appeared or vanished."""
        marks = []
        for run in folders([self.folder]):
            try:
                stat = (run / RESULTS).stat()
                marks.append(f"{run}:{stat.st_size}:{stat.st_mtime_ns}")
            except OSError:
                marks.append(str(run))
        return f"{hash(tuple(marks)):x}"


class _Handler(BaseHTTPRequestHandler):
    feed: Feed
    timeout = 10.0  # seconds a connection may stay silent: a half-open one must not keep its thread and socket

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        # A foreign web page must not read runs through a host name that points to this machine.
        if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in _HOSTS:
            self._answer(403, "text/plain", b"this page is served to this machine only")
        elif where.path in ("/", "/index.html"):
            self._answer(200, "text/html", page(self.feed.data()).encode(errors="replace"))
        elif where.path == "/data.json":
            data = self.feed.data()
            if parse_qs(where.query).get("since") == [data["stamp"]]:
                self._answer(204, "application/json", b"")
            else:
                self._answer(200, "application/json", json.dumps(clean(data)).encode())
        else:
            self._answer(404, "text/plain", b"not found")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line for every refresh would hide what matters."""


def serve(folder: Path, port: int = 8327) -> tuple[ThreadingHTTPServer, str]:
    """A server for this folder that only this machine can reach, and its address."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give the folder of your runs, for example runs")
    handler = type("Handler", (_Handler,), {"feed": Feed(folder)})
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as error:  # taken, or no port
        raise ConfigError(f"port {port} cannot be used ({error}): choose another with --port") from None
    server.daemon_threads = True
    return server, f"http://127.0.0.1:{server.server_address[1]}/"
