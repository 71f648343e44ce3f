"""Every loader, on small files in the published form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import published
import pytest
import torch
from published import load

from flashfl.core.errors import ConfigError, DataError
from flashfl.data.dataset import DataSet, Options
from flashfl.data.registry import DATASETS
from flashfl.data.tasks import TaskConfig, load_data

UNCHECKED = Options(verify=False)


def check(data: DataSet, train: int, test: int) -> None:
    assert len(data.train) == train
    assert data.test is not None
    assert len(data.test) == test
    for held in (data.train, data.test):
        (x, *_), y = held.fetch(torch.arange(len(held)), key=1)
        assert x.shape[1:] == data.shape
        assert y.dtype == torch.int64
        assert y.min() >= 0
        assert y.max() < data.classes


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
def test_mnist(tmp_path: Path, zipped: bool, folder: str) -> None:
    made = published.mnist(tmp_path / folder, zipped=zipped)
    data = load("mnist", tmp_path, UNCHECKED)
    check(data, 40, 10)
    assert np.array_equal(data.train.inputs[0].numpy()[:, 0], made["train"])
    assert np.array_equal(data.labels, made["train-labels"])
    assert data.train.inputs[0].dtype == torch.uint8


def test_fashion_mnist(tmp_path: Path) -> None:
    published.mnist(tmp_path / "fashion-mnist")
    check(load("fashion-mnist", tmp_path), 40, 10)


def test_mnist_by_writer(tmp_path: Path) -> None:
    made = published.mnist(tmp_path / "mnist")
    published.qmnist(tmp_path / "qmnist", made["train-labels"], np.arange(40) % 7)
    data = load("mnist-writers", tmp_path, UNCHECKED)
    check(data, 40, 10)
    assert data.writers is not None
    assert data.writers.tolist() == [i % 7 for i in range(40)]


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("write", [published.cifar_python, published.cifar_binary])
def test_cifar(tmp_path: Path, classes: int, write: object) -> None:
    made = write(tmp_path, classes)  # type: ignore[operator]
    data = load(f"cifar{classes}", tmp_path, UNCHECKED)
    check(data, 6 * (len(made) - 1), 6)
    assert data.test is not None
    assert np.array_equal(data.train.inputs[0].numpy().reshape(-1, 3072), np.concatenate(made[:-1]))
    assert np.array_equal(data.test.inputs[0].numpy().reshape(-1, 3072), made[-1])
    config = TaskConfig(f"cifar{classes}", data_root=str(tmp_path), verify=False, augment=False)
    assert data.train.augment is not None
    assert load_data(config).train.augment is None
    assert data.test.augment is None


def test_tiny_imagenet_is_decoded_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    folder = published.tiny_imagenet(tmp_path)
    data = load("tinyimagenet", tmp_path)
    check(data, 12, 3)
    assert data.classes == 3
    means = data.train.inputs[0].float().mean((1, 2, 3))
    assert torch.allclose(means, data.train.target * 40.0, atol=2)
    assert len(list((folder / ".flashfl-cache").glob("*.npy"))) == 2
    monkeypatch.setattr("flashfl.data.loaders.tinyimagenet.read_picture", None)  # a second decoding would fail
    again = load("tinyimagenet", tmp_path)
    assert torch.equal(again.train.inputs[0], data.train.inputs[0])


def test_tiny_imagenet_is_read_again_when_files_change(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    folder = published.tiny_imagenet(tmp_path)
    load("tinyimagenet", tmp_path)
    published.picture(folder / "train" / "n01" / "images" / "n01_9.JPEG", (1, 2, 3))
    assert len(load("tinyimagenet", tmp_path).train) == 13
    published.picture(folder / "train" / "n01" / "images" / "n01_9.JPEG", (200, 200, 200))
    assert load("tinyimagenet", tmp_path).train.inputs[0][8].min() > 190
    (folder / "val" / "images" / "val_1.JPEG").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"val_1\.JPEG is damaged"):
        load("tinyimagenet", tmp_path)


def test_femnist_is_read_again_when_files_change(tmp_path: Path) -> None:
    published.leaf(tmp_path)
    load("femnist", tmp_path)
    file = next((tmp_path / "femnist" / "train").glob("*_1_*.json"))
    held = json.loads(file.read_text())
    y = held["user_data"][held["users"][-1]]["y"]
    y.append(y.pop(0))
    file.write_text(json.dumps(held))  # of the same size
    assert load("femnist", tmp_path).labels[-4:].tolist() == y
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(DataError, match="expected JSON from LEAF"):
        load("femnist", tmp_path)


def test_cache_of_unwritable_folder_goes_to_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    folder = published.tiny_imagenet(tmp_path / "data")
    (folder / ".flashfl-cache").write_text("in the way")  # even root cannot make a folder here
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(load("tinyimagenet", tmp_path / "data"), 12, 3)
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 2
    (tmp_path / "nowhere").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))
    check(load("tinyimagenet", tmp_path / "data"), 12, 3)


@pytest.mark.parametrize("left", [0, 9, 500])
def test_broken_cache_is_made_again(tmp_path: Path, left: int) -> None:
    pytest.importorskip("PIL")
    folder = published.tiny_imagenet(tmp_path)
    load("tinyimagenet", tmp_path)
    for file in (folder / ".flashfl-cache").glob("*.npy"):
        file.write_bytes(file.read_bytes()[:left])
    check(load("tinyimagenet", tmp_path), 12, 3)


def test_femnist(tmp_path: Path) -> None:
    published.leaf(tmp_path)
    for _ in range(2):  # from JSON, then from the kept arrays
        data = load("femnist", tmp_path)
        check(data, 20, 5)
        assert data.writers is not None
        assert np.bincount(data.writers).tolist() == [4] * 5
    (x,), _ = data.train.fetch(torch.arange(20))
    assert 0 <= x.min() < 0.05
    assert 0.95 < x.max() <= 1


def test_sst2_with_words(tmp_path: Path) -> None:
    published.sst2(tmp_path)
    data = load("sst2", tmp_path, Options(length=8, vocab_size=9))
    assert (len(data.train), data.classes, data.shape, data.vocab) == (4, 2, (8,), 9)
    (ids, mask), y = data.train.fetch(torch.arange(4))
    assert y.tolist() == [1, 0, 0, 1]
    assert ids[0].tolist() == [2, *ids[0, 1:4].tolist(), 3, 0, 0, 0]
    assert mask[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert ids[2, 1] == 1  # a rare word is unknown


def test_sst2_with_pieces(tmp_path: Path) -> None:
    published.sst2(tmp_path)
    vocab = published.vocabulary(tmp_path / "bert")
    data = load("sst2", tmp_path, Options(length=7, vocab=str(vocab)))
    (ids, _), _ = data.train.fetch(torch.arange(4))
    assert data.vocab == 13
    assert ids[0].tolist() == [2, 4, 5, 6, 3, 0, 0]
    assert ids[1].tolist() == [2, 4, 10, 12, 10, 11, 3]  # cut to fit
    assert ids[2].tolist() == [2, 7, 8, 9, 3, 0, 0]


@pytest.mark.parametrize("split", [True, False])
def test_image_folder(tmp_path: Path, split: bool) -> None:
    pytest.importorskip("PIL")
    for part in ("train", "val") if split else ("",):
        for i, name in enumerate(("cat", "dog")):
            for j in range(3):
                published.picture(tmp_path / part / name / f"{j}.png", (100 * i, 0, 0), (10, 10))
    data = load(f"folder:{tmp_path}", tmp_path)
    assert data.shape == (3, 10, 10)
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (data.test is None) is not split
    assert load(f"folder:{tmp_path}", tmp_path, Options(size=6)).shape == (3, 6, 6)


def test_image_folder_skips_hidden_files_and_folders(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for name in ("cat", "dog"):
        published.picture(tmp_path / name / "1.png", (1, 1, 1), (8, 8))
    (tmp_path / "cat" / "._1.png").write_bytes(b"\x00\x05\x16\x07 of a Mac")
    published.picture(tmp_path / "cat" / ".thumbnails" / "1.png", (1, 1, 1), (2, 2))
    (tmp_path / "cat" / "more.png").mkdir()
    assert len(load(f"folder:{tmp_path}", tmp_path).train) == 2


@pytest.mark.parametrize("mode", ["I;16", "I"])
def test_16_bit_grey_images_are_scaled_to_8_bits(tmp_path: Path, mode: str) -> None:
    pil = pytest.importorskip("PIL.Image")
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        image = pil.fromarray(grey if mode == "I;16" else grey.astype(np.int32))
        assert image.mode == mode
        image.save(tmp_path / name / "1.tiff")
    pixels = load(f"folder:{tmp_path}", tmp_path).train.inputs[0].numpy()
    assert np.array_equal(pixels, np.broadcast_to(grey // 257, (2, 3, 16, 16)))


def test_8_bit_grey_images_in_wider_type_are_unchanged(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    grey = np.arange(256, dtype=np.int32).reshape(16, 16)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        pil.fromarray(grey).save(tmp_path / name / "1.tiff")
    pixels = load(f"folder:{tmp_path}", tmp_path).train.inputs[0].numpy()
    assert np.array_equal(pixels, np.broadcast_to(grey, (2, 3, 16, 16)))


def test_digits() -> None:
    data = load("digits", Path("nowhere"))
    check(data, 1437, 360)
    (x,), _ = data.train.fetch(torch.arange(1437))
    assert abs(x.mean().item()) < 0.02
    assert abs(x.std().item() - 1) < 0.02
    assert np.bincount(data.labels, minlength=10).min() > 120


def test_unknown_data_set_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        load("cifar-10", Path())


def test_presence_of_data_sets_is_found_without_reading(tmp_path: Path) -> None:
    assert [name for name, info in DATASETS.items() if not info.files.absent(tmp_path)] == ["digits"]
    published.mnist(tmp_path / "mnist")
    assert not DATASETS["mnist"].files.absent(tmp_path)
    assert DATASETS["mnist-writers"].files.absent(tmp_path) == ["qmnist/qmnist-train-labels-idx2-int"]
    published.cifar_binary(tmp_path, 100)
    assert not DATASETS["cifar100"].files.absent(tmp_path)
    for info in DATASETS.values():
        assert info.about
        assert info.files.get or not info.files.forms[0]
