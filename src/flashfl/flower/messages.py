"""What a client is asked and what it answers, as plain data. Light to import: no torch, no Flower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.errors import ConfigError

Setting = bool | int | float | str
Rounds = list[
    tuple[tuple[int, int, int], str | None, str | None]
]  # tag, hash of the order's mask, hash of the client's own


@dataclass(frozen=True)
class NodeContext:
    """Which node a message is for, and in which run. Has the fields of Flower's Context that a task may need."""

    node_config: Mapping[str, Setting]
    run_config: Mapping[str, Setting] = field(default_factory=dict)
    run_id: int = 0

    @property
    def client(self) -> int:
        """The client's id: the node's setting `client-id`, else `partition-id`."""
        for name in ("client-id", "partition-id"):
            if name in self.node_config:
                return int(self.node_config[name])
        raise ConfigError(
            "this node does not say which client it is: start its SuperNode with --node-config 'partition-id=N'"
        )


@dataclass(frozen=True)
class Held:
    """What a client remembers: its last rounds, and the masks they name, packed."""

    memory: Rounds = field(default_factory=list)
    masks: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A client's reply, and what it must remember if that changed."""

    kind: str  # update, lack, evaluated, client, failed
    data: bytes = b""
    fields: Mapping[str, str | int | float] = field(default_factory=dict)
    held: Held | None = None
