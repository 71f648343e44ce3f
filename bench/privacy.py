"""What a secure round costs beside a plain one: bytes and seconds, for a client and for the server.

    python bench/privacy.py [--clients 10 100] [--only "spdst 0.05"] [--part 8] [--out FILE]

ResNet18's layout (11.2 million weights). Cases: dense, and SPDST's random mask at density 0.05 and 0.01. `plain`: the
order and the fp32 update of the wire format, encoded, decoded, checked and added. `secure`: all five steps with real
keys, for every client of the cohort, and the sum is compared with the plain fixed-point sum. Nobody drops out, and
nobody trains: both rounds would take the same time for that. The mask itself is known to both sides, as in all rounds
of SPDST but the first.

Bytes are those of one client, down and up. Seconds are processor time on one core, as wall time on a shared machine
says little: of one client on average, and of the server for the whole round. Takes about ten minutes, most of it for
the dense model and 100 clients. With `--part 8` every layer has an eighth of its weights, and so have the seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from flashfl.core.exchange import Client, Local, Order, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Weights
from flashfl.engine.client import update_message
from flashfl.engine.encoding import Encoding
from flashfl.engine.memory import ClientMemory
from flashfl.engine.store import MaskStore
from flashfl.models import build_model
from flashfl.privacy.client import Party, Self
from flashfl.privacy.keys import Directory, Identity
from flashfl.privacy.messages import Step, Terms
from flashfl.privacy.policy import Policy
from flashfl.privacy.server import Collector
from flashfl.privacy.vector import Packing
from flashfl.run.table import TRANSFER, transfer
from flashfl.wire import encode

CASES = {"dense": 1.0, "spdst 0.05": 0.05, "spdst 0.01": 0.01}
SAMPLES = 500
T = TypeVar("T")


@dataclass
class Row:
    """One kind of round."""

    case: str
    round: str
    clients: int
    neighbours: int
    down: int  # bytes of one client
    up: int
    client_seconds: float
    server_seconds: float


class Clock:
    """Adds up processor time by name."""

    def __init__(self) -> None:
        self.spent = {"client": 0.0, "server": 0.0}

    def __call__(self, who: str, work: Callable[[], T]) -> T:
        began = time.process_time()
        done = work()
        self.spent[who] += time.process_time() - began
        return done


def part_of(layout: Layout, part: int) -> Layout:
    """The layout with one in `part` weights of every layer."""
    if part == 1:
        return layout
    kinds = ("prunable", "dense", "statistic")
    return Layout.build(
        {kind: [(layer.name, (max(1, layer.size // part),)) for layer in layout.of_kind(kind)] for kind in kinds}
    )


def model(layout: Layout, density: float) -> Weights:
    torch.manual_seed(0)
    mask = Mask.full(layout) if density == 1 else Mask(layout, torch.rand(layout.prunable_size) < density)
    vector = 0.05 * torch.randn(layout.size)
    vector[layout.trained_size :].abs_()
    return Weights.masked(mask, vector)


def update_of(start: Weights, client: int) -> Update:
    torch.manual_seed(client + 1)
    values = start.packed() + 0.001 * torch.rand(len(start.packed()))
    return Update(client, SAMPLES, start.mask, values, start.mask.counts, {"loss": 1.0})


def account_of(layout: Layout, start: Weights, clients: int) -> Encoding:
    """The account of a round whose clients know the mask."""
    memory = ClientMemory(MaskStore.in_folder(layout, None))
    for client in range(clients):
        memory.hear(client, (2, 0, 0), memory.store.keep(start.mask))
    memory.accept()
    return Encoding(memory)


def plain(case: str, layout: Layout, start: Weights, clients: int) -> Row:
    account, clock, up, down = account_of(layout, start, clients), Clock(), 0, 0
    for client in range(clients):
        order = Order(start, Local(), 7, (2, 1, 0))
        data = clock("server", lambda c=client, o=order: account.sent(Client(c, SAMPLES), o))
        down += len(data)
        message = update_message(update_of(start, client), order, layout)
        answer = clock("client", lambda m=message: encode(m, (start.mask,)).data)
        up += len(answer)
        clock("server", lambda c=client, a=answer: account.received(c, a))
    clock("server", account.close)
    spent = clock.spent
    return Row(case, "plain", clients, 0, down // clients, up // clients, spent["client"] / clients, spent["server"])


def secure(case: str, layout: Layout, start: Weights, clients: int) -> Row:
    policy, clock, up, down = Policy(), Clock(), 0, 0
    how = Packing(layout, Local(), start.mask.active, clients)
    terms = Terms("bench", (2, 1, 0), how.length, how.bits, policy, clients)
    identities = [Identity.new() for _ in range(clients)]
    directory = Directory({client: identity.public for client, identity in enumerate(identities)})
    parties = [Party(terms, Self(c, i, directory, lambda *round: True)) for c, i in enumerate(identities)]
    collector, server = Collector(terms), account_of(layout, start, clients)
    order = Order(start, Local(), 7, (2, 1, 0))
    expected = np.zeros(how.length, f"<u{how.bits // 8}")
    packed = start.packed()
    for step in range(5):
        for client, party in enumerate(parties):
            if step == Step.MASKED:
                message = server.message(Client(client, 0), order)
                down += len(clock("server", lambda m=message: server.encode(m).data))
                update = update_of(start, client)
                numbers = clock("client", lambda u=update, c=client: how.encode(u, packed, c))
                words = numbers.numpy().astype(expected.dtype)
                expected += words
            request = clock("server", lambda c=client: collector.request(c)) if step else terms.to_bytes()
            down += len(request)
            if step == 0:
                answer = clock("client", party.advertise)
            elif step == Step.MASKED:
                answer = clock("client", lambda p=party, r=request, w=words: p.mask(r, w, b""))
            else:
                work = (None, party.share, None, party.confirm, party.unmask)[step]
                answer = clock("client", lambda w=work, r=request: w(r))  # type: ignore[misc]
            up += len(answer)
            clock("server", lambda c=client, a=answer: collector.received(c, a))
        clock("server", collector.close)
    total = clock("server", collector.opened)
    assert np.array_equal(total, expected), "the secure sum is not the plain one"
    signed = torch.from_numpy(total.view(f"<i{how.bits // 8}").astype(np.int64))
    clock("server", lambda: how.decode(signed, start, clients))
    spent, k = clock.spent, policy.neighbours(clients)[0]
    return Row(case, "secure", clients, k, down // clients, up // clients, spent["client"] / clients, spent["server"])


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    asked.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    asked.add_argument("--part", type=int, default=1, help="keep one in so many weights of every layer")
    asked.add_argument("--out", type=Path, help="add the rows to this file, as JSON lines")
    given = asked.parse_args()
    torch.set_num_threads(1)
    layout = part_of(Layout.of(build_model("resnet18", classes=10, channels=3, size=32)), given.part)
    print(f"| case | clients | round | down kB | up kB | {TRANSFER} | bytes | client s | server s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for clients in given.clients:
        for case in given.only:
            start = model(layout, CASES[case])
            rows = [plain(case, layout, start, clients), secure(case, layout, start, clients)]
            for row in rows:
                more = (row.down + row.up) / (rows[0].down + rows[0].up)
                print(
                    f"| {case} | {clients} | {row.round} | {row.down / 1e3:.1f} | {row.up / 1e3:.1f} | "
                    f"{transfer(row.down + row.up).text} | {more:.3f} | {row.client_seconds:.3f} | "
                    f"{row.server_seconds:.2f} |",
                    flush=True,
                )
                if given.out:
                    with given.out.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
