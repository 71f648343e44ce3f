"""`flashfl data`: what is there, how it splits, whether it is sound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import published
import pytest

from flashfl.cli import main
from flashfl.core.rng import fold
from flashfl.data import partition
from flashfl.data.registry import DATASETS
from flashfl.data.tasks import TaskConfig, build_task, load_data

Said = pytest.CaptureFixture[str]


def split(*words: str) -> int:
    return main(["data", "partition", *words])


def test_data_list_names_every_data_set_and_how_to_get_it(tmp_path: Path, capsys: Said) -> None:
    assert main(["data", "--data-root", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line}
    assert f"{tmp_path} (--data-root)" in said
    for info in DATASETS.values():
        assert rows[info.name][1] == ("present" if info.name == "digits" else "missing")
        assert info.files.get in said
        assert not info.train or f"{info.train:,}" in rows[info.name]
        assert not info.files.forms[0] or info.files.forms[0][0] in said
    assert {"hub:NAME", "folder:PATH"} <= set(rows)


def test_data_list_shows_what_is_present(tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    published.mnist(tmp_path / "mnist")
    published.cifar_binary(tmp_path, 100)
    published.sst2(tmp_path)
    monkeypatch.setenv("FLASHFL_DATA", str(tmp_path))
    assert main(["data"]) == 0
    said = capsys.readouterr().out
    present = {line.split()[0] for line in said.splitlines() if line.split()[1:2] == ["present"]}
    assert present == {"digits", "mnist", "cifar100", "sst2"}
    assert "(FLASHFL_DATA)" in said
    assert "mnist-writers: not found: qmnist/qmnist-train-labels-idx2-int\n" in said  # MNIST itself is there
    assert DATASETS["cifar100"].files.get not in said


def test_data_list_says_if_root_is_missing(tmp_path: Path, capsys: Said) -> None:
    assert main(["data", "--data-root", str(tmp_path / "none")]) == 0
    assert "there is no such folder" in capsys.readouterr().out


def test_data_partition_prints_one_line_a_client(capsys: Said) -> None:
    assert split("digits", "--clients", "12", "--alpha", "0.1", "--seed", "3", "--rows", "4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "digits: lda, alpha 0.1, seed 3"
    assert lines[1].startswith("12 clients, 1437 samples, 119 to 120 a client")
    assert len(lines) == 2 + 4 + 1
    assert lines[-1] == "(8 clients not shown)"


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("lda", "lda, alpha 1, seed 0"),
        ("dirichlet", "dirichlet, alpha 1, seed 0"),
        ("shards", "shards, 2 classes a client, seed 0"),
        ("iid", "iid, seed 0"),
        ("natural", "natural, seed 0"),
    ],
)
def test_data_partition_takes_every_scheme(kind: str, first: str, capsys: Said) -> None:
    assert split("femnist", "--synthetic", "true", "--partition", kind, "--clients", "5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"femnist (made-up data): {first}"
    assert lines[1].startswith("5 clients")
    assert len(lines) == 2 + 5


def test_data_partition_shows_the_split_of_a_run(tmp_path: Path, capsys: Said) -> None:
    file = tmp_path / "made" / "split.npz"
    assert split("digits", "--clients", "7", "--partition", "dirichlet", "--seed", "5", "--save", str(file)) == 0
    assert str(file) in capsys.readouterr().out
    run = build_task(TaskConfig("digits", clients=7, partition="dirichlet"), fold(5, "task"))
    saved = partition.load(file, load_data(TaskConfig()).labels)
    for mine, client in zip(saved, run.train, strict=True):
        assert np.array_equal(mine, client.index.numpy())  # type: ignore[attr-defined]
    assert split("digits", "--partition_file", str(file)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"digits: as saved in {file}"
    assert lines[1].startswith("7 clients, 1437 samples")


def test_data_partition_takes_a_configuration(tmp_path: Path, capsys: Said) -> None:
    path = Path(__file__).parents[2] / "configs" / "paper" / "mnist-pathological.toml"
    assert split(str(path), "--synthetic", "true", "--clients", "20") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mnist (made-up data): shards, 2 classes a client, seed 0"
    assert "2 to 2 of 10 classes a client" in lines[1]


def test_data_partition_plot(tmp_path: Path, capsys: Said) -> None:
    pytest.importorskip("matplotlib")
    image = tmp_path / "split.png"
    assert split("digits", "--plot", str(image)) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    assert split("digits", "--plot", str(tmp_path / "split.nothing")) == 1
    assert "split.nothing could not be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["partition"], "needs the name of a data set"),
        (["check"], "needs the name of a data set"),
        (["list", "mnist"], "did you mean `flashfl data check mnist`?"),
        (["list", "--clients", "3"], "unknown option --clients"),
        (["partition", "mnits"], "did you mean 'mnist'?"),
        (["partition", "digits", "--lr", "0.1"], "unknown option 'lr'"),
        (["partition", "digits", "--clints", "3"], "did you mean 'clients'?"),
        (["partition", "digits", "--clients", "many"], "--clients many"),
        (["partition", "digits", "--clients", "2000"], "clients = 2000"),
        (["partition", "digits", "--alpha", "0"], "alpha = 0"),
        (["partition", "digits", "--partition", "ldaa"], "did you mean 'lda'?"),
        (["partition", "digits", "--partition", "natural"], "does not say who made each sample"),
        (["partition", "digits", "--rows", "0"], "--rows 0"),
        (["partition", "digits", "--partition_file", "none.npz"], "none.npz is not a saved partition"),
        (["partition", "none.toml"], "cannot read the configuration none.toml"),
        (["check", "digits", "--save", "x"], "belong to `flashfl data partition`"),
    ],
)
def test_data_command_errors(words: list[str], why: str, capsys: Said) -> None:
    assert main(["data", *words]) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("words", [["partition", "cifar10"], ["check", "cifar10"]])
def test_data_command_on_missing_data_set(words: list[str], tmp_path: Path, capsys: Said) -> None:
    assert main(["data", *words, "--data-root", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "cifar-10-batches-py" / "data_batch_1") in said
    assert DATASETS["cifar10"].files.get in said


def test_data_check(tmp_path: Path, capsys: Said) -> None:
    assert main(["data", "check", "digits"]) == 0
    said = capsys.readouterr().out
    assert "digits: 1,437 training and 360 test samples of 10 classes, shape 1x8x8" in said
    assert "checksums: none are known" in said


def test_data_check_finds_unpublished_files(tmp_path: Path, capsys: Said) -> None:
    published.mnist(tmp_path / "mnist")
    published.mnist(tmp_path / "fashion-mnist")
    root = ["--data-root", str(tmp_path)]
    assert main(["data", "check", "mnist", *root]) == 1
    assert "the published file's is" in capsys.readouterr().err  # by its checksum
    assert main(["data", "check", "fashion-mnist", *root]) == 1
    assert "has 40 training samples, expected 60,000" in capsys.readouterr().err  # by its size


def test_data_check_counts_writers(tmp_path: Path, capsys: Said) -> None:
    published.leaf(tmp_path)
    assert main(["data", "check", "femnist", "--data-root", str(tmp_path)]) == 0
    assert "5 writers" in capsys.readouterr().out


def test_data_commands_of_the_documentation_run(capsys: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `flashfl data` line of docs/data.md is understood; without files it ends in how to get them."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    monkeypatch.setenv("FLASHFL_DATA", str(tmp_path))
    lines = [line for line in (root / "docs" / "data.md").read_text().splitlines() if line.startswith("flashfl data")]
    assert len(lines) >= 6
    for line in lines:
        code = main(line.partition("#")[0].split()[1:])
        said = capsys.readouterr()
        assert code == 0 or "is not complete under" in said.err, line
