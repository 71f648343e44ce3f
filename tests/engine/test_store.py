"""Masks on disk by hash, updates spooled as bytes: what comes back is what was put."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from flashfl.core.errors import CheckpointError
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask
from flashfl.engine.memories import Memories
from flashfl.engine.spool import Spool
from flashfl.engine.store import MaskStore
from flashfl.sparsity import random_mask
from flashfl.wire import ServerLedger

LAYOUT = Layout.build({"prunable": [("a", (7, 3)), ("b", (16,))], "dense": [("c", (2,))]})


def mask(key: int) -> Mask:
    return random_mask(LAYOUT, (9, 4), key)


def test_round_trip(tmp_path: Path) -> None:
    store = MaskStore(LAYOUT, tmp_path / "masks")
    hashes = [store.put(mask(i)) for i in range(5)]
    fresh = MaskStore(LAYOUT, tmp_path / "masks")
    assert len(fresh) == 5
    assert set(fresh) == set(hashes)
    for i, digest in enumerate(hashes):
        assert digest == mask(i).hash
        assert digest in fresh
        assert torch.equal(fresh[digest].bits, mask(i).bits)
        assert fresh[digest] is fresh[digest], "read once, then remembered"
    assert not list(tmp_path.glob("masks/*.[0-9]*")), "nothing partial is left"


def test_the_same_mask_is_one_file(tmp_path: Path) -> None:
    store = MaskStore(LAYOUT, tmp_path)
    assert store.put(mask(1)) == store.put(Mask(LAYOUT, mask(1).bits.clone()))
    assert len(store) == 1


def test_what_is_not_there_is_a_key_error(tmp_path: Path) -> None:
    store = MaskStore(LAYOUT, tmp_path)
    with pytest.raises(KeyError):
        store["0" * 16]
    assert "0" * 16 not in store
    assert 7 not in store


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    digest = MaskStore(LAYOUT, tmp_path).put(mask(1))
    path = tmp_path / f"{digest}.mask"
    data = path.read_bytes()
    path.write_bytes(
        {"flip": bytes([data[0] ^ 4]) + data[1:], "cut": data[:-1], "empty": b"", "longer": data + b"\0"}[damage]
    )
    with pytest.raises(CheckpointError, match="is damaged"):
        MaskStore(LAYOUT, tmp_path)[digest]


def test_keep_only_what_is_named(tmp_path: Path) -> None:
    store = MaskStore(LAYOUT, tmp_path)
    hashes = [store.put(mask(i)) for i in range(4)]
    store.keep_only([hashes[1], "unheard of"])
    assert set(store) == {hashes[1]}
    with pytest.raises(KeyError):
        store[hashes[0]]


def test_a_mask_that_another_process_dropped_is_written_again(tmp_path: Path) -> None:
    """Workers keep a store of their own in the same folder, and the server tidies it."""
    worker, server = MaskStore(LAYOUT, tmp_path), MaskStore(LAYOUT, tmp_path)
    digest = worker.put(mask(1))
    server.keep_only([])
    assert worker.put(mask(1)) == digest
    assert torch.equal(server[digest].bits, mask(1).bits)


def test_only_so_many_are_held_in_memory(tmp_path: Path) -> None:
    store = MaskStore(LAYOUT, tmp_path, cache_bytes=3 * LAYOUT.prunable_size)
    hashes = [store.put(mask(i)) for i in range(10)]
    assert list(store._cache) == hashes[-3:]
    assert torch.equal(store[hashes[0]].bits, mask(0).bits)
    assert len(store._cache) == 3


def test_a_store_without_a_folder_cleans_up_after_itself() -> None:
    store = MaskStore(LAYOUT)
    folder = store.folder
    store.put(mask(1))
    assert folder.exists()
    store._finalizer()
    assert not folder.exists()


def test_memories_are_saved_as_they_were_when_marked(tmp_path: Path) -> None:
    """A run interrupted in the middle of a round is saved as it was before that round."""
    memories, ledger = Memories(MaskStore(LAYOUT, tmp_path)), ServerLedger(LAYOUT)
    first, second = mask(1), mask(2)

    def round_(number: int, own: Mask) -> None:
        ledger.accept(0, (2, number, 0), own, own)
        memories.update({0: [((2, number, 0), memories.store.put(own), memories.store.put(own))]})

    round_(0, first)
    memories.mark(ledger)
    before = memories.save(ledger)
    round_(1, second)
    assert memories.save(ledger) == before
    memories.forget(set())
    assert first.hash in memories.store, "what is marked is needed"
    memories.mark(ledger)
    assert memories.save(ledger) != before

    other, copy = Memories(MaskStore(LAYOUT, tmp_path)), ServerLedger(LAYOUT)
    other.restore(before, copy)
    assert copy.start(0) == (2, 0, 0)
    own = copy.own(0)
    assert own is not None
    assert own.equal(first)


def test_lost_masks_are_warned_of_and_nothing_is_believed_of_clients(tmp_path: Path) -> None:
    memories, ledger = Memories(MaskStore(LAYOUT, tmp_path)), ServerLedger(LAYOUT)
    ledger.accept(0, (2, 0, 0), mask(1), mask(1))
    saved = memories.save(ledger)
    for path in tmp_path.glob("*.mask"):
        path.unlink()
    other, copy = Memories(MaskStore(LAYOUT, tmp_path)), ServerLedger(LAYOUT)
    with pytest.warns(RuntimeWarning, match="they are sent full masks again"):
        other.restore(saved, copy)
    assert copy.start(0) is None


@pytest.mark.parametrize("memory", [1 << 20, 100])
def test_a_spool_gives_back_what_was_put_in_any_order(memory: int, tmp_path: Path) -> None:
    spool = Spool(memory, tmp_path / "new")
    blocks = {i: os.urandom(17 * i) for i in (5, 1, 9, 0, 3)}
    for number, data in blocks.items():
        spool.put(number, data)
    for number in sorted(blocks):
        assert spool.get(number) == blocks[number]
    spool.put(4, b"late")
    assert spool.get(4) == b"late"
    assert spool.get(9) == blocks[9]
    assert 9 in spool
    assert 77 not in spool
    spool.put("own 9", b"by name")
    assert spool.get("own 9") == b"by name"
    assert not list((tmp_path / "new").iterdir()), "the file has no name, so it cannot be left behind"
    with pytest.raises(KeyError):
        spool.get(77)
    spool.close()
