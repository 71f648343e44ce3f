"""On the path of a node's Python, this makes it a rogue: its updates are damaged or not finite."""

import os

from flwr.app import Message

from flashfl.flower import client, records
from flashfl.wire.frame import seal

_honest = client.reply_to


def _spoiled(data: bytes, number: int) -> bytes:
    middle = len(data) // 2
    if number % 2:  # 64 bytes that are NaN wherever a float begins, with a valid checksum
        return seal(data[:middle] + b"\xff" * 64 + data[middle + 64 :])
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def reply_to(message, context, answer):  # type: ignore[no-untyped-def]
    """The honest reply, spoiled in one of two ways in turn."""
    reply = _honest(message, context, answer)
    if answer.kind == "update":
        number = int(message.metadata.group_id.split(".")[1])
        reply = Message(records.blob("update", _spoiled(answer.data, number)), reply_to=message)
        print("ROGUE", os.getpid(), number, flush=True)
    return reply


client.reply_to = reply_to
