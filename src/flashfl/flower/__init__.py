"""The same methods on Flower: the only package that imports flwr.

    app = ServerApp()

    @app.main()
    def main(grid, context):
        FlashStrategy(SPDST(density=0.05), server_task(Net, test), TrainConfig(rounds=50)).start(grid)

    app = client_app(lambda context: Task(Net, [my_samples]))

Names are loaded on first use: a ClientApp process that hands its work to a worker needs neither torch nor the server's
half.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attendance import FlowerOptions
    from .client import client_app
    from .engine import FlowerEngine
    from .strategy import FlashStrategy, server_task

_HOMES = {
    "FlashStrategy": "strategy",
    "FlowerEngine": "engine",
    "FlowerOptions": "attendance",
    "client_app": "client",
    "server_task": "strategy",
}

__all__ = ["FlashStrategy", "FlowerEngine", "FlowerOptions", "client_app", "server_task"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "flwr":
            raise
        raise ImportError("flashfl.flower needs Flower: pip install 'flashfl[flower]'") from None
