"""Tasks by configuration: what is built, that the key decides the split, that every data set can be made up."""

from __future__ import annotations

import json
import pickle
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import published
import pytest
import torch

from flashfl.core.errors import ConfigError, DataError
from flashfl.core.parts import build
from flashfl.data import partition, tasks
from flashfl.data.registry import DATASETS
from flashfl.data.sources import Subset
from flashfl.data.tasks import TaskConfig, build_task, load_data


def indices(task: object) -> list[list[int]]:
    return [s.index.tolist() for s in task.train]  # type: ignore[attr-defined]


def test_default_task() -> None:
    task = build_task(TaskConfig(), key=1)
    assert len(task.clients) == 20
    assert sum(c.n for c in task.clients) == 1437
    assert {c.n for c in task.clients} == {71, 72}
    assert task.layout.prunable_size == 239_904
    assert not task.pretrained
    assert torch.equal(task.draw(3), task.draw(3))
    json.dumps(task.info)
    assert np.array(task.info["histogram"]).sum() == 1437
    assert task.info["model"] == "digits"


def test_key_draws_the_split_unless_partition_seed_fixes_it() -> None:
    data = load_data(TaskConfig())
    one, same, two = (indices(build_task(TaskConfig(), key, data)) for key in (1, 1, 2))
    assert one == same
    assert one != two
    fixed = [indices(build_task(TaskConfig(partition_seed=5), key, data)) for key in (1, 2)]
    assert fixed[0] == fixed[1]


def test_clients_share_one_copy_of_the_samples() -> None:
    task = build_task(TaskConfig())
    sources = {id(s.source) for s in task.train if isinstance(s, Subset)}
    assert len(sources) == 1


def test_limit_and_per_client_limit_samples() -> None:
    task = build_task(TaskConfig(limit=100, clients=5))
    assert sum(c.n for c in task.clients) == 100
    assert task.test is not None
    assert len(task.test) == 100
    task = build_task(TaskConfig(per_client=7, clients=5))
    assert {c.n for c in task.clients} == {7}


def test_saved_partition_is_used(tmp_path: Path) -> None:
    data = load_data(TaskConfig())
    parts = partition.lda(data.labels, 6, 99, 0.3)
    partition.save(parts, tmp_path / "p.npz", data.labels)
    task = build_task(TaskConfig(partition_file=str(tmp_path / "p.npz")), 1, data)
    assert indices(task) == [p.tolist() for p in parts]


@pytest.mark.parametrize("name", [n for n in DATASETS if n != "sst2"])
def test_every_data_set_has_synthetic_data(name: str, tmp_path: Path) -> None:
    config = TaskConfig(dataset=name, clients=2, synthetic=True, data_root=str(tmp_path))
    task = build_task(config)
    (x,), y = task.train[0].fetch(torch.arange(4), key=3)
    model = task.build(0)
    with torch.no_grad():
        assert model(x).shape == (4, DATASETS[name].classes)
    assert x.shape[1:] == DATASETS[name].shape
    assert y.max() < DATASETS[name].classes
    assert "made-up" in task.info["dataset"]


def test_synthetic_data_by_writer() -> None:
    task = build_task(TaskConfig(dataset="femnist", synthetic=True, clients=50, partition="natural"))
    assert {c.n for c in task.clients} == {16}


def test_synthetic_texts_train_tiny_transformer() -> None:
    config = TaskConfig(dataset="sst2", model="tiny-transformer", synthetic=True, clients=2, partition="iid")
    task = build_task(config)
    model = task.build(1)
    step = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(30):
        inputs, y = task.train[at % 2].fetch(torch.arange(64))
        step.zero_grad()
        task.loss(model(*inputs), y).backward()
        step.step()
    inputs, y = task.test.fetch(torch.arange(64))  # type: ignore[union-attr]
    assert task.metric(model(*inputs), y) > 0.9


def test_synthetic_texts_with_full_bert() -> None:
    pytest.importorskip("transformers")
    task = build_task(TaskConfig(dataset="sst2", synthetic=True, clients=2))
    assert task.pretrained
    assert task.layout.prunable_size == 84_934_656
    assert task.layout.of_kind("fixed")
    assert task.info["model"] == "bert"


def test_local_bert_keeps_its_weights_and_reads_pieces(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from flashfl.models import build_model

    published.sst2(tmp_path)
    published.vocabulary(tmp_path / "small")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    (tmp_path / "small" / "config.json").write_text(json.dumps(sizes))
    model = build_model("bert-scratch", vocab=13, length=8, path=str(tmp_path / "small"))
    model.net.save_pretrained(tmp_path / "small")
    config = TaskConfig(dataset="sst2", data_root=str(tmp_path), model_path="small", length=8, clients=2)
    task = build_task(config)
    assert task.pretrained
    assert torch.equal(task.draw(1), task.draw(2))
    assert {layer.name.split(".")[2] for layer in task.layout.of_kind("fixed")} == {"embeddings"}
    inputs, _ = task.train[0].fetch(torch.arange(2))
    assert task.build()(*inputs).shape == (2, 2)


def test_named_tasks(tmp_path: Path) -> None:
    published.cifar_python(tmp_path, 10)
    task = tasks.cifar10(tmp_path, clients=5, alpha=0.5, verify=False)
    assert (len(task.clients), task.info["alpha"], task.name) == (5, 0.5, "cifar10")
    assert tasks.cifar10.__doc__ is not None
    with pytest.raises(ConfigError, match="did you mean 'verify'"):
        tasks.cifar10(tmp_path, verfy=False)


def test_data_root_is_given_or_from_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published.mnist(tmp_path / "mnist")
    monkeypatch.setenv("FLASHFL_DATA", str(tmp_path))
    assert build_task(TaskConfig(dataset="mnist", verify=False, clients=2)).info["train"] == 40
    with pytest.raises(DataError, match="elsewhere"):
        build_task(TaskConfig(dataset="mnist", data_root="elsewhere"))


def test_mnist_writers_gives_each_writer_a_client(tmp_path: Path) -> None:
    made = published.mnist(tmp_path / "mnist")
    published.qmnist(tmp_path / "qmnist", made["train-labels"], np.arange(40) % 8)
    task = tasks.mnist_writers(tmp_path, verify=False)
    assert [c.n for c in task.clients] == [5] * 8
    assert len(tasks.mnist_writers(tmp_path, clients=3, verify=False).clients) == 3


def test_limit_is_shared_over_writers() -> None:
    config = TaskConfig(dataset="femnist", synthetic=True, clients=5, partition="natural")
    data = load_data(config)
    small = TaskConfig(dataset="femnist", partition="natural", clients=3, limit=30)
    assert [c.n for c in build_task(small, 1, data).clients] == [10] * 3


def test_model_factory_can_be_pickled() -> None:
    task = build_task(TaskConfig())
    again = pickle.loads(pickle.dumps(task._model))
    assert sum(p.numel() for p in again().parameters()) == 241_898


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"clients": -1}, "clients = -1: must be at least 0"),
        *(({"length": n}, f"length = {n}: must be at least 3") for n in (2, 1, 0, -3)),
        ({"vocab_size": 2}, "vocab_size = 2: must be at least 5"),
        ({"tokens": "letters"}, "expected one of 'auto', 'wordpiece', 'words'"),
        ({"dataset": "hub:x", "synthetic": True}, "synthetic = true: not possible with 'hub:x'"),
        ({"model": "vgg16"}, "size = 8: must be at least 32. vgg16 needs larger images"),
        ({"model": "tiny-transformer"}, "does not fit a data set of images"),
        ({"clients": 2000}, "must be at least 1 and at most 1437"),
        ({"prunable": "nothing.*"}, "matches no parameter"),
    ],
)
def test_bad_settings(values: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        _ = build_task(build(TaskConfig, values)).layout


def test_shortest_texts_and_smallest_vocabulary(tmp_path: Path) -> None:
    published.sst2(tmp_path)
    config = TaskConfig(dataset="sst2", data_root=str(tmp_path), model="tiny-transformer", length=3, vocab_size=5)
    inputs, _ = build_task(replace(config, clients=2)).train[0].fetch(torch.arange(2))
    assert inputs[0].shape == (2, 3)


def test_images_that_are_not_square(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for name in ("a", "b"):
        for i in range(3):
            published.picture(tmp_path / name / f"{i}.png", (100, 0, 0), (20, 40))
    config = TaskConfig(dataset=f"folder:{tmp_path}", clients=2)
    for model in ("mnistnet", "leafcnn"):
        with pytest.raises(ConfigError, match=f"{model} needs square images, not 40x20"):
            build_task(replace(config, model=model))
    with pytest.raises(ConfigError, match="size = 20: must be at least 32"):
        _ = build_task(replace(config, model="vgg16")).layout
    task = build_task(config)
    assert task.build(0)(task.train[0].fetch(torch.arange(2))[0][0]).shape == (2, 2)


class FakeSplit:
    """What `datasets` hands out, as far as it is used."""

    def __init__(self, columns: dict[str, list[object]], features: dict[str, object]) -> None:
        self.columns, self.features = columns, features

    def __getitem__(self, key: str | int) -> object:
        if isinstance(key, int):
            return {name: column[key] for name, column in self.columns.items()}
        return self.columns[key]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def fake_hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, FakeSplit]) -> None:
    def load_dataset(name: str, config: str | None = None) -> dict[str, FakeSplit]:
        if name != "someone/things":
            raise FileNotFoundError(f"no {name} here")
        return splits

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


Image = type("Image", (), {})
ClassLabel = type("ClassLabel", (), {"num_classes": 3})
Value = type("Value", (), {"dtype": "string"})


def test_hub_images(monkeypatch: pytest.MonkeyPatch) -> None:
    pil = pytest.importorskip("PIL.Image")
    pictures = [pil.new("L", (9, 9), 20 * i) for i in range(6)]
    held = FakeSplit({"img": pictures, "label": [0, 1, 2, 0, 1, 2]}, {"img": Image(), "label": ClassLabel()})
    fake_hub(monkeypatch, {"train": held, "test": held})
    data = load_data(TaskConfig(dataset="hub:someone/things", size=16))
    assert (data.shape, data.classes, len(data.train)) == ((3, 16, 16), 3, 6)
    task = build_task(TaskConfig(dataset="hub:someone/things", clients=2))
    assert (task.info["shape"], task.info["model"]) == ([3, 9, 9], "resnet18")
    with pytest.raises(DataError, match="hub:someone/else could not be fetched"):
        load_data(TaskConfig(dataset="hub:someone/else"))


def test_hub_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    columns: dict[str, list[object]] = {"text": ["a b", "c d", "a d"], "label": [0, 1, 2]}
    held = FakeSplit(columns, {"text": Value(), "label": ClassLabel()})
    unlabelled = FakeSplit({**columns, "label": [-1] * 3}, held.features)
    fake_hub(monkeypatch, {"train": held, "test": unlabelled, "validation": held})
    data = load_data(TaskConfig(dataset="hub:someone/things:plain", length=6))
    assert (data.shape, data.vocab, data.classes) == ((6,), 8, 3)
    assert data.test is not None
    assert data.test.target.min() == 0
    fake_hub(monkeypatch, {"other": held})
    with pytest.raises(DataError, match="needs a split 'train' with samples, and its splits are other"):
        load_data(TaskConfig(dataset="hub:someone/things"))


def hub_texts(columns: dict[str, list[object]], label: object = None) -> FakeSplit:
    """A split whose columns are strings, but for the label if its feature is given."""
    return FakeSplit(columns, {name: label if label and name == "label" else Value() for name in columns})


THREE: list[object] = ["a b", "c d", "a d"]


@pytest.mark.parametrize("other", ["id", "doc_id", "title"])
def test_hub_text_column_is_found(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    held = hub_texts({other: ["x1", "x2", "x3"], "sentence": THREE, "label": [0, 1, 2]}, ClassLabel())
    fake_hub(monkeypatch, {"train": held})
    assert load_data(TaskConfig(dataset="hub:someone/things")).vocab == 4 + 4


def test_hub_labels_may_be_words(monkeypatch: pytest.MonkeyPatch) -> None:
    held = hub_texts({"utterance": THREE, "label": ["good", "bad", "good"]})
    fake_hub(monkeypatch, {"train": held, "test": hub_texts({"utterance": THREE, "label": ["bad"] * 3})})
    data = load_data(TaskConfig(dataset="hub:someone/things"))
    assert (data.classes, data.labels.tolist()) == (2, [1, 0, 1])
    assert data.test is not None
    assert data.test.target.tolist() == [0, 0, 0]


def test_hub_splits_without_labels_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    held = hub_texts({"text": THREE, "label": [0, 1, 2]}, ClassLabel())
    secret = [hub_texts({"text": THREE, "label": [None] * 3}, ClassLabel()), hub_texts({"text": THREE})]
    for test in secret:
        fake_hub(monkeypatch, {"train": held, "test": test, "validation": held})
        assert load_data(TaskConfig(dataset="hub:someone/things")).test is not None


@pytest.mark.parametrize(
    ("train", "test", "what"),
    [
        ({"premise": THREE, "hypothesis": THREE}, {}, "exactly one text column.* columns: premise, hypothesis\\."),
        ({"question": THREE, "sentence": THREE}, {}, "exactly one text column.* columns: question, sentence\\."),
        ({"id": THREE}, {}, "Its text columns: none"),
        ({"text": [None, "a", "b"]}, {}, "split 'train' has no text in row 0"),
        (
            {"text": THREE, "label": [-1, 0, 1]},
            {},
            "'label'\\) is missing or unknown in 1 of 3 rows of split 'train': row 0 has -1",
        ),
        (
            {"text": THREE, "label": [0, None, 1]},
            {},
            "'label'\\) is missing .* 1 of 3 rows of split 'train': row 1 has None",
        ),
        ({"text": THREE, "label": [0.5, 1, 2]}, {}, "must be whole numbers from 0 to 65535, or strings"),
        ({"text": THREE, "label": [[0], [1], [2]]}, {}, "must be whole numbers from 0 to 65535, or strings"),
        ({"text": THREE, "label": [0, 1, 10**12]}, {}, "must be whole numbers from 0 to 65535, or strings"),
        (
            {"text": THREE, "label": ["a", "b", "a"]},
            {"label": ["a", "c", "a"]},
            "'label'\\) is missing .* of split 'test': row 1 has 'c'",
        ),
        ({"text": THREE}, {"label": [0, None, 1]}, "'label'\\) is missing or unknown in 1 of 3 rows of split 'test'"),
        ({"text": THREE}, {"text": ["a", "b", None]}, "split 'test' has no text in row 2"),
        ({"text": [], "label": []}, {}, "it needs a split 'train' with samples"),
        ({"text": THREE, "label": [None] * 3}, {}, "'label'\\) is missing or unknown in 3 of 3 rows of split 'train'"),
    ],
)
def test_hub_data_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, train: dict[str, list[object]], test: dict[str, list[object]], what: str
) -> None:
    number = type("Value", (), {"dtype": "int64"})()
    train = {"label": [0, 1, 2], **train}
    splits = {"train": hub_texts(train, number), "test": hub_texts({**train, **test}, number)}
    fake_hub(monkeypatch, splits if test else {"train": splits["train"]})
    with pytest.raises(DataError, match=what):
        load_data(TaskConfig(dataset="hub:someone/things"))


def test_hub_missing_image_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pil = pytest.importorskip("PIL.Image")
    columns: dict[str, list[object]] = {"img": [None, pil.new("L", (9, 9)), None], "label": [0, 1, 2]}
    fake_hub(monkeypatch, {"train": FakeSplit(columns, {"img": Image(), "label": ClassLabel()})})
    with pytest.raises(DataError, match="split 'train' has no img in row 0"):
        load_data(TaskConfig(dataset="hub:someone/things"))


def test_hub_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'flashfl\[hub\]'"):
        load_data(TaskConfig(dataset="hub:someone/things"))
