"""Small files in the forms the data sets are published in."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path
from typing import ClassVar

import numpy as np

from flashfl.data.dataset import DataSet, Options
from flashfl.data.registry import info

RNG = np.random.default_rng(0)


def load(name: str, root: Path, options: Options | None = None) -> DataSet:
    """The data set `name` under `root`."""
    return info(name).load(root, options or Options())


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    """An array in IDX form."""
    head = bytes([0, 0, kind, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype({8: ">u1", 12: ">i4"}[kind]).tobytes()


def mnist(folder: Path, train: int = 40, test: int = 10, zipped: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    held = {}
    for split, count in (("train", train), ("t10k", test)):
        held[split] = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        held[split + "-labels"] = np.arange(count) % 10
        for name, data in (("images-idx3", held[split]), ("labels-idx1", held[split + "-labels"])):
            file = folder / f"{split}-{name}-ubyte"
            if zipped:
                file.with_name(file.name + ".gz").write_bytes(gzip.compress(idx(data)))
            else:
                file.write_bytes(idx(data))
    return held


def qmnist(folder: Path, labels: np.ndarray, writers: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.zeros((len(labels), 8), dtype=np.int32)
    rows[:, 0], rows[:, 2] = labels, writers
    (folder / "qmnist-train-labels-idx2-int.gz").write_bytes(gzip.compress(idx(rows, 12)))


class Python2(pickle._Pickler):  # type: ignore[misc]
    """Writes bytes as Python 2 wrote its texts."""

    dispatch: ClassVar[dict[type, object]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_bytes(self, held: bytes) -> None:
        self.write(b"T" + len(held).to_bytes(4, "little") + held)
        self.memoize(held)

    dispatch[bytes] = save_bytes


def python2(value: object) -> bytes:
    """A pickle as Python 2 and old numpy wrote it."""
    out = io.BytesIO()
    Python2(out, protocol=2).dump(value)
    return out.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def cifar_python(root: Path, classes: int, each: int = 6) -> list[np.ndarray]:
    folder = root / ("cifar-10-batches-py" if classes == 10 else "cifar-100-python")
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
    held = []
    for name in names:
        data = RNG.integers(0, 256, (each, 3072), dtype=np.uint8)
        labels = [int(n) for n in RNG.integers(0, classes, each)]
        content = {b"data": data, b"filenames": [b"a.png"] * each, b"batch_label": b"made for a test"}
        if classes == 10:
            content[b"labels"] = labels
        else:
            content |= {b"fine_labels": labels, b"coarse_labels": [0] * each}
        (folder / name).write_bytes(python2(content))
        held.append(data)
    return held


def cifar_binary(root: Path, classes: int, each: int = 6) -> list[np.ndarray]:
    folder = root / ("cifar-10-batches-bin" if classes == 10 else "cifar-100-binary")
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    held = []
    for name in names if classes == 10 else ["train.bin", "test.bin"]:
        data = RNG.integers(0, 256, (each, 3072), dtype=np.uint8)
        labels = (np.arange(each) % classes).astype(np.uint8)[:, None]
        coarse = [] if classes == 10 else [np.full((each, 1), 7, dtype=np.uint8)]
        (folder / name).write_bytes(np.hstack([*coarse, labels, data]).tobytes())
        held.append(data)
    return held


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (64, 64), mode: str = "RGB") -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


def tiny_imagenet(root: Path, classes: int = 3, each: int = 4) -> Path:
    folder = root / "tiny-imagenet-200"
    names = [f"n0{i}" for i in range(classes)]
    lines = []
    for i, name in enumerate(names):
        for j in range(each):
            mode = "L" if j == 0 else "RGB"  # some published images are grey
            picture(folder / "train" / name / "images" / f"{name}_{j}.JPEG", (40 * i, 40 * i, 40 * i), mode=mode)
        (folder / "train" / name / f"{name}_boxes.txt").write_text("")
        picture(folder / "val" / "images" / f"val_{i}.JPEG", (40 * i, 40 * i, 40 * i))
        lines.append(f"val_{i}.JPEG\t{name}\t0\t0\t62\t62")
    (folder / "wnids.txt").write_text("\n".join(names) + "\n")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return folder


def leaf(root: Path, users: int = 5) -> None:
    for split, each in (("train", 4), ("test", 1)):
        folder = root / "femnist" / split
        folder.mkdir(parents=True)
        for part, names in enumerate(np.array_split([f"f{i:04d}_{i:02d}" for i in range(users)], 2)):
            data = {
                str(name): {"x": RNG.random((each, 784)).round(4).tolist(), "y": RNG.integers(0, 62, each).tolist()}
                for name in names
            }
            held = {"users": list(data), "num_samples": [each] * len(data), "user_data": data}
            (folder / f"all_data_{part}_niid_0_keep_0_{split}_9.json").write_text(json.dumps(held))


def sst2(root: Path) -> None:
    folder = root / "SST-2"
    folder.mkdir(parents=True)
    lines = ["a fine film \t1", 'a "dull" , dull film \t0', "unloved \t0", "fine \t1"]
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")


def vocabulary(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "fine", "film", "un", "##love", "##d", '"', ",", "dull"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    return folder / "vocab.txt"
