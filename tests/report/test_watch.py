"""`flashfl watch` against clients that misbehave."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from flashfl.report.watch import serve


def test_watch_gives_up_half_open_connections(compared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients that never finish a request: their threads end, and others are served."""
    server, address = serve(compared, 0)
    assert 0 < server.RequestHandlerClass.timeout <= 30
    monkeypatch.setattr(server.RequestHandlerClass, "timeout", 0.3)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    before = set(threading.enumerate())
    thread.start()
    silent = [socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) for _ in range(2)]
    try:
        silent[1].sendall(b"GET / HTTP/1.1\r\nHost: 127")
        with urllib.request.urlopen(address + "data.json") as answer:
            assert json.load(answer)["parts"][0]["groups"]
        assert [each.recv(1) for each in silent] == [b"", b""]  # closed by the server
        end = time.monotonic() + 10
        while set(threading.enumerate()) - before - {thread} and time.monotonic() < end:
            time.sleep(0.05)
        assert set(threading.enumerate()) - before == {thread}
    finally:
        for each in silent:
            each.close()
        server.shutdown()
        server.server_close()
        thread.join(5)
