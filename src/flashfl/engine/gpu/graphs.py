"""CUDA graphs: work that is captured once and replayed, or runs eagerly where it cannot be captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...core.errors import warn


class Graphs:
    """Captured variants of one piece of work, by key.

    Graphs share one pool of memory. So they must not run at the same time, and what they compute must lie outside.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.active = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # torch has no public type for it

    def lacks(self, key: Hashable) -> bool:
        """Whether this variant could be captured, and is not yet."""
        return self.active and key not in self._graphs

    def capture(
        self, key: Hashable, work: Callable[[], None], tries: Callable[[], None] | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        """Capture a variant unless it is. It runs twice before, so its tensors hold garbage afterwards.

        tries: what runs instead of `work` to warm up. If anything fails, a warning says why and `active` is False.
        """
        if not self.lacks(key):
            return
        try:
            self._graphs[key] = self._captured(work, tries or work, stream or torch.cuda.Stream(self.device))
        except Exception as error:  # of any kind: a model, a loss or a metric may wait for the device
            self.active = False
            self.clear()
            torch.cuda.synchronize(self.device)
            warn(
                f"{self.name} cannot be captured as a CUDA graph ({str(error).splitlines()[0]}); it runs eagerly, "
                "which is slower"
            )

    def _captured(
        self, work: Callable[[], None], tries: Callable[[], None], stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                tries()
        stream.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph

    def replay(self, key: Hashable) -> bool:
        """Replay a variant on the current stream. False if it was never captured."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        return graph is not None

    def clear(self) -> None:
        """Forget all graphs: the tensors they use are replaced."""
        self._graphs.clear()
