"""Who holds which samples. Every scheme is a pure function of the labels (or ids), the number of clients and a key.

A partition is one sorted int64 array of sample indices for each client. No client is empty, and together they hold
every sample once. Two schemes drop samples when there are too few clients for all: `natural` then chooses among the
ids, `shards` among the classes.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError, DataError, check_range, unknown

Ints = NDArray[np.int64]
Partition = list[Ints]
_UNIFORM = 100.0  # from this alpha on, LDA counts as uniform
_EQUAL = 1e6  # from this alpha on, all clients of a Dirichlet split get the same; one cannot draw with infinity


def split(
    scheme: str,
    labels: Ints,
    clients: int,
    key: int,
    *,
    alpha: float = 1.0,
    classes_per_client: int = 2,
    ids: Ints | None = None,
) -> Partition:
    """The partition that a scheme makes, by its name."""
    schemes: dict[str, Callable[[], Partition]] = {
        "lda": lambda: lda(labels, clients, key, alpha),
        "dirichlet": lambda: dirichlet(labels, clients, key, alpha),
        "shards": lambda: shards(labels, clients, key, classes_per_client),
        "natural": lambda: natural(ids, clients, key),
        "iid": lambda: iid(len(labels), clients, key),
    }
    if scheme not in schemes:
        raise unknown("partition", scheme, schemes)
    return schemes[scheme]()


def _rng(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key))


def _check(clients: int, samples: int, what: str = "samples") -> None:
    check_range(f"[1, {samples}]", f"There are {samples} {what}", clients=clients)


def _pools(labels: Ints, rng: np.random.Generator) -> list[Ints]:
    """The samples of each class that occurs, in random order."""
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.unique(labels, return_counts=True)[1]
    return np.split(order, np.cumsum(counts)[:-1])


def _sizes(total: int, parts: int) -> Ints:
    """`total` in `parts` whole numbers that differ by at most one."""
    return np.diff(np.arange(parts + 1, dtype=np.int64) * total // parts)


def iid(samples: int, clients: int, key: int) -> Partition:
    """A uniformly random split into sizes that differ by at most one."""
    _check(clients, samples)
    order = _rng(key).permutation(samples).astype(np.int64)
    return [np.sort(part) for part in np.split(order, np.cumsum(_sizes(samples, clients))[:-1])]


def lda(labels: Ints, clients: int, key: int, alpha: float = 1.0) -> Partition:
    """Latent Dirichlet allocation with equal shares: sizes differ by at most one.

    Each client in turn draws class proportions from Dirichlet(alpha), then its samples without replacement. The
    proportions are renormalised over the classes that still have samples. The turns are in random order, so that a
    client's number does not say whether it takes the leftovers. An alpha of 100 or more counts as uniform.
    """
    _check(clients, len(labels))
    check_range("(0, inf]", alpha=alpha)
    if alpha >= _UNIFORM:
        return iid(len(labels), clients, key)
    rng = _rng(key)
    pools = _pools(labels, rng)
    left = np.array([len(pool) for pool in pools])
    shares = rng.dirichlet(np.full(len(pools), alpha), size=clients)
    sizes = _sizes(len(labels), clients)
    parts: Partition = [np.empty(0, dtype=np.int64)] * clients
    for client in rng.permutation(clients):
        taken = _draw(shares[client], left, int(sizes[client]), rng)
        ends = zip(pools, left, taken, strict=True)
        parts[client] = np.sort(np.concatenate([pool[rest - count : rest] for pool, rest, count in ends]))
        left = left - taken
    return parts


def _draw(share: NDArray[np.float64], left: Ints, count: int, rng: np.random.Generator) -> Ints:
    """How many samples of each class a client takes.

    All draws are made at once. Those that ask for more than a class has are drawn again from the other classes: the
    same as drawing one sample after another and renormalising each time.
    """
    taken = np.zeros_like(left)
    while count:
        open_share = np.where(taken < left, share, 0.0)
        if open_share.sum() <= 0:  # none of the classes this client likes has samples left
            open_share = (left - taken).astype(np.float64)
        new = np.minimum(taken + rng.multinomial(count, open_share / open_share.sum()), left)
        count -= int((new - taken).sum())
        taken = new
    return taken


def dirichlet(labels: Ints, clients: int, key: int, alpha: float = 1.0) -> Partition:
    """The unbalanced split: each class is cut over the clients by its own draw from Dirichlet(alpha).

    A client that would be empty gets one sample from the client that has most.
    """
    _check(clients, len(labels))
    check_range("(0, inf]", alpha=alpha)
    rng = _rng(key)
    owner = np.empty(len(labels), dtype=np.int64)
    for pool in _pools(labels, rng):
        ends = np.cumsum(rng.dirichlet(np.full(clients, min(alpha, _EQUAL))))
        owner[pool] = np.searchsorted(ends[:-1], (np.arange(len(pool)) + 0.5) / len(pool))
    held = np.bincount(owner, minlength=clients)
    for client in np.flatnonzero(held == 0):
        richest = int(np.argmax(held))
        owner[rng.choice(np.flatnonzero(owner == richest))] = client
        held[richest] -= 1
        held[client] = 1
    return _by_owner(owner, clients)


def _by_owner(owner: Ints, clients: int) -> Partition:
    order = np.argsort(owner, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def natural(ids: Ints | None, clients: int, key: int) -> Partition:
    """One client for each id (a writer, a user), in order. 0 clients: all ids; fewer: a random choice."""
    if ids is None:
        raise ConfigError("this data set does not say who made each sample: choose another partition than 'natural'")
    names, owner = np.unique(ids, return_inverse=True)
    clients = clients or len(names)
    _check(clients, len(names), "writers or users; 0 takes them all")
    parts = _by_owner(owner.reshape(-1), len(names))
    if clients == len(names):
        return parts
    return [parts[i] for i in np.sort(_rng(key).choice(len(names), clients, replace=False))]


def shards(labels: Ints, clients: int, key: int, classes_per_client: int = 2) -> Partition:
    """The pathological split: each client holds samples of at most `classes_per_client` classes.

    Every class is cut into shards in proportion to its size: in all, clients times classes a client. Each client takes
    shards of the classes that have most left, ties broken at random, so its shards are of different classes wherever
    that is possible. With more classes than shards, some classes are dropped.
    """
    _check(clients, len(labels))
    rng = _rng(key)
    pools = _pools(labels, rng)
    wanted = clients * classes_per_client
    most = len(labels) // clients
    check_range(f"[1, {most}]", f"Each client has {most} samples", classes_per_client=classes_per_client)
    if wanted < len(pools):
        pools = [pools[i] for i in np.sort(rng.choice(len(pools), wanted, replace=False))]
    cuts = _cut(np.array([len(pool) for pool in pools]), wanted)
    pieces = [np.array_split(pool, n) for pool, n in zip(pools, cuts, strict=True)]
    parts: Partition = []
    for _ in range(clients):
        left = np.array([len(rest) for rest in pieces])
        mine: list[Ints] = []
        for label in np.lexsort((rng.random(len(left)), -left))[:classes_per_client]:
            if pieces[label]:
                mine.append(pieces[label].pop())
        while len(mine) < classes_per_client:
            mine.append(max(pieces, key=len).pop())
        parts.append(np.sort(np.concatenate(mine)))
    return parts


def _cut(sizes: Ints, wanted: int) -> Ints:
    """How many shards each class is cut into: at least one, with the smallest shard as large as possible."""
    cuts = np.ones_like(sizes)
    for _ in range(wanted - len(sizes)):
        cuts[np.argmax(sizes / (cuts + 1))] += 1
    return cuts


def save(partition: Partition, path: str | Path, labels: Ints) -> None:
    """Write a partition of the samples with these labels as an .npz file, under exactly the name given."""
    ends = np.cumsum([len(part) for part in partition])
    with open(path, "wb") as file:
        np.savez_compressed(file, index=np.concatenate(partition), ends=ends, **_fingerprint(labels))


def load(path: str | Path, labels: Ints) -> Partition:
    """A saved partition of the samples with these labels."""
    try:
        with zipfile.ZipFile(path) as file:
            if sum(member.file_size for member in file.infolist()) > 16 * len(labels) + 4096:
                raise ValueError("it is too large")
        with np.load(path, allow_pickle=False) as stored:
            held = dict(stored)
        index, ends = (held[name].astype(np.int64, casting="safe").ravel() for name in ("index", "ends"))
        parts = np.split(index, ends[:-1])
        known = _fingerprint(labels)
        if any(name in held and not np.array_equal(held[name], value) for name, value in known.items()):
            raise ValueError("it was saved for other samples or other labels")
        whole = ends[-1] == len(index) and all(map(len, parts))
        if not whole or index.min() < 0 or index.max() >= len(labels) or len(np.unique(index)) != len(index):
            raise ValueError("a client is empty, or an index is out of range or occurs twice")
    except Exception as error:  # numpy raises many kinds for files that are not its own
        raise DataError(
            f"{path} is not a saved partition of these {len(labels)} samples: {error}. "
            "To make one: flashfl data partition DATASET --clients N --save FILE.npz"
        ) from None
    return parts


def _fingerprint(labels: Ints) -> dict[str, Any]:
    """How a saved partition knows its data set; older files have none of this."""
    digest = hashlib.blake2b(labels.astype("<i8").tobytes(), digest_size=8).digest()
    return {"known_samples": np.array(len(labels)), "known_labels": np.frombuffer(digest, dtype=np.uint8)}


def histogram(partition: Partition, labels: Ints, classes: int) -> Ints:
    """How many samples of each class each client holds: clients by classes."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in partition]).astype(np.int64)
