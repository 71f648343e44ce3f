"""One test for each thing that can be wrong with a file: the error names the file and what is wrong."""

from __future__ import annotations

import gzip
import os
import pickle
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import published
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import load

from flashfl.core.errors import DataError
from flashfl.data.dataset import Options
from flashfl.data.loaders.cifar import _python

UNCHECKED = Options(verify=False)


def test_missing_file_error_says_which_where_and_how_to_get_it(tmp_path: Path) -> None:
    published.mnist(tmp_path / "mnist")
    gone = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    gone.unlink()
    with pytest.raises(DataError) as error:
        load("mnist", tmp_path)
    text = str(error.value)
    assert str(gone.with_suffix("")) in text
    assert "train-images" not in text
    assert "https://" in text
    assert "FLASHFL_DATA" in text


def broken(change: Callable[[bytes], bytes], zipped: bool = False) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        data = change(path.read_bytes() if zipped else gzip.decompress(path.read_bytes()))
        path.write_bytes(data if zipped else gzip.compress(data))

    return do


@pytest.mark.parametrize(
    ("file", "damage", "what"),
    [
        ("train-images-idx3", broken(lambda b: b"\x01" + b[1:]), "it begins with 01000803, expected 00000803"),
        ("train-images-idx3", broken(lambda b: b""), "begins with nothing"),
        ("train-images-idx3", broken(lambda b: b[:-5]), "bytes, but sizes"),
        ("train-images-idx3", broken(lambda b: b[:2] + b"\x08\x02" + b[4:]), "00000802, expected 00000803"),
        ("train-images-idx3", broken(lambda b: b[: len(b) // 2], zipped=True), "truncated"),
        ("train-images-idx3", broken(lambda b: b"not gzip at all", zipped=True), "not readable as gzip"),
        ("train-images-idx3", broken(lambda b: b + gzip.compress(b"x"), zipped=True), "more than one gzip stream"),
        ("train-labels-idx1", broken(lambda b: published.idx(np.zeros(39))), "39 labels for 40 images"),
        ("train-labels-idx1", broken(lambda b: b[:-1] + b"\x0a"), "has the label 10"),
        ("train-images-idx3", broken(lambda b: published.idx(np.zeros((40, 28, 28)), 12)), "it begins with 00000c0"),
        ("t10k-labels-idx1", broken(lambda b: published.idx(np.zeros(10), 12)), "it begins with 00000c0"),
    ],
)
def test_damaged_idx(tmp_path: Path, file: str, damage: Callable[[Path], None], what: str) -> None:
    published.mnist(tmp_path / "mnist")
    path = tmp_path / "mnist" / f"{file}-ubyte.gz"
    damage(path)
    with pytest.raises(DataError, match=what) as error:
        load("mnist", tmp_path, UNCHECKED)
    assert path.name in str(error.value)
    assert "Delete it and fetch it again" in str(error.value)


def test_published_checksums_are_compared(tmp_path: Path) -> None:
    published.mnist(tmp_path / "mnist")
    published.cifar_python(tmp_path, 100)
    with pytest.raises(DataError, match=r"train-images.*its md5 is [0-9a-f]{32}, the published file's is 6bbc9ace"):
        load("mnist", tmp_path)
    with pytest.raises(DataError, match=r"cifar-100-python.train.*its md5 is"):
        load("cifar100", tmp_path)


def peak_memory(work: Callable[[], object]) -> int:
    """The most bytes that Python and numpy held at once while `work` failed with a DataError."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="is damaged"):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_gzip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published.mnist(tmp_path / "mnist")
    file = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    head = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (90_000, 28, 28))
    file.write_bytes(gzip.compress(head + bytes(64 << 20)))
    monkeypatch.setattr("flashfl.data.files._UNPACKED", 1 << 20)
    assert peak_memory(lambda: load("mnist", tmp_path, UNCHECKED)) < 8 << 20


def test_writers_must_belong_to_the_images(tmp_path: Path) -> None:
    made = published.mnist(tmp_path / "mnist")
    published.qmnist(tmp_path / "qmnist", made["train-labels"][::-1], np.arange(40))
    with pytest.raises(DataError, match="the digits of MNIST's training images"):
        load("mnist-writers", tmp_path, UNCHECKED)
    published.qmnist(tmp_path / "qmnist", made["train-labels"][:20], np.arange(20))
    with pytest.raises(DataError, match="the digits of MNIST's training images"):
        load("mnist-writers", tmp_path, UNCHECKED)


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("protocol", [1, 2, 4])
def test_pickle_bomb_runs_nothing(tmp_path: Path, verify: bool, protocol: int) -> None:
    published.cifar_python(tmp_path, 10)
    mark = tmp_path / "went-off"
    bomb = pickle.dumps({"data": Bomb(mark), "labels": [1]}, protocol=protocol)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(bomb)
    with pytest.raises(DataError, match=r"data_batch_1 is damaged: .*(it must be a pickled dict|md5)"):
        load("cifar10", tmp_path, Options(verify=verify))
    assert not mark.exists()
    pickle.loads(bomb)  # the same bytes do go off elsewhere
    assert mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02}r\x00\x00\x00\x02.",
        b"\x80\x03B\x00\x00\x00\x10.",
        b"\x80\x05\x96" + (1 << 28).to_bytes(8, "little") + b".",
    ],
    ids=["memo", "bytes", "bytearray"],
)
def test_tiny_pickle_takes_little_memory(tmp_path: Path, data: bytes) -> None:
    """Each instruction asks for a quarter of a gigabyte or more."""
    published.cifar_python(tmp_path, 10)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(data)
    assert peak_memory(lambda: load("cifar10", tmp_path, UNCHECKED)) < 1 << 20


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_pickles_of_all_ages_are_read(tmp_path: Path, protocol: int, order: Literal["C", "F"]) -> None:
    made = np.concatenate(published.cifar_python(tmp_path, 10)[:-1])
    file = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    content = {b"labels": list(range(6)), b"names": [b"a.png"] * 6, b"data": np.asarray(made[:6], order=order)}
    file.write_bytes(published.python2(content) if protocol == 2 else pickle.dumps(content, protocol))
    data = load("cifar10", tmp_path, UNCHECKED)
    assert np.array_equal(data.train.inputs[0].numpy().reshape(-1, 3072), made)
    assert data.labels[:6].tolist() == list(range(6))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 300), byte=st.integers(0, 255), keep=st.integers(0, 7000))
def test_damaged_pickle_is_read_or_refused(tmp_path: Path, at: int, byte: int, keep: int) -> None:
    content = {b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [0, 1]}
    data = bytearray(published.python2(content)[:keep])
    data[at : at + 1] = bytes([byte])
    (tmp_path / "file").write_bytes(data)
    with suppress(DataError):
        _python(tmp_path / "file", 10)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([1, 2], "it must be a pickled dict"),
        ({b"labels": [0, 1]}, "it must be a pickled dict"),
        ({b"data": np.zeros((2, 3072), dtype=np.uint8)}, "it must be a pickled dict .*labels"),
        ({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}, "uint8 images of 3072 bytes, .*reshape"),
        ({b"data": np.zeros((2, 32, 32, 3), np.uint8), b"labels": [0, 1]}, "uint8 images of 3072 bytes, .*too many"),
        (
            {b"data": np.zeros((2, 3071), dtype=np.uint8), b"labels": [0, 1]},
            "uint8 images of 3072 bytes, .*reshape",
        ),
        ({b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [0]}, "it has 1 labels for 2 images"),
        ({b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [0, "x"]}, "1 labels for 2 images"),
        ({b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [0, 10**30]}, "1 labels for 2 images"),
        ({b"data": np.zeros((2, 3072), dtype=np.uint8), b"labels": [0, 10]}, "has the label 10"),
    ],
)
def test_damaged_cifar(tmp_path: Path, content: object, what: str) -> None:
    published.cifar_python(tmp_path, 10)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(published.python2(content))
    with pytest.raises(DataError, match=rf"data_batch_3 is damaged: .*{what}"):
        load("cifar10", tmp_path, UNCHECKED)


def test_truncated_binary_cifar(tmp_path: Path) -> None:
    published.cifar_binary(tmp_path, 10)
    file = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"test_batch\.bin is damaged: .*expected a multiple of 3073"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "what"),
    [
        ("wnids.txt", "", "line 1: expected an image name, a tab and a class that wnids.txt lists"),
        ("wnids.txt", "n00\nn09\n", "no images under .*n09"),
        ("val/val_annotations.txt", "val_0.JPEG\tn77\n", "line 1: expected an image name, a tab and a class"),
        ("val/val_annotations.txt", "val_9.JPEG\tn00\n", "val_9.JPEG is damaged: not readable .*No such file"),
        ("val/val_annotations.txt", "/etc/val_9.JPEG\tn00\n", "line 1: expected an image name, a tab and a class"),
        ("val/val_annotations.txt", "\0\tn00\n", "is damaged: not readable .*null byte"),
        ("wnids.txt", b"\xff\xfe\x00", r"wnids\.txt is damaged: not UTF-8"),
        ("val/val_annotations.txt", b"\xff\xfe\x00", r"val_annotations\.txt is damaged: not UTF-8"),
        ("val/val_annotations.txt", "", r"val_annotations\.txt is damaged: it lists no images"),
        ("val/images/val_1.JPEG", "not an image", "val_1.JPEG is damaged: not readable as an image"),
    ],
)
def test_damaged_tiny_imagenet(tmp_path: Path, file: str, text: str | bytes, what: str) -> None:
    pytest.importorskip("PIL")
    folder = published.tiny_imagenet(tmp_path)
    (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=what):
        load("tinyimagenet", tmp_path)


def test_class_listed_twice_counts_once(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    (published.tiny_imagenet(tmp_path) / "wnids.txt").write_text("n00\nn01\nn02\nn00\n")
    data = load("tinyimagenet", tmp_path)
    assert (data.classes, set(data.labels.tolist())) == (3, {0, 1, 2})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"users": ["a"], "user_data": {"a"', "expected JSON from LEAF .*JSONDecodeError"),
        ('{"users": ["a"], "user_data": {}}', "expected JSON from LEAF"),
        ("[1]", "expected JSON from LEAF"),
        ("[" * 100_000, "expected JSON from LEAF"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1, 2]], "y": [1]}}}', "expected JSON from LEAF .*cannot reshape"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [1e999]}}}', "expected JSON from LEAF .*OverflowError"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [[1, 2]]}}}', "it has 2 labels for 1 images"),
    ],
)
def test_damaged_leaf(tmp_path: Path, text: str, what: str) -> None:
    published.leaf(tmp_path)
    file = next((tmp_path / "femnist" / "train").glob("*_1_*.json"))
    file.write_text(text)
    with pytest.raises(DataError, match=what) as error:
        load("femnist", tmp_path)
    assert file.name in str(error.value)


def test_leaf_without_json(tmp_path: Path) -> None:
    published.leaf(tmp_path)
    for file in (tmp_path / "femnist" / "test").glob("*.json"):
        file.unlink()
    with pytest.raises(DataError, match=r"no all_data_.*with users"):
        load("femnist", tmp_path)


def test_leaf_without_users(tmp_path: Path) -> None:
    published.leaf(tmp_path)
    for file in (tmp_path / "femnist" / "train").glob("*.json"):
        file.write_text('{"users": [], "num_samples": [], "user_data": {}}')
    with pytest.raises(DataError, match=r"train is damaged: .*no all_data_.*with users"):
        load("femnist", tmp_path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"index\tsentence\n0\tx\n", "its first line is 'index"),
        (b"fine\t1\nbad\t0\n", "its first line is 'fine"),
        (b"", "its first line is ''"),
        (b"sentence\tlabel\n", "and then sentences"),
        (b"sentence\tlabel\nfine\t1\nbroken line\n", "line 3 does not end in a tab"),
        (b"sentence\tlabel\nfine\t2\n", "line 2 does not end in a tab"),
        (b"sentence\tlabel\n\xff\xfe\t1\n", "not UTF-8"),
    ],
)
def test_damaged_sst2(tmp_path: Path, text: bytes, what: str) -> None:
    published.sst2(tmp_path)
    (tmp_path / "SST-2" / "dev.tsv").write_bytes(text)
    with pytest.raises(DataError, match=rf"dev\.tsv is damaged: .*{what}"):
        load("sst2", tmp_path)


def test_damaged_vocabulary(tmp_path: Path) -> None:
    published.sst2(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"vocab\.txt is not a WordPiece vocabulary: it must begin with \[PAD\]"):
        load("sst2", tmp_path, Options(vocab=str(tmp_path / "vocab.txt")))
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"vocab\.txt is damaged: not UTF-8"):
        load("sst2", tmp_path, Options(vocab=str(tmp_path / "vocab.txt")))
    with pytest.raises(DataError, match=r"nothing\.txt cannot be read"):
        load("sst2", tmp_path, Options(vocab=str(tmp_path / "nothing.txt")))


def test_incomplete_image_folders(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    with pytest.raises(DataError, match=r"x is not a folder\. Name a folder that has a folder of images"):
        load(f"folder:{tmp_path / 'x'}", tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="has 1 folders"):
        load(f"folder:{tmp_path}", tmp_path)
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="no images under"):
        load(f"folder:{tmp_path}", tmp_path)
    published.picture(tmp_path / "a" / "1.png", (1, 1, 1), (8, 8))
    published.picture(tmp_path / "b" / "1.png", (1, 1, 1), (9, 8))
    with pytest.raises(DataError, match=r"height and width \(8, 9\), expected \(8, 8\).*--size N"):
        load(f"folder:{tmp_path}", tmp_path)


def test_damaged_image_folders(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for name in ("train/a", "train/b", "test/a"):
        published.picture(tmp_path / name / "1.png", (1, 1, 1), (8, 8))
    load(f"folder:{tmp_path}", tmp_path)  # a class may be absent from the test images
    (tmp_path / "test" / "c").mkdir()
    with pytest.raises(DataError, match=r"test has folders that .*train does not have: c\."):
        load(f"folder:{tmp_path}", tmp_path)
    (tmp_path / "test" / "c").rename(tmp_path / "train" / "c")
    with pytest.raises(DataError, match=r"no images under .*train/c"):
        load(f"folder:{tmp_path}", tmp_path)
    (tmp_path / "train" / "c").rmdir()
    file = tmp_path / "train" / "b" / "1.png"
    held = bytearray(file.read_bytes())
    held[held.index(b"IDAT") - 1] -= 5  # the chunk says it is shorter, so the next begins amid its bytes
    file.write_bytes(held)
    with pytest.raises(DataError, match=r"b/1\.png is damaged: not readable as an image \(broken PNG"):
        load(f"folder:{tmp_path}", tmp_path)
