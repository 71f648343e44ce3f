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

Serve = Callable[[Message, Context], RecordDict]


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

    def serve(message: Message, context: Context) -> RecordDict:
        if isinstance(task, str) and _brief() and context.node_config.get("worker", True):
            from .worker import ask

            if (reply := ask(task, message, context)) is not None:
                return reply
        from .host import find

        return find(task, context).serve(message, context)

    return app_around(serve, mods)


def _brief() -> bool:
    """Whether this process lives for one message only, as Flower's own for ClientApps do."""
    return Path(sys.argv[0]).name == "flwr-clientapp"


def app_around(serve: Serve, mods: list[Mod] | None = None) -> ClientApp:
    """A ClientApp that answers with what `serve` returns."""
    app = ClientApp(mods=mods)

    def answer(message: Message, context: Context) -> Message:
        return Message(serve(message, context), reply_to=message)

    for register in (app.query, app.train, app.evaluate):
        register()(answer)
    return app
