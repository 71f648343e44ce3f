"""The client's half as a Flower ClientApp: messages in, the host's answers out, memory in the context's state."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from . import records
from .exchange import Answer, Held, Seat

if TYPE_CHECKING:
    from ..data.task import Task
    from .host import TaskFn

Serve = Callable[[str, Seat, bytes, Held, Context], Answer]
_ROUNDS, _MASKS = "flashfl.rounds", "flashfl.masks"  # the names of our records in a context's state


def client_app(task: Task | TaskFn | str, mods: list[Any] | None = None) -> ClientApp:
    """A ClientApp that trains `task`.

    task: a Task; or a function from the Flower context (its node_config and run_config) to one; or, best, such a
    function by name, "module:function". A task of one client is this node's own; of a task of several the node plays
    the one its `partition-id` names. The node's settings may also say `client-id` (else the partition is the id),
    `density` and `threads`.

    A task is made once in a process and kept for the run, with the model and the data. Where Flower starts a process
    for every message, as it does in a deployment, a task given by name is kept by a worker process beside it; the
    node's setting `worker=false` does without.
    """

    def serve(kind: str, seat: Seat, data: bytes, held: Held, context: Context) -> Answer:
        if isinstance(task, str) and _brief() and seat.node.get("worker", True):
            from .worker import ask

            if (answer := ask(task, kind, seat, data, held)) is not None:
                return answer
        from .host import find
        from .worker import resolve

        return find(resolve(task) if isinstance(task, str) else task, seat, context).serve(kind, seat, data, held)

    return app_around(serve, mods)


def _brief() -> bool:
    """Whether this process lives for one message only, as Flower's own for ClientApps do."""
    return Path(sys.argv[0]).name == "flwr-clientapp"


def app_around(serve: Serve, mods: list[Any] | None = None) -> ClientApp:
    """A ClientApp whose answers are made by `serve`, wherever that does it."""
    app = ClientApp(mods=mods)

    def answer(kind: str, message: Message, context: Context) -> Message:
        seat = Seat(dict(context.node_config), dict(context.run_config), context.run_id)
        data = b"" if kind == "query" else records.read_blob(message.content, "order")[1]
        return reply_to(message, context, serve(kind, seat, data, recall(context.state), context))

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
    """An answer as Flower carries it; what the client is to remember goes into its state."""
    if answer.held is not None:
        remember(context.state, answer.held)
    if answer.kind in ("update", "lack"):
        return Message(records.blob(answer.kind, answer.data), reply_to=message)
    return Message(records.fields(answer.kind, answer.fields), reply_to=message)


def recall(state: RecordDict) -> Held:
    """What was remembered; a record that cannot be read is as good as none."""
    rounds, masks = state.get(_ROUNDS), state.get(_MASKS)
    if not isinstance(rounds, ConfigRecord) or not isinstance(masks, ArrayRecord):
        return Held()
    try:
        memory = [(tuple(tag), order, own) for tag, order, own in json.loads(str(rounds["rounds"]))]
        return Held(memory, {digest: records.read_array(array) for digest, array in masks.items()})  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError, records.BadRecord):
        return Held()


def remember(state: RecordDict, held: Held) -> None:
    """Keep rounds and masks for the next message."""
    state[_ROUNDS] = ConfigRecord({"rounds": json.dumps(held.memory)})
    state[_MASKS] = ArrayRecord({digest: records.to_array(data) for digest, data in held.masks.items()})
