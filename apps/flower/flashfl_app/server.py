"""The server: any configured method, with its results and checkpoints."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train what the run config says."""
    from flashfl.flower.app import server_main

    server_main(grid, context)
