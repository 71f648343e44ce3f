"""The client's half as a Flower ClientApp: messages in, answers out, memory in the context's state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

if TYPE_CHECKING:
    from flwr.clientapp.typing import Mod

    from ..data.task import Task
    from .host import TaskFn


def client_app(task: Task | TaskFn | str, mods: list[Mod] | None = None) -> ClientApp:
    """A ClientApp that trains `task`.

    task: best, the name of a function that makes a Task from Flower's context: "module:function". A worker process then
        keeps the model and the data between messages. You can also give the function itself, or a Task. Then a
        deployment makes it again for every message.

    If the task has several clients, the node's setting `partition-id` says which one the node is. docs/deploy.md lists
    the other settings of a node.
    """

    def serve(message: Message, context: Context) -> RecordDict:
        brief = Path(sys.argv[0]).name == "flwr-clientapp"  # Flower's own process, which lives for one message only
        if isinstance(task, str) and brief and context.node_config.get("worker", True):
            from .worker import ask

            if (reply := ask(task, message, context)) is not None:
                return reply
        from .host import find

        return find(task, context).serve(message, context)

    return app_around(serve, mods)


def app_around(serve: Callable[[Message, Context], RecordDict], mods: list[Mod] | None = None) -> ClientApp:
    """A ClientApp that answers with what `serve` returns."""
    app = ClientApp(mods=mods)

    def answer(message: Message, context: Context) -> Message:
        return Message(serve(message, context), reply_to=message)

    for register in (app.query, app.train, app.evaluate):
        register()(answer)
    return app
