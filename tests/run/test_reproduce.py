"""Tables as data, cells that are run once, results that say where they came from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from flashfl.cli import _config, _parser, _settings_apart, main
from flashfl.core.errors import ConfigError
from flashfl.engine.train import ClientFailed, Trainer
from flashfl.methods import SPDST
from flashfl.run import compare as comparing
from flashfl.run import stored
from flashfl.run.cells import Cell, chosen, load_table, tables
from flashfl.run.config import make_config
from flashfl.run.reproduce import markdown, page, panels, reproduce
from flashfl.run.stored import command_of, pending, result_of, stale

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"rounds": 2, "per_round": 2, "max_steps": 1, "eval_every": 1, "workers": 1, "batch": 4}


LONG: dict[str, Any] = {**SMALL, "rounds": 40, "checkpoint_every": 2}


def small_cell(train: dict[str, Any] = SMALL, **method: Any) -> Cell:
    task = {"dataset": "mnist", "alpha": 1.0, "clients": 4, "synthetic": True, "limit": 64}
    return Cell(
        task,
        {"name": "spdst", "density": 0.2, "warmup_epochs": 2, **method},
        "SPDST",
        {"mean": 90.0, "std": 1.0},
        train,
    )


@pytest.mark.parametrize("name", tables())
def test_every_table_is_made_of_cells_that_can_be_run(name: str) -> None:
    title, rows, cells = load_table(name)
    assert title
    assert set(rows) <= {"dataset", "alpha", "density"}
    for cell in cells:
        config = cell.config(1)
        assert config.train.seed == 1
        assert config.method.name == cell.method["name"]
    assert len({c.place(0) + c.column for c in cells}) == len(cells)
    for cell in cells:
        assert cell in chosen(cells, "", "", "", cell.column), "a column can be asked for by its name"


def test_an_unknown_table_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'main'"):
        load_table("mian")


def test_filters() -> None:
    _, _, cells = load_table("main")
    found = chosen(cells, "cifar10", "1", "0.05", "")
    assert {c.column for c in found} == {"dense", "NST", "PDST", "SPDST", "JMWST r1", "JMWST r5"}
    assert {c.density for c in found} == {0.05, 1.0}
    with pytest.raises(ConfigError, match="unknown dataset 'cifar11': did you mean 'cifar10'"):
        chosen(cells, "cifar10,cifar11", "", "", "")
    with pytest.raises(ConfigError, match=r"unknown density '0\.07'"):
        chosen(cells, "", "", "0.05,0.07", "")
    with pytest.raises(ConfigError, match="unknown method 'SPDTS'"):
        chosen(cells, "", "", "", "SPDTS")
    with pytest.raises(ConfigError, match="no cell of the table fits these filters together"):
        chosen(cells, "femnist", "1", "", "")
    with pytest.raises(ConfigError, match="have no density"):
        chosen(load_table("hetero")[2], "", "", "0.1", "")


def test_what_is_shown_must_be_there_and_of_a_known_kind(tmp_path: Path, capsys: Any) -> None:
    assert main(["reproduce", "main", "--results", str(tmp_path / "none")]) == 1
    assert main(["reproduce", "main", "--out", str(tmp_path / "table.csv")]) == 1
    said = capsys.readouterr().err
    assert "there is no folder" in said
    assert "must end in one of .md, .html, .png" in said


def test_the_committed_results_render_without_running_anything(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["reproduce", "main", "--dataset", "cifar10", "--alpha", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("| cifar10 | 1 |") == 16
    assert "| method | ours % | best % | before % | paper % | difference | seeds |" in out
    assert "| SPDST | 85.63 ± 0.04 | 85.78 |  | 85.64 ± 0.58 | -0.01 | 2 |" in out
    assert "| JMWST r1 | 85.13 ± 0.13 | 85.40 | 85.14 | 85.34 ± 0.27 | -0.21 | 2 |" in out
    assert "not run" not in out
    assert main(["reproduce", "main", "--dataset", "mnist"]) == 0
    out = capsys.readouterr().out
    assert out.count("| mnist |") == out.count("| 3 |") == 33
    assert "not run" not in out


def test_the_committed_results_are_drawn(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    found = panels(chosen(load_table("main")[2], "cifar10", "1", "", ""), 1, Path("results"))
    assert [len(lines) for lines in found.values()] == [6, 6, 6]
    assert found["cifar10, alpha 1, density 0.01"]["dense"] == found["cifar10, alpha 1, density 0.1"]["dense"]
    asked = ["reproduce", "main", "--dataset", "cifar10", "--alpha", "1"]
    assert main([*asked, "--out", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "none").mkdir()
    assert main([*asked, "--results", str(tmp_path / "none"), "--out", str(tmp_path / "other.png")]) == 1
    assert "nothing to draw" in capsys.readouterr().err


def made_by(command: str) -> dict[str, Any]:
    words = command.split()[2:]
    pairs = dict(zip((w[2:].replace("-", "_") for w in words[::2]), words[1::2], strict=True))
    return make_config({}, pairs).to_json()


def test_the_commands_in_results_give_their_configurations() -> None:
    files = list((ROOT / "results").rglob("*.json"))
    assert files
    for path in files:
        record = json.loads(path.read_text())
        made = made_by(record["command"])
        assert made["method"] == record["config"]["method"]
        assert made["task"] == record["config"]["task"]
        for name, value in record["config"]["train"].items():
            assert made["train"][name] == value


@pytest.mark.parametrize("table", tables())
def test_every_cell_has_a_command(table: str) -> None:
    for cell in load_table(table)[2]:
        config = cell.config(0).to_json()
        assert made_by(command_of(config)) == config


def test_one_configuration_lies_in_one_place() -> None:
    places: dict[str, str] = {}
    for cell in (cell for table in tables() for cell in load_table(table)[2]):
        config = json.dumps(cell.config(0).to_json(), sort_keys=True)
        assert places.setdefault(config, cell.place(0)) == cell.place(0)


def test_cells_are_run_once_and_say_where_they_came_from(tmp_path: Path) -> None:
    cell = small_cell()
    results, runs = tmp_path / "results", tmp_path / "runs"
    assert reproduce([cell, cell], 2, results, runs, 5, {}) == (2, 0)
    assert reproduce([cell, cell], 2, results, runs, 5, {}) == (0, 0), "nothing is run twice"
    record = result_of(cell, 1, results)
    assert record is not None
    assert record["seed"] == 1
    assert record["rounds"] == 2
    assert len(record["curve"]) == 2
    assert record["bytes"]["up"] > 0
    assert record["commit"]
    assert record["command"].startswith("flashfl run --method spdst")
    assert command_of(record["config"]) == record["command"]


def test_processes_that_work_on_one_table_share_its_cells(tmp_path: Path, capsys: Any) -> None:
    taken, free = small_cell(), small_cell(density=0.3)
    results, runs = tmp_path / "results", tmp_path / "runs"
    lock = runs / f"recipe{stored.RECIPE}" / f"{taken.place(0)}.lock"
    holds = "import sys; from pathlib import Path; from flashfl.run.reproduce import claim\n"
    holds += "with claim(Path(sys.argv[1])) as ours: print(ours, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holds, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert reproduce([taken, free], 1, results, runs, 5, {}) == (1, 0)
        other.kill()
    assert f"{taken.place(0)}: another process has it" in capsys.readouterr().err
    assert result_of(free, 0, results) is not None
    assert reproduce([taken, free], 1, results, runs, 5, {}) == (1, 0)


def test_a_change_of_recipe_makes_cells_stale(tmp_path: Path, monkeypatch: Any) -> None:
    cell = small_cell()
    reproduce([cell], 1, tmp_path / "results", tmp_path / "runs", 5, {})
    monkeypatch.setattr(stored, "RECIPE", 99)
    record = result_of(cell, 0, tmp_path / "results")
    assert record is not None
    assert stale(record, cell)
    assert list(pending([cell], 1, tmp_path / "results")) == [(cell, 0)]
    with pytest.MonkeyPatch.context() as patch:
        trained = []
        real = Trainer.train
        patch.setattr(Trainer, "train", lambda *given: trained.append(1) or real(*given))
        assert reproduce([cell], 1, tmp_path / "results", tmp_path / "runs", 5, {}) == (1, 0)
    assert trained, "the old recipe's run is not passed off as the new one's"
    fresh = result_of(cell, 0, tmp_path / "results")
    assert fresh is not None
    assert not stale(fresh, cell)


def test_results_of_a_method_that_has_changed_are_stale() -> None:
    hetero = Cell({"dataset": "mnist", "alpha": 1.0}, {"name": "hetero-spdst"}, "hetero-SPDST", None, {})
    assert stale({"recipe": stored.RECIPE}, hetero)
    assert not stale({"recipe": stored.RECIPE}, small_cell())


def test_all_seeds_there_are_count_unless_fewer_are_asked_for(tmp_path: Path) -> None:
    cell = small_cell()
    reproduce([cell], 2, tmp_path / "results", tmp_path / "runs", 5, {})
    every, one = (markdown("main", [cell], seeds, tmp_path / "results").splitlines()[-1] for seeds in (None, 1))
    assert (every.count(" | 2 | "), every.count("±")) == (1, 2)  # ours, and the paper's
    assert (one.count(" | 1 | "), one.count("±")) == (2, 1)  # alpha is 1 too


def test_a_damaged_result_is_run_again(tmp_path: Path) -> None:
    cell = small_cell()
    path = tmp_path / f"{cell.place(0)}.json"
    path.parent.mkdir(parents=True)
    for text in ('{"accuracy": 0.', "5", '{"accuracy": 0.5}', "[" * 100_000):
        path.write_text(text)
        with pytest.warns(RuntimeWarning, match="counts as not run: it"):
            assert list(pending([cell], 1, tmp_path)) == [(cell, 0)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"best": None}, "its best is missing or no number"),
        ({"accuracy": "0.9"}, "its accuracy is"),
        ({"accuracy": float("nan")}, "its accuracy is"),
        ({"bytes": {}}, "its bytes up, bytes down is missing or not above 0"),
        ({"rounds": 0}, "its rounds is missing or not above 0"),
        ({"views": None}, "its view"),
        ({"curve": [[1, None, 2, 3]]}, "its curve is not made of rounds"),
        ({"seed": 1}, "it is of seed 1"),
        ({"config": None}, "it does not say its task settings"),
        (
            {"config": {"task": {}, "method": {"density": 0.1}, "train": {}}},
            r"its density is 0\.1 and the cell's is 0\.2",
        ),
    ],
)
def test_what_is_no_result_of_the_cell_is_not_shown(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    cell, results = small_cell(), tmp_path / "results"
    reproduce([cell], 1, results, tmp_path / "runs", 5, {})
    path = results / f"{cell.place(0)}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.warns(RuntimeWarning, match=f"counts as not run: {said}"):
        assert "not run" in markdown("main", [cell], None, results)


def test_a_result_under_another_name_is_not_another_seed(tmp_path: Path) -> None:
    cell, results = small_cell(), tmp_path / "results"
    reproduce([cell], 1, results, tmp_path / "runs", 5, {})
    text = (results / f"{cell.place(0)}.json").read_text()
    for name in ("1", "00"):
        (results / f"{cell.place(0).removesuffix('0')}{name}.json").write_text(text)
    with pytest.warns(RuntimeWarning, match="it is of seed 0"):
        assert len(stored.results_of(cell, None, results)) == 1


def test_fresh_results_are_not_averaged_with_stale_ones(tmp_path: Path) -> None:
    cell, results = small_cell(), tmp_path / "results"
    reproduce([cell], 2, results, tmp_path / "runs", 5, {})
    path = results / f"{cell.place(1)}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "recipe": 0}))
    assert [found["seed"] for found in stored.results_of(cell, None, results)] == [0]
    path.unlink()
    path = results / f"{cell.place(0)}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "recipe": 0}))
    assert "(stale)" in markdown("main", [cell], None, results)


def test_clients_that_were_left_out_are_told_of(tmp_path: Path, monkeypatch: Any) -> None:
    cell, results, real = small_cell(), tmp_path / "results", Trainer.train

    def fails(self: Trainer, order: Any, client: int, *given: Any) -> Any:
        if order.tag == (2, 1, 0) and client == min(calls.setdefault(order.tag, {client})):
            raise ClientFailed("it has had enough")
        return real(self, order, client, *given)

    calls: dict[Any, set[int]] = {}
    monkeypatch.setattr(Trainer, "train", fails)
    assert reproduce([cell], 1, results, tmp_path / "runs", 5, {}) == (1, 0)
    assert "(1 clients left out)" in markdown("main", [cell], None, results)


def stopped_at(monkeypatch: Any, rounds: int) -> None:
    """Let the budget end after so many rounds, those of stage 1 included."""
    seen: list[int] = []

    def clock() -> float:
        return 1e9 if len(seen) >= rounds else 0.0

    real = comparing.Display.__call__
    monkeypatch.setattr(comparing.Display, "__call__", lambda *given: seen.append(1) or real(*given))
    monkeypatch.setattr(comparing.time, "monotonic", clock)


def test_a_budget_ends_in_the_middle_of_a_cell_which_goes_on_from_there(tmp_path: Path, capsys: Any) -> None:
    cell, results, runs = small_cell({**LONG, "rounds": 8}), tmp_path / "results", tmp_path / "runs"
    whole = tmp_path / "whole"
    assert reproduce([cell], 1, whole, tmp_path / "other", 5, {}) == (1, 0)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(patch, 4)
        assert reproduce([cell, small_cell()], 1, results, runs, 5, {}) == (0, 0)
    assert "2 cells are left (one is begun, and goes on from its checkpoint)" in capsys.readouterr().err
    # However the data and the device are named: the run is the same.
    assert reproduce([cell], 1, results, runs, 5, {"device": "cpu", "data_root": str(tmp_path)}) == (1, 0)
    assert "starting anew" not in capsys.readouterr().err
    [there, asked] = (json.loads((at / f"{cell.place(0)}.json").read_text()) for at in (results, whole))
    for name in ("checksum", "curve", "bytes", "rounds", "commit"):
        assert there[name] == asked[name]


def test_settings_of_the_machine_are_not_the_cells(tmp_path: Path) -> None:
    cell, results = small_cell(), tmp_path / "results"
    asked = {"device": "cpu", "data_root": str(tmp_path), "checkpoint_every": 1, "threads": 1}
    assert reproduce([cell], 1, results, tmp_path / "runs", 5, asked) == (1, 0)
    assert reproduce([cell], 1, results, tmp_path / "runs", 5, {}) == (0, 0)


def test_a_cell_that_other_code_began_says_so(tmp_path: Path) -> None:
    cell, results, runs = small_cell({**LONG, "rounds": 6}), tmp_path / "results", tmp_path / "runs"
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(patch, 4)
        assert reproduce([cell], 1, results, runs, 5, {}) == (0, 0)
    record = runs / f"recipe{stored.RECIPE}" / cell.place(0) / "results.jsonl"
    first, *rest = record.read_text().splitlines(keepends=True)
    header = json.loads(first)
    header["code"]["flashfl"] = "0123abc"
    record.write_text(json.dumps(header) + "\n" + "".join(rest))
    with pytest.warns(RuntimeWarning, match="the code of flashfl has changed"):
        assert reproduce([cell], 1, results, runs, 5, {}) == (1, 0)
    assert json.loads((results / f"{cell.place(0)}.json").read_text())["commit"].endswith(", begun by source 0123abc")


@pytest.mark.parametrize("damage", ["cut", "line", "empty", "gone"])
def test_a_cell_whose_record_is_damaged_is_run_anew(tmp_path: Path, capsys: Any, damage: str) -> None:
    cell, results, runs = small_cell({**LONG, "rounds": 6}), tmp_path / "results", tmp_path / "runs"
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(patch, 5)
        assert reproduce([cell], 1, results, runs, 5, {}) == (0, 0)
    record = runs / f"recipe{stored.RECIPE}" / cell.place(0) / "results.jsonl"
    lines = record.read_text().splitlines(keepends=True)
    made = {"cut": lines[:3], "line": [*lines[:2], "{\n", *lines[2:]], "empty": [], "gone": []}[damage]
    record.write_text("".join(made))
    if damage == "gone":
        record.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of rounds set aside
        assert reproduce([cell], 1, results, runs, 5, {}) == (1, 0)
    assert "cannot go on" in capsys.readouterr().err
    found = result_of(cell, 0, results)
    assert found is not None
    assert (found["rounds"], len(found["curve"])) == (6, 6)


def test_what_cannot_be_kept_is_not_run(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="nothing can be written there"):
        reproduce([small_cell()], 1, tmp_path / "file", tmp_path / "runs", 5, {})
    for minutes in ("-5", "nan"):
        assert main(["reproduce", "main", "--budget-minutes", minutes]) == 1
    assert capsys.readouterr().err.count("must be 0 (only show) or more") == 2


def test_a_commit_is_of_the_code_not_of_a_checkout_it_lies_in(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHFL_COMMIT", raising=False)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(stored, "PACKAGE", tmp_path)
    stored.commit.cache_clear()
    try:
        assert stored.commit().startswith("source ")
    finally:
        stored.commit.cache_clear()


def test_a_cell_that_cannot_be_run_does_not_stop_the_others(tmp_path: Path, capsys: Any) -> None:
    missing = Cell(
        {"dataset": "cifar100", "alpha": 1.0, "data_root": str(tmp_path)}, {"name": "dense"}, "dense", None, {}
    )
    assert reproduce([missing, small_cell()], 1, tmp_path / "results", tmp_path / "runs", 5, {}) == (1, 1)
    assert "could not be run" in capsys.readouterr().err


def test_a_missing_data_set_is_said_once(tmp_path: Path, capsys: Any) -> None:
    task = {"dataset": "cifar100", "alpha": 1.0, "data_root": str(tmp_path)}
    cells = [Cell(task, {"name": "pdst", "density": d}, "PDST", None, {}) for d in (0.1, 0.05, 0.01)]
    assert reproduce(cells, 1, tmp_path / "results", tmp_path / "runs", 5, {}) == (0, 3)
    said = capsys.readouterr().err
    assert said.count("could not be run") == 1
    assert "cifar100: 2 other cells were not tried" in said


def test_an_error_that_is_nobodys_names_its_cell_and_the_others_go_on(tmp_path: Path, capsys: Any) -> None:
    real, cells = SPDST.aggregate, [small_cell({**SMALL, "lr": 0.7}), small_cell()]

    def breaking(error: type[Exception]) -> Any:
        def breaks(self: SPDST, s: Any, sums: Any) -> Any:
            if s.plan.local.lr == 0.7:
                raise error("the device is lost")
            return real(self, s, sums)

        return breaks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SPDST, "aggregate", breaking(NotImplementedError))
        with pytest.raises(NotImplementedError):  # a fault of the code
            reproduce(cells, 1, tmp_path / "results", tmp_path / "runs", 5, {})
        patch.setattr(SPDST, "aggregate", breaking(RuntimeError))
        assert reproduce(cells, 1, tmp_path / "results", tmp_path / "runs", 5, {}) == (1, 1)
    said = capsys.readouterr().err
    assert "could not be run: RuntimeError: the device is lost" in said
    assert "Traceback" in said


def test_no_budget_no_run(tmp_path: Path) -> None:
    assert reproduce([small_cell()], 1, tmp_path / "results", tmp_path / "runs", 0, {}) == (0, 0)


def test_tables_show_what_is_missing_and_what_differs(tmp_path: Path) -> None:
    _, _, cells = load_table("main")
    some = chosen(cells, "cifar10", "1", "0.05", "")
    text = markdown("main", some, 1, tmp_path)
    assert text.count("not run") == 6
    whole = markdown("main", some, 1, ROOT / "results")
    assert "not run" not in whole
    assert "87.13 ± 0.18" in whole
    html = page("main", some, 1, ROOT / "results")
    assert html.startswith("<!doctype html>")
    assert "http" not in html


@pytest.mark.slow
def test_killed_in_the_middle_of_a_cell_nothing_finished_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "go.py"
    script.write_text(
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.run.test_reproduce import LONG, small_cell\n"
        "from flashfl.run.reproduce import reproduce\n"
        "cells = [small_cell(LONG), small_cell(LONG, nm=4)]\n"
        f"reproduce(cells, 1, Path({str(tmp_path)!r}) / 'results', Path({str(tmp_path)!r}) / 'runs', 9, {{}})\n"
    )
    first, second = small_cell(LONG), small_cell(LONG, nm=4)
    process = subprocess.Popen([sys.executable, str(script)])
    running = tmp_path / "runs" / f"recipe{stored.RECIPE}" / second.place(0) / "results.jsonl"
    until = time.monotonic() + 240
    while time.monotonic() < until and not (running.exists() and running.read_text().count('"round"') > 12):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = (tmp_path / "results" / f"{first.place(0)}.json").read_text()
    subprocess.run([sys.executable, str(script)], check=True)
    assert (tmp_path / "results" / f"{first.place(0)}.json").read_text() == done, "a finished cell is not run again"
    record = json.loads((tmp_path / "results" / f"{second.place(0)}.json").read_text())
    assert record["rounds"] == 40


def test_commands_of_committed_results_give_their_settings() -> None:
    found = sorted((Path(__file__).parents[2] / "results").rglob("*.json"))
    assert found
    for path in found:
        record = json.loads(path.read_text())
        parser, commands = _parser()
        words, overrides = _settings_apart(record["command"].split()[1:], commands["run"])
        config = _config(parser.parse_args(words), overrides).to_json()
        for table, settings in record["config"].items():
            told = {k: v for k, v in settings.items() if k not in ("device", "data_root", "workers")}
            assert {k: config[table][k] for k in told} == told, path
