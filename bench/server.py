"""How many updates a second one server process takes in: decoded, checked, added to the sums and accepted.

    python bench/server.py [--against PATH_TO_OTHER_CHECKOUT] [--repeats 3] [--only jmwst]

Ten clients answer one round of ResNet18 at density 0.05. `spdst`: all have the order's mask. `jmwst`: masks moved, so
every client has its own. `dense`: every weight travels. Each is measured twice. `believed`: plain averages, as in a
simulation. `checked`: a Flower server's default, which bounds every update by the rest of the cohort.

With --against the same updates go to another checkout of the package. Each case runs in a process of its own, here and
there in turn; of its rounds the fastest counts, of the repeats the median. Seconds are processor time on one core, as
wall time on a shared machine says little; so waiting for a disk is not included. Orders and updates are encoded outside
the timed part. Needs no data. Takes about a minute a repeat and checkout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

CASES = [f"{method} {trust}" for method in ("spdst", "jmwst", "dense") for trust in ("believed", "checked")]
CLIENTS, SAMPLES, DENSITY = 10, 500, 0.05
MOVED = 0.125  # share of a layer's active weights that one epoch of prune-and-regrow replaces
ROUNDS = 5  # timed in one process, after one that is not; the fastest counts
HERE = Path(__file__).resolve().parent.parent


class Took(NamedTuple):
    """One round's intake: processor seconds, how many updates were accepted, and the sum of all sums."""

    seconds: float
    accepted: int
    total: float


# -- adapters: the only code here that knows internals --------------------------------------------------------------


def _intake_v1(method: str, trusting: bool) -> Callable[[], Took]:
    """`ServerSide` and `Inbox`: updates are decoded and checked as they arrive, then decoded again at the end."""
    from flashfl.engine.server import Inbox, ServerSide
    from flashfl.wire.trust import Trust

    from flashfl.aggregate import add
    from flashfl.core.layout import Layout
    from flashfl.core.state import Client, Local, Mask, Order, Sums, Update, Weights
    from flashfl.engine.client import update_message
    from flashfl.models import build_model
    from flashfl.sparsity import PruneRegrow, allocate, random_mask
    from flashfl.wire import encode

    torch.manual_seed(0)
    module = build_model("resnet18", classes=10, channels=3, size=32)
    layout = Layout.of(module)
    spans = [(layer.start, layer.stop) for layer in layout.prunable]
    mask = Mask.full(layout) if method == "dense" else random_mask(layout, allocate(layout, "erk", DENSITY), 7)
    mask = Mask(layout, mask.bits, mask.counts)  # without its recipe: as if it had been found by training
    local = Local(adapt=PruneRegrow() if method == "jmwst" else None)
    order = Order(Weights.masked(mask, layout.read(module)), local, 1, (2, 5, 0))
    clients = [Client(i, SAMPLES) for i in range(CLIENTS)]

    def answer(client: Client) -> bytes:
        own = Mask(layout, moved(mask.bits, spans, client.id), mask.counts) if method == "jmwst" else mask
        vector = trained(order.weights.vector, layout.trained_size, client.id)
        update = Update(client.id, client.n, Weights.masked(own, vector), own.counts, {"loss": 1.0})
        return encode(update_message(update, order, layout), (mask,)).data

    answers = {client.id: answer(client) for client in clients}

    def take() -> Took:
        server = ServerSide(layout, trust=Trust(factor=0) if trusting else Trust())
        inbox = Inbox(server)
        for client in clients:
            message = server.message(client, order)
            inbox.sent(message, server.encode(message))
        began = time.process_time()
        for client_id, data in answers.items():
            inbox.arrived(client_id, data)
        sums = Sums(layout)
        for update in inbox.updates():
            add(sums, update)
        inbox.close()
        seconds = time.process_time() - began
        assert sums.weights is not None
        return Took(seconds, sums.clients, float(sums.weights.sum()))

    return take


def _intake_v2(method: str, trusting: bool) -> Callable[[], Took]:
    """`Encoding`: updates are decoded once, as they arrive, and added without a dense vector."""
    from flashfl.core.exchange import Client, Local, Order, Update
    from flashfl.core.layout import Layout
    from flashfl.core.mask import Mask, Recipe, Weights
    from flashfl.engine import encoding
    from flashfl.engine.client import update_message
    from flashfl.engine.memory import ClientMemory
    from flashfl.engine.store import MaskStore
    from flashfl.models import build_model
    from flashfl.sparsity import PruneRegrow, allocate, recipe_mask
    from flashfl.wire import encode

    torch.manual_seed(0)
    module = build_model("resnet18", classes=10, channels=3, size=32)
    layout = Layout.of(module)
    spans = [(layer.start, layer.stop) for layer in layout.prunable]
    made = recipe_mask(layout, Recipe(7, tuple(allocate(layout, "erk", DENSITY)))) if method != "dense" else None
    # Without its recipe: as if it had been found by training.
    mask = Mask(layout, made.bits, made.counts) if made is not None else Mask.full(layout)
    local = Local(adapt=PruneRegrow() if method == "jmwst" else None)
    order = Order(Weights.masked(mask, layout.read(module)), local, 1, (2, 5, 0))
    clients = [Client(i, SAMPLES) for i in range(CLIENTS)]

    def answer(client: Client) -> bytes:
        own = Mask(layout, moved(mask.bits, spans, client.id), mask.counts) if method == "jmwst" else mask
        vector = trained(order.weights.vector, layout.trained_size, client.id)
        update = Update.of(client.id, client.n, Weights.masked(own, vector), own.counts, {"loss": 1.0})
        return encode(update_message(update, order, layout), (mask,)).data

    answers = {client.id: answer(client) for client in clients}

    def take() -> Took:
        memory = ClientMemory(MaskStore(layout, {}))
        # In earlier versions a `Server` opens the account of a round.
        server = getattr(encoding, "Server", None)
        account = server(memory, **_trust(trusting)).open() if server else encoding.Encoding(memory, **_trust(trusting))
        for client in clients:
            account.sent(client, order)
        began = time.process_time()
        for client_id, data in answers.items():
            account.received(client_id, data)
        sums = account.close().sums
        weights = sums.weights  # the flat vector is made when it is first read
        seconds = time.process_time() - began
        assert weights is not None
        return Took(seconds, sums.clients, float(weights.sum()))

    return take


def _trust(trusting: bool) -> dict[str, Any]:
    """How far a server trusts its clients, as its version of the package spells it."""
    try:
        from flashfl.engine.robust import Robust
    except ImportError:
        from flashfl.engine.trust import Trust

        return {"trust": Trust(factor=0) if trusting else Trust()}
    return {"robust": Robust() if trusting else Robust(bounded=True, clip=1.0)}


# A module that only this version of the package has, and its adapter; the first that can be imported is used.
ADAPTERS: list[tuple[str, Callable[[str, bool], Callable[[], Took]]]] = [
    ("flashfl.engine.encoding", _intake_v2),
    ("flashfl.engine.server", _intake_v1),
]


# -- what the clients send, the same for every version --------------------------------------------------------------


def moved(bits: torch.Tensor, spans: list[tuple[int, int]], client: int) -> torch.Tensor:
    """A client's own mask: some of each layer's active weights dropped at random and as many grown."""
    rng = np.random.default_rng(client)
    out = bits.numpy().copy()
    for start, stop in spans:
        layer = out[start:stop]
        on, off = np.flatnonzero(layer), np.flatnonzero(~layer)
        count = min(round(MOVED * len(on)), len(off))
        layer[rng.choice(on, count, replace=False)] = False
        layer[rng.choice(off, count, replace=False)] = True
    return torch.from_numpy(out)


def trained(vector: torch.Tensor, size: int, client: int) -> torch.Tensor:
    """A client's weights after training: the server's with some noise, statistics as they were."""
    out = vector.clone()
    out[:size] += 1e-3 * torch.randn(size, generator=torch.Generator().manual_seed(client))
    return out


# -- measuring ------------------------------------------------------------------------------------------------------


def measure(case: str) -> None:
    """In a process of its own: print updates a second and the sum of sums."""
    import flashfl

    assert Path(flashfl.__file__).is_relative_to(os.environ["PYTHONPATH"]), f"measured {flashfl.__file__}"
    torch.set_num_threads(1)
    method, trust = case.split()
    make = next(adapter for module, adapter in ADAPTERS if importlib.util.find_spec(module) is not None)
    take = make(method, trust == "believed")
    take()
    rounds = [take() for _ in range(ROUNDS)]
    accepted = {one.accepted for one in rounds}
    assert accepted == {CLIENTS}, f"{case}: {accepted} updates accepted, not {CLIENTS}"
    print(json.dumps({"rate": CLIENTS / min(one.seconds for one in rounds), "total": rounds[0].total}))


def spawn(checkout: Path, case: str) -> dict[str, float]:
    env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=checkout, check=False)
    if done.returncode:
        raise SystemExit(f"{case} failed in {checkout}:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(there: Path | None, repeats: int, only: str) -> None:
    checkouts = [HERE] if there is None else [HERE, there]
    print(f"{'case':<16}{'updates/s here':>16}" + (f"{'updates/s there':>18}{'here / there':>15}" if there else ""))
    for case in CASES:
        if only not in case:
            continue
        found = [[spawn(checkout, case) for checkout in checkouts] for _ in range(repeats)]
        rates = [median(each[i]["rate"] for each in found) for i in range(len(checkouts))]
        row = f"{case:<16}{rates[0]:>16.1f}"
        if there:
            same = found[0][0]["total"] == found[0][1]["total"]
            row += f"{rates[1]:>18.1f}{rates[0] / rates[1]:>15.2f}{'' if same else '  sums differ'}"
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="root of another checkout to compare with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    if args.against and not (args.against / "src" / "flashfl").is_dir():
        parser.error(f"--against {args.against}: expected the root of a checkout, with src/flashfl in it")
    compare(args.against and args.against.resolve(), args.repeats, args.only)


if __name__ == "__main__":
    main()
