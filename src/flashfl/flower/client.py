"""The client's half as a Flower ClientApp: messages in, answers out, memory in the context's state."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from . import records
from .messages import Answer, Held, NodeContext

if TYPE_CHECKING:
    from flwr.clientapp.typing import Mod

    from ..data.task import Task
    from .host import TaskFn

Serve = Callable[[str, NodeContext, bytes, Held], Answer]
_ROUNDS, _MASKS = "flashfl.rounds", "flashfl.masks"  # the names of our records in a context's state


def client_app(task: Task | TaskFn | str, mods: list[Mod] | None = None) -> ClientApp:
    """A ClientApp that trains `task`.

    task: a Task, or a function that makes one from a context (`node_config`, `run_config`, `run_id`), or, best, the
    name of such a function: "module:function". If the task has one client, the node is that client. If it has several,
    `partition-id` says which client the node is. The node's settings may also give `client-id` (default: the
    partition), `density` and `threads`.

    A process makes the task once and keeps it for the run, with the model and the data. In a deployment Flower starts
    a process for every message. If the task is given by name, a worker process keeps it between messages. The node's
    setting `worker=false` turns the worker off.
    """

    def serve(kind: str, node: NodeContext, data: bytes, held: Held) -> Answer:
        if isinstance(task, str) and _brief() and node.node_config.get("worker", True):
            from .worker import ask

            if (answer := ask(task, kind, node, data, held)) is not None:
                return answer
        from .host import find
        from .worker import resolve

        return find(resolve(task) if isinstance(task, str) else task, node).serve(kind, node, data, held)

    return app_around(serve, mods)


def _brief() -> bool:
    """Whether this process lives for one message only, as Flower's own for ClientApps do."""
    return Path(sys.argv[0]).name == "flwr-clientapp"


def app_around(serve: Serve, mods: list[Mod] | None = None) -> ClientApp:
    """A ClientApp that answers with what `serve` returns."""
    app = ClientApp(mods=mods)

    def answer(kind: str, message: Message, context: Context) -> Message:
        node = NodeContext(dict(context.node_config), dict(context.run_config), context.run_id)
        data = b"" if kind == "query" else records.read_blob(message.content, "order")[1]
        return reply_to(message, context, serve(kind, node, data, recall(context.state)))

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return answer("query", message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer("train", message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer("evaluate", message, context)

    return app


def reply_to(message: Message, context: Context, answer: Answer) -> Message:
    """An answer as a Flower message. What the client must remember goes into its state."""
    if answer.held is not None:
        remember(context.state, answer.held)
    if answer.kind in ("update", "lack"):
        return Message(records.blob(answer.kind, answer.data), reply_to=message)
    return Message(records.fields(answer.kind, answer.fields), reply_to=message)


def recall(state: RecordDict) -> Held:
    """What was remembered; nothing if the records are damaged."""
    rounds, masks = state.get(_ROUNDS), state.get(_MASKS)
    if not isinstance(rounds, ConfigRecord) or not isinstance(masks, ArrayRecord):
        return Held()
    try:
        memory = [((tag[0], tag[1], tag[2]), order, own) for tag, order, own in json.loads(str(rounds["rounds"]))]
        return Held(memory, {digest: records.read_array(array) for digest, array in masks.items()})
    except (KeyError, IndexError, ValueError, TypeError, records.BadRecord):
        return Held()


def remember(state: RecordDict, held: Held) -> None:
    """Keep rounds and masks for the next message."""
    state[_ROUNDS] = ConfigRecord({"rounds": json.dumps(held.memory)})
    state[_MASKS] = ArrayRecord({digest: records.to_array(data) for digest, data in held.masks.items()})
