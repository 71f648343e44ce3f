"""What passes between a Flower message and whoever plays the client: plain data, light to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import ConfigError

Memory = list[Any]  # as `engine.client.Memory`, which is not imported here: that would bring torch with it


@dataclass(frozen=True)
class Seat:
    """What a message says of whom it is for: the node's settings, the run's, and which run it is."""

    node: Mapping[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)
    run_id: int = 0

    @property
    def client(self) -> int:
        """The client's id: `client-id` of the node's settings, else `partition-id`."""
        for name in ("client-id", "partition-id"):
            if name in self.node:
                return int(self.node[name])
        raise ConfigError(
            "this node does not say which client it is: start its SuperNode with --node-config 'partition-id=N'"
        )


@dataclass(frozen=True)
class Held:
    """What a client remembers: its last rounds, and the masks they name, packed."""

    memory: Memory = field(default_factory=list)
    masks: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A reply: an update, a verdict, a registration, or why there is none; and what to remember, if that changed."""

    kind: str  # update, lack, judged, client, failed
    data: bytes = b""
    fields: Mapping[str, Any] = field(default_factory=dict)
    held: Held | None = None
