"""On the path of a node's Python, this makes it a rogue: its updates are damaged or not finite."""

import os

from flashfl.flower import client, records
from flashfl.wire.frame import seal

_honest = client.app_around


def _spoiled(data: bytes, number: int) -> bytes:
    middle = len(data) // 2
    if number % 2:  # 64 bytes that are NaN wherever a float begins, with a valid checksum
        return seal(data[:middle] + b"\xff" * 64 + data[middle + 64 :])
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def app_around(serve, mods=None):  # type: ignore[no-untyped-def]
    """The honest app, whose updates are spoiled in one of two ways in turn."""

    def spoiling(message, context):  # type: ignore[no-untyped-def]
        reply = serve(message, context)
        if "update" in reply:
            number = int(message.metadata.group_id.split(".")[1])
            reply = records.blob("update", _spoiled(records.read_blob(reply, "update")[1], number))
            print("ROGUE", os.getpid(), number, flush=True)
        return reply

    return _honest(spoiling, mods)


client.app_around = app_around
