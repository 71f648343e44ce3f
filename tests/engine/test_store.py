"""Masks by hash, in a folder or a dict: what comes back is what was put, or an error that names the file."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from flashfl.core.errors import CheckpointError
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Recipe
from flashfl.engine.memory import ClientMemory
from flashfl.engine.store import Folder, MaskStore
from flashfl.sparsity import recipe_mask

LAYOUT = Layout.build({"prunable": [("a", (7, 3)), ("b", (16,))], "dense": [("c", (2,))]})


def mask(key: int) -> Mask:
    return Mask(LAYOUT, recipe_mask(LAYOUT, Recipe(key, (9, 4))).bits)


def test_round_trip_in_a_folder(tmp_path: Path) -> None:
    store = MaskStore.in_folder(LAYOUT, tmp_path / "masks")
    hashes = [store.put(mask(i)) for i in range(5)]
    fresh = MaskStore.in_folder(LAYOUT, tmp_path / "masks")
    assert len(fresh.backend) == 5
    assert set(fresh.backend) == set(hashes)
    for i, digest in enumerate(hashes):
        assert digest == mask(i).hash
        assert digest in fresh
        assert torch.equal(fresh[digest].bits, mask(i).bits)
        assert fresh[digest] is fresh[digest], "read once, then cached"
    assert not list(tmp_path.glob("masks/*.partial"))


def test_round_trip_in_a_dict() -> None:
    held: dict[str, bytes] = {}
    digest = MaskStore(LAYOUT, held).put(mask(1))
    assert list(held) == [digest]
    assert torch.equal(MaskStore(LAYOUT, dict(held))[digest].bits, mask(1).bits)
    held[digest] = held[digest][:-1]
    damaged = MaskStore(LAYOUT, held)
    with pytest.raises(CheckpointError, match=f"{digest}.mask is damaged"):
        damaged[digest]


def test_recipe_survives() -> None:
    layout = Layout.build({"prunable": [("w", (5000,))]})
    made, held = recipe_mask(layout, Recipe(3, (500,))), dict[str, bytes]()
    digest = MaskStore(layout, held).put(made)
    assert MaskStore(layout, held)[digest].recipe == made.recipe


def test_stored_mask_is_near_the_entropy_bound() -> None:
    layout = Layout.build({"prunable": [("w", (1_000_000,))]})
    bits = torch.from_numpy(np.random.default_rng(0).random(1_000_000) < 0.05)
    held: dict[str, bytes] = {}
    MaskStore(layout, held).put(Mask(layout, bits))
    d = 0.05
    bound = -1_000_000 * (d * math.log2(d) + (1 - d) * math.log2(1 - d)) / 8
    assert len(next(iter(held.values()))) < 1.03 * bound


def test_equal_masks_are_one_file(tmp_path: Path) -> None:
    store = MaskStore.in_folder(LAYOUT, tmp_path)
    assert store.put(mask(1)) == store.put(Mask(LAYOUT, mask(1).bits.clone()))
    assert len(store.backend) == 1


def test_missing_mask_is_a_key_error(tmp_path: Path) -> None:
    store = MaskStore.in_folder(LAYOUT, tmp_path)
    with pytest.raises(KeyError):
        store["0" * 16]
    assert store.find("0" * 16) is None
    assert "0" * 16 not in store
    assert 7 not in store


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer"])
def test_damaged_file_is_named_and_can_be_written_again(tmp_path: Path, damage: str) -> None:
    digest = MaskStore.in_folder(LAYOUT, tmp_path).put(mask(1))
    path = tmp_path / f"{digest}.mask"
    data = path.read_bytes()
    path.write_bytes(
        {"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-1], "empty": b"", "longer": data + b"\0"}[damage]
    )
    store = MaskStore.in_folder(LAYOUT, tmp_path)
    with pytest.raises(CheckpointError, match=f"{digest}.mask is damaged"):
        store[digest]
    assert store.put(mask(1)) == digest
    assert torch.equal(MaskStore.in_folder(LAYOUT, tmp_path)[digest].bits, mask(1).bits)


def test_content_of_another_mask_is_damage(tmp_path: Path) -> None:
    store = MaskStore.in_folder(LAYOUT, tmp_path)
    one, other = store.put(mask(1)), store.put(mask(2))
    (tmp_path / f"{one}.mask").write_bytes((tmp_path / f"{other}.mask").read_bytes())
    with pytest.raises(CheckpointError, match="does not match its name"):
        MaskStore.in_folder(LAYOUT, tmp_path)[one]


@pytest.mark.parametrize("name", ["../victim/file", "/victim/file", "", "0" * 15, "0" * 15 + "G", "0" * 16 + "\n"])
def test_only_hashes_lead_to_files(tmp_path: Path, name: str) -> None:
    """A forged checkpoint may name anything: nothing outside the folder is read, written or deleted."""
    victim = tmp_path / "victim" / "file.mask"
    victim.parent.mkdir()
    victim.write_bytes(b"precious")
    name = str(victim.with_suffix("")) if name.startswith("/") else name
    store = MaskStore.in_folder(LAYOUT, tmp_path / "masks")
    store.put(mask(1))
    for touch in (store.__getitem__, lambda name: store.sync([name]), lambda name: store.backend.__delitem__(name)):
        with pytest.raises(CheckpointError, match="is not the name of a mask"):
            touch(name)
    assert name not in store
    assert store.find(name) is None
    store.keep_only([name])
    assert victim.read_bytes() == b"precious"
    memory = ClientMemory(MaskStore.in_folder(LAYOUT, tmp_path / "masks"))
    forged = {"clients": {"0": [[2, 0, 0], 0, None, None]}, "masks": [name], "known": 1, "simulated": True}
    with pytest.raises(CheckpointError):
        memory.load(forged)
    memory.keep_only({name})
    assert victim.read_bytes() == b"precious"


def test_keep_only_deletes_other_masks(tmp_path: Path) -> None:
    store = MaskStore.in_folder(LAYOUT, tmp_path)
    hashes = [store.put(mask(i)) for i in range(4)]
    store.keep_only([hashes[1], "unheard of"])
    assert set(store.backend) == {hashes[1]}
    with pytest.raises(KeyError):
        store[hashes[0]]


def test_mask_deleted_by_another_process_is_written_again(tmp_path: Path) -> None:
    """Workers have a store of their own in the same folder, and the server tidies it."""
    worker, server = MaskStore.in_folder(LAYOUT, tmp_path), MaskStore.in_folder(LAYOUT, tmp_path)
    digest = worker.put(mask(1))
    server.keep_only([])
    assert worker.put(mask(1)) == digest
    assert torch.equal(server[digest].bits, mask(1).bits)


def test_cache_is_bounded(tmp_path: Path) -> None:
    store = MaskStore(LAYOUT, Folder(tmp_path), cache_bytes=3 * LAYOUT.prunable_size)
    hashes = [store.put(mask(i)) for i in range(10)]
    assert list(store._cache) == hashes[-3:]
    assert torch.equal(store[hashes[0]].bits, mask(0).bits)
    assert len(store._cache) == 3


def test_temporary_folder_is_removed() -> None:
    store = MaskStore(LAYOUT, Folder())
    store.put(mask(1))
    path = store.folder
    assert path is not None
    assert path.exists()
    del store
    gc.collect()
    assert not path.exists()
