"""A grid whose nodes live in this process: for tests, and to try a strategy without Ray or sockets.

It uses two internals of Flower: the identity of an app, which Flower sets before it runs one, and the id of a message,
which the SuperLink assigns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy

from flwr.app import Context, Error, Message, RecordDict, UserConfigValue
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Tamper = Callable[[int, Message, Message], Iterable[Message]]  # (node, message, reply) -> what the server gets to see


class InProcessGrid(Grid):
    """Runs a node's ClientApp when the reply to its message is pulled.

    nodes: node id -> (app, node config). tamper: replaces each reply by none, one or several.
    """

    run = Run.create_empty(1)

    def __init__(
        self,
        nodes: Mapping[int, tuple[ClientApp, Mapping[str, UserConfigValue]]],
        run_config: Mapping[str, UserConfigValue] | None = None,
        tamper: Tamper | None = None,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.apps: dict[int, ClientApp] = {}
        self.contexts: dict[int, Context] = {}
        self.run_config = dict(run_config or {})
        self.tamper: Tamper = tamper or (lambda node, message, reply: [reply])
        self.pushed: list[tuple[int, str]] = []
        self._boxes: dict[str, Message] = {}
        for node, (app, config) in nodes.items():
            self.join(node, app, config)

    def join(self, node: int, app: ClientApp, config: Mapping[str, UserConfigValue]) -> None:
        self.apps[node] = app
        self.contexts[node] = Context(1, node, dict(config), RecordDict(), dict(self.run_config))

    def leave(self, node: int) -> None:
        del self.apps[node]

    def set_run(self, run: Run) -> None:
        self.run = run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            self.pushed.append((message.metadata.dst_node_id, message.metadata.message_type))
            ids.append(f"message-{len(self.pushed)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._boxes[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        messages = [self._boxes.pop(each) for each in message_ids if each in self._boxes]
        return [reply for message in messages for reply in self._deliver(message)]

    def _deliver(self, message: Message) -> Iterable[Message]:
        node = message.metadata.dst_node_id
        if node not in self.apps:
            return [Message(Error(5, "the node is not available"), reply_to=message)]
        context = deepcopy(self.contexts[node])
        try:
            reply = self.apps[node](message, context)
        except Exception as error:  # as Flower does: the server learns of it, the context stays as it was
            return [Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)]
        self.contexts[node] = context
        return list(self.tamper(node, message, reply))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(list(self.push_messages(messages)))
