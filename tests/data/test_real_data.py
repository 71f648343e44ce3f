"""The real files, where FLASHFL_DATA names a folder that has them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from published import load

from flashfl.data import partition
from flashfl.data.dataset import DataSet, Options
from flashfl.data.registry import DATASETS
from flashfl.data.text import Tokenizer
from flashfl.run.compare import run_config
from flashfl.run.config import load_toml, make_config

ROOT = Path(os.environ.get("FLASHFL_DATA", "") or "no-such-folder")


def real(name: str) -> DataSet:
    if DATASETS[name].files.absent(ROOT):
        pytest.skip(f"FLASHFL_DATA names no folder with {name}")
    data = load(name, ROOT)
    info = DATASETS[name]
    assert data.test is not None
    assert (len(data.train), len(data.test)) == (info.train, info.test)
    assert (data.shape, data.classes) == (info.shape, info.classes)
    return data


def test_mnist() -> None:
    data = real("mnist")
    assert np.bincount(data.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.test is not None
    assert data.test.target.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    pixels = data.train.inputs[0].float() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert pixels.std().item() == pytest.approx(0.3081, abs=1e-4)


def test_mnist_writers() -> None:
    data = real("mnist-writers")
    assert data.writers is not None
    parts = partition.natural(data.writers, 0, 0)
    assert len(parts) == 539
    assert sum(map(len, parts)) == 60_000


def test_cifar10() -> None:
    data = real("cifar10")
    assert np.bincount(data.labels).tolist() == [5000] * 10
    assert data.test is not None
    assert data.test.target.bincount().tolist() == [1000] * 10
    assert data.labels[:5].tolist() == [6, 9, 9, 4, 1]
    pixels = data.train.inputs[0][::10].float() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-3)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=5e-3)


def test_sst2() -> None:
    data = real("sst2")
    assert np.bincount(data.labels).tolist() == [29_780, 37_569]
    assert data.test is not None
    assert data.test.target.bincount().tolist() == [428, 444]


def test_sst2_pieces_match_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    vocab = ROOT / "bert-base-uncased" / "vocab.txt"
    if not vocab.is_file() or DATASETS["sst2"].files.absent(ROOT):
        pytest.skip("FLASHFL_DATA names no folder with SST-2 and BERT's vocabulary")
    from flashfl.data.loaders.sst2 import read_tsv

    mine = Tokenizer.wordpiece(vocab)
    reference = transformers.BertTokenizer(str(vocab))
    for text in read_tsv(ROOT / "SST-2" / "dev.tsv")[0]:
        assert mine.ids(text) == reference.convert_tokens_to_ids(reference.tokenize(text))
    data = load("sst2", ROOT, Options(vocab=str(vocab)))
    assert data.vocab == 30_522


@pytest.mark.slow
def test_mnistnet_learns_mnist() -> None:
    """The paper's MNIST setting (100 clients, 10 a round, alpha 1), dense, cut to 20 rounds: above 90 %."""
    real("mnist")
    path = Path(__file__).parents[2] / "configs" / "paper" / "mnist.toml"
    asked = {"method": "dense", "rounds": "20", "eval_every": "20", "device": "cpu", "data_root": str(ROOT)}
    config = make_config(load_toml(path), asked)
    assert (config.task.alpha, config.task.clients, config.task.limit) == (1.0, 100, 0)
    done = run_config(config, None, quiet=True)
    assert done.accuracy > 0.9
