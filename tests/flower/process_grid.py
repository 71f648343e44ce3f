"""A grid whose nodes are processes: they train at the same time, may sleep, and may be killed."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from flashfl.data.task import Task
from flashfl.flower import client_app
from flashfl.flower.testing import InProcessGrid


def serve(connection: Connection, task: Task, client: int, fault: str) -> None:
    """A node: answers one message after another. A faulty one sleeps or dies when it is told to train."""
    app, context = client_app(task), Context(1, client, {"partition-id": client}, RecordDict(), {})
    while True:
        message: Message = connection.recv()
        if message.metadata.message_type == "train" and fault == "sleeps":
            time.sleep(3600)
        if message.metadata.message_type == "train" and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        try:
            connection.send(app(message, context))
        except Exception as error:
            connection.send(Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message))


class ProcessGrid(InProcessGrid):
    """One process for each client of a task. A dead node stays in the list of nodes: the worst case."""

    def __init__(self, task: Task, faults: dict[int, str]) -> None:
        super().__init__({})
        self.processes: dict[int, Any] = {}
        self.lines: dict[int, Connection] = {}
        self.replies: list[Message] = []
        context = mp.get_context("fork")
        for client in task.clients:
            ours, theirs = context.Pipe()
            args = (theirs, task, client.id, faults.get(client.id, ""))
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()
            node = 1000 + client.id
            self.processes[node], self.lines[node] = process, ours
            self.join(node, client_app(task), {"partition-id": client.id})

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = list(super().push_messages(messages))
        for message in (self._boxes.pop(each) for each in ids):
            with contextlib.suppress(OSError):
                self.lines[message.metadata.dst_node_id].send(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for line in self.lines.values():
            with contextlib.suppress(OSError, EOFError):
                while line.poll():
                    self.replies.append(line.recv())
        wanted = set(message_ids)
        found = [reply for reply in self.replies if reply.metadata.reply_to_message_id in wanted]
        self.replies = [reply for reply in self.replies if reply.metadata.reply_to_message_id not in wanted]
        return found

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
