"""Which runs are found, and which of them are seeds of one experiment."""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashfl import PDST, SPDST, HeteroJMWST, PruneRegrow, simulate, tasks
from flashfl.cli import main
from flashfl.data.task import Task
from flashfl.paper import published
from flashfl.report import figures
from flashfl.report.groups import groups_of, groups_table, rounds_csv
from flashfl.report.load import Found, load
from flashfl.report.page import page_data
from flashfl.report.watch import Feed
from tests.conftest import DropoutNet, blobs
from tests.report.runs import edited


def rows_of(found: Found) -> dict[str, list[str]]:
    """The rows of the Markdown table by their label."""
    lines = [
        line.strip("| ").split(" | ") for line in groups_table(found).markdown().splitlines() if line.startswith("|")
    ]
    return {line[0]: line[1:] for line in lines[2:]}


@pytest.fixture(scope="module")
def from_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs started from Python: one task with two seeds, and the same with another alpha."""
    folder = tmp_path_factory.mktemp("python")
    for alpha, seed in ((0.1, 0), (0.1, 1), (100.0, 0)):
        task = tasks.digits(clients=4, alpha=alpha, limit=80)
        where = folder / f"alpha{alpha:g}-seed{seed}"
        simulate(PDST(0.1), task, 1, folder=where, per_round=2, seed=seed, workers=1, device="cpu")
    return folder


def test_python_runs_on_other_tasks_are_not_averaged(from_python: Path) -> None:
    found = load([from_python])
    seeds = {label: row[0] for label, row in rows_of(found).items()}
    assert seeds == {"pdst · alpha 0.1": "2", "pdst · alpha 100.0": "1"}
    assert not found.problems
    assert published.lookup(found.runs[0].settings).mean is None


def _config(header: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The header with other settings, given as table_name."""
    config = {table: dict(values) for table, values in header["config"].items()}
    for name, value in changed.items():
        table, _, field = name.partition("_")
        config[table][field] = value
    return {**header, "config": config}


def test_labels_name_method_settings_first_and_are_unique(compared: Path, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"method_density": 0.1, "train_lr": 0.1},
        {"method_density": 0.2, "train_lr": 0.1, "task_clients": 5, "task_alpha": 2.0, "task_limit": 90},
        {"method_density": 0.2, "train_lr": 0.2, "task_clients": 5, "task_alpha": 2.0, "task_limit": 90},
    ]
    for i, changed in enumerate(changes):
        edited(compared / "nst-seed0", tmp_path / str(i), lambda h, changed=changed: _config(h, **changed))
    assert list(groups_of(load([tmp_path]).runs)) == [
        "nst · density 0.1 · clients 4 · alpha 1.0 · and 2 more",
        "nst · density 0.2 · clients 5 · alpha 2.0 · lr 0.1 · limit 90",
        "nst · density 0.2 · clients 5 · alpha 2.0 · lr 0.2 · limit 90",
    ]


def test_label_counts_settings_that_it_does_not_name_and_a_note_lists_them(compared: Path, tmp_path: Path) -> None:
    names = ("per_round", "epochs", "batch", "lr", "momentum")
    for i, values in enumerate(((5, 1, 16, 0.1, 0.0), (3, 2, 8, 0.02, 0.5))):
        changed = {f"train_{name}": value for name, value in zip(names, values, strict=True)}
        edited(compared / "spdst-seed0", tmp_path / str(i), lambda h, changed=changed: _config(h, **changed))
    found = load([tmp_path])
    labels = [
        "spdst · per_round 5 · epochs 1 · batch 16 · and 2 more",
        "spdst · per_round 3 · epochs 2 · batch 8 · and 2 more",
    ]
    notes = [f"{labels[0]}: lr 0.1, momentum 0.0.", f"{labels[1]}: lr 0.02, momentum 0.5."]
    assert list(groups_of(found.runs)) == labels
    assert groups_table(found).markdown().splitlines()[-2:] == [f"- {note}" for note in notes]
    assert set(notes) < set(page_data(found)["parts"][0]["table"]["notes"])


def test_equal_labels_are_numbered(compared: Path, tmp_path: Path) -> None:
    for i in range(4):
        edited(compared / "nst-seed0", tmp_path / str(i), lambda h, i=i: _config(h, task_model="x" * 60 + str(i)))
    base = "nst · model " + "x" * 37 + "..."
    assert list(groups_of(load([tmp_path]).runs)) == [base, *(f"{base} ({n})" for n in (2, 3, 4))]


def test_settings_of_python_methods_are_shown_one_by_one(from_python: Path, tmp_path: Path) -> None:
    jmwst = HeteroJMWST(densities=(0.1, 0.3), shares=(0.5, 0.5), warmup_clients=2)
    more = {"a": jmwst, "b": replace(jmwst, warmup_clients=3), "c": replace(jmwst, adapt=PruneRegrow(rate=0.5))}
    task = tasks.digits(clients=4, limit=80)
    for name, method in more.items():
        simulate(method, task, 1, folder=tmp_path / name, per_round=2, workers=1, device="cpu")
    runs = load([tmp_path]).runs
    assert runs[0].settings["method.densities"] == [0.1, 0.3]
    assert list(groups_of(runs)) == [
        "hetero-jmwst · warmup_clients 2 · rate 0.25",
        "hetero-jmwst · warmup_clients 3 · rate 0.25",
        "hetero-jmwst · warmup_clients 2 · rate 0.5",
    ]


@dataclass(frozen=True)
class Own(PDST):
    """A custom method with fields that JSON does not know."""

    share: Fraction = Fraction(1, 2)
    few: np.float64 = np.float64(0.1)  # noqa: RUF009


def test_settings_of_custom_methods_are_shown(tmp_path: Path) -> None:
    task = tasks.digits(clients=4, limit=80)
    for share in (Fraction(1, 2), Fraction(1, 3)):
        folder = tmp_path / f"{share.denominator}"
        simulate(Own(0.1, share=share), task, 1, folder=folder, per_round=2, workers=1, device="cpu")
        simulate(Own(0.1, share=share), task, 1, folder=folder, per_round=2, workers=1, device="cpu", resume=True)
    runs = load([tmp_path]).runs
    assert list(groups_of(runs)) == ["own · share Fraction(1, 2)", "own · share Fraction(1, 3)"]
    assert runs[0].settings["method.few"] == 0.1


def _shards(header: dict[str, Any], classes: int) -> dict[str, Any]:
    info = {**header["task"]["info"], "partition": "shards", "classes_per_client": classes}
    return {**header, "task": {**header["task"], "info": info}}


@pytest.mark.parametrize(("one", "other"), [
    (lambda h: h, lambda h: {**h, "identity": {**h["identity"], "clients": "other"}}),
    (lambda h: h, lambda h: {**h, "identity": {**h["identity"], "layout": "other"}}),
    (lambda h: _shards(h, 2), lambda h: _shards(h, 5)),
])  # fmt: skip
def test_python_runs_are_grouped_by_their_recorded_task(
    from_python: Path, tmp_path: Path, one: Callable[[Any], Any], other: Callable[[Any], Any]
) -> None:
    edited(from_python / "alpha0.1-seed0", tmp_path / "a", one)
    edited(from_python / "alpha0.1-seed1", tmp_path / "b", one)
    assert [len(runs) for runs in groups_of(load([tmp_path]).runs).values()] == [2]
    shutil.rmtree(tmp_path / "b")
    edited(from_python / "alpha0.1-seed1", tmp_path / "b", other)
    assert [len(runs) for runs in groups_of(load([tmp_path]).runs).values()] == [1, 1]


def test_task_split_with_another_seed_is_not_a_copy(from_python: Path, tmp_path: Path) -> None:
    edited(from_python / "alpha0.1-seed0", tmp_path / "a")
    edited(
        from_python / "alpha0.1-seed0",
        tmp_path / "b",
        lambda h: {**h, "task": {**h["task"], "info": {**h["task"]["info"], "histogram": [[1] * 10] * 4}}},
    )
    assert [len(runs) for runs in groups_of(load([tmp_path]).runs).values()] == [2]


def test_run_resumed_with_other_code_is_marked(compared: Path, tmp_path: Path) -> None:
    edited(compared / "nst-seed0", tmp_path / "a", lambda h: {**h, "code": {"flashfl": "1", "redraw": "2+3"}})
    shutil.copytree(compared / "jmwst-seed0", tmp_path / "b")
    found = load([tmp_path])
    note = "nst (code changed): resumed with other code of redraw, so the results mix two versions."
    assert list(rows_of(found)) == ["nst (code changed)", "jmwst"]
    assert groups_table(found).markdown().endswith(f"\n- {note}\n")
    [data] = page_data(found)["parts"]
    assert note in data["table"]["notes"]
    assert [run["state"] for run in data["runs"]] == ["finished, code changed", "finished"]


def test_copied_run_counts_once_and_is_reported(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        shutil.copytree(compared / "nst-seed0", tmp_path / name)
    shutil.copytree(compared / "nst-seed1", tmp_path / "c")
    assert main(["report", str(tmp_path), "--format", "md"]) == 0
    out, err = capsys.readouterr()
    assert "| nst | 2 |" in out
    for text in (out, err):
        assert f"{tmp_path / 'b'} is a copy of {tmp_path / 'a'}" in text
    assert list(load([tmp_path]).problems) == [tmp_path / "b"]


def test_latest_of_two_runs_with_one_seed_counts(compared: Path, tmp_path: Path) -> None:
    edited(compared / "nst-seed0", tmp_path / "a", rounds=3)
    edited(compared / "nst-seed0", tmp_path / "b", rounds=2)
    for newest, oldest in (("a", "b"), ("b", "a")):
        os.utime(tmp_path / oldest / "results.jsonl", (1, 1))
        os.utime(tmp_path / newest / "results.jsonl", (2, 2))
        found = load([tmp_path])
        assert [run.folder.name for run in found.runs] == [newest]
        first = tmp_path / newest
        why = f"{tmp_path / oldest} has the settings and the seed of {first}, so only {first} is shown"
        assert list(found.problems.values()) == [why]


def test_unfinished_run_is_not_averaged(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "nst-seed0", tmp_path / "a")
    alone = rows_of(load([tmp_path]))["nst"]
    edited(compared / "nst-seed1", tmp_path / "b", rounds=2)
    found = load([tmp_path])
    rows = rows_of(found)
    assert list(rows) == ["nst", "nst · seed 1 (unfinished, round 2 of 5)"]
    assert rows["nst"] == alone
    [data] = page_data(found)["parts"]
    assert [(g["label"], g["state"]) for g in data["groups"]] == [
        ("nst", "finished"),
        ("nst · seed 1", "unfinished"),
    ]
    assert [g["accuracy"]["round"] for g in data["groups"]] == [[1, 2, 3, 4, 5], [1, 2]]
    pytest.importorskip("matplotlib")
    legend = figures.figure("accuracy-rounds", found.runs).axes[0].get_legend_handles_labels()[1]
    assert legend == list(rows)
    assert {row["run"] for row in csv.DictReader(io.StringIO(rounds_csv(found)))} == {
        str(tmp_path / "a"), str(tmp_path / "b"),
    }  # fmt: skip


def test_row_of_unfinished_runs_says_how_far_they_are(compared: Path, tmp_path: Path) -> None:
    edited(compared / "nst-seed0", tmp_path / "a", rounds=2)
    assert list(rows_of(load([tmp_path]))) == ["nst (unfinished, round 2 of 5)"]
    edited(compared / "nst-seed1", tmp_path / "b", rounds=4)
    assert {label: row[0] for label, row in rows_of(load([tmp_path])).items()} == {
        "nst (unfinished, round 2 to 4 of 5)": "2"
    }


def test_run_stopped_by_unrecorded_limit_is_not_averaged(from_python: Path, tmp_path: Path) -> None:
    shutil.copytree(from_python / "alpha0.1-seed0", tmp_path / "a")
    shutil.copytree(from_python / "alpha0.1-seed1", tmp_path / "b")
    path = tmp_path / "b" / "results.jsonl"
    path.write_text(path.read_text().replace('"stopped": null', '"stopped": "its limit was reached"'))
    assert list(rows_of(load([tmp_path]))) == ["pdst", "pdst · seed 1 (stopped, round 1 of 1)"]


def test_runs_are_found_at_any_depth_but_not_inside_runs(compared: Path, tmp_path: Path) -> None:
    deep = tmp_path / "recipe1" / "mnist" / "alpha1"
    for name in ("nst-seed0", "nst-seed1"):
        shutil.copytree(compared / name, deep / name)
    shutil.copytree(compared / "dense-seed0", deep / "nst-seed0" / "below")
    (tmp_path / "recipe1" / "empty").mkdir()
    (tmp_path / "recipe1" / "lost" / "checkpoints").mkdir(parents=True)
    (deep / "circle").symlink_to(tmp_path)
    (deep / "latest").symlink_to(deep / "nst-seed1")
    found = load([tmp_path, deep / "nst-seed0"])
    assert [run.folder for run in found.runs] == [deep / "nst-seed0", deep / "nst-seed1"]
    assert list(found.problems) == [tmp_path / "recipe1" / "lost"]
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.md")]) == 0
    assert "| nst | 2 |" in (tmp_path / "r.md").read_text()
    pytest.importorskip("matplotlib")
    assert main(["figure", "sm-heatmap", str(tmp_path), "--out", str(tmp_path / "r.png")]) == 0


def test_watch_follows_run_at_any_depth(compared: Path, tmp_path: Path) -> None:
    deep = tmp_path / "recipe1" / "mnist" / "alpha1"
    shutil.copytree(compared / "nst-seed0", deep / "a")
    edited(compared / "nst-seed1", deep / "b", rounds=2)
    feed = Feed(tmp_path)
    shown = {g["label"]: g["accuracy"]["round"] for g in feed.data()["parts"][0]["groups"]}
    assert shown == {"nst": [1, 2, 3, 4, 5], "nst · seed 1": [1, 2]}
    assert feed.data()["parts"][0]["groups"][1]["rounds"] == "2 of 5"
    shutil.copy(compared / "nst-seed1" / "results.jsonl", deep / "b" / "results.jsonl")
    assert [(g["label"], g["seeds"]) for g in feed.data()["parts"][0]["groups"]] == [("nst", 2)]


@pytest.mark.parametrize("change", [
    lambda samples: [(x, y.flip(0)) for x, y in samples], lambda samples: [(x + 0.1, y) for x, y in samples],
], ids=["labels", "inputs"])  # fmt: skip
def test_custom_tasks_with_other_data_are_not_averaged(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    """Model, name and numbers of samples are the same."""
    first = [blobs(8, (6,), i) for i in range(3)]
    other = change(first)
    for i, (clients, seed) in enumerate(((first, 0), (first, 1), (other, 2))):
        task = Task(DropoutNet, clients, blobs(9, (6,), 9))
        simulate(PDST(0.3), task, 1, folder=tmp_path / str(i), per_round=2, seed=seed, workers=1, device="cpu")
    assert [len(runs) for runs in groups_of(load([tmp_path]).runs).values()] == [2, 1]


def test_same_run_from_python_and_by_command_differs_in_nothing_else(tmp_path: Path) -> None:
    words = ["--clients", "4", "--per-round", "2", "--rounds", "1", "--max-steps", "1", "--device", "cpu", "--quiet"]
    assert main(["run", "--method", "spdst", "--density", "0.02", *words, "--out", str(tmp_path / "a")]) == 0
    method, task = SPDST(density=0.02), tasks.digits(clients=4)
    settings = {"rounds": 1, "per_round": 2, "max_steps": 1, "device": "cpu", "progress": False}
    simulate(method, task, **settings, folder=tmp_path / "b")
    found = load([tmp_path / "a", tmp_path / "b"])
    assert list(groups_of(found.runs)) == ["spdst · started by command", "spdst · started from Python"]
    assert "rounds" not in groups_table(found).head
    simulate(PDST(density=0.02), task, **{**settings, "rounds": 2}, folder=tmp_path / "c")
    table = groups_table(load([tmp_path]))
    assert sorted(row[table.head.index("rounds")].value for row in table.rows) == [1, 1, 2]
