"""Start a SuperLink that only its own machine can control: `python -m flashfl.flower.superlink ...`.

It takes the options of `flower-superlink` and differs in two ways:
- A SuperLink serves everything on one port, and Flower has no accounts of its own: whoever reaches the port can
  register keys, submit code and read runs. Here such requests are answered only if they come from this machine
  (loopback). From elsewhere, only what SuperNodes need is answered, and Flower checks their keys.
- The files it creates are for its user only. The database holds models and updates.

Flower has no settings for this, so its server is given another app to serve. If a later version of Flower is built
differently, the names are not found and the command says so.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .supernode import instead

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

FLEET = "/v1/fleet/"  # what SuperNodes use
_LEGACY = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")  # would open other ports


def allowed(host: str, path: str) -> bool:
    """Whether a request from this address may use this path."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or path.startswith(FLEET)


def guard(app: ASGIApp) -> ASGIApp:
    """An ASGI app that passes on what is allowed, and answers 403 to the rest."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or allowed((scope.get("client") or ("",))[0], scope["path"]):
            return await app(scope, receive, send)
        if scope["type"] == "http":
            body = b"only the SuperLink's own machine may do this"
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": body})
        return None

    return guarded


def main() -> None:
    """Start a SuperLink."""
    os.umask(0o077)
    for name in _LEGACY:
        os.environ.pop(name, None)
    try:
        command: Any = import_module("flwr.superlink.cli.flower_superlink")
        server = command.uvicorn
    except (ImportError, AttributeError) as error:
        sys.exit(f"flashfl: a SuperLink needs Flower 1.41 or 1.42 ({error}): pip install 'flashfl[flower]'")
    command.uvicorn = instead(server, run=lambda app, **options: server.run(guard(app), **options))
    command.flower_superlink()


if __name__ == "__main__":
    main()
