"""The paper's tables: cells that are run once, results that say where they came from, ours beside the paper's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashfl.cli import _config, _parser, _settings_apart, main
from flashfl.core.errors import ConfigError
from flashfl.engine.train import ClientFailed, Trainer
from flashfl.methods import SPDST
from flashfl.paper import TABLES
from flashfl.paper import results as results_module
from flashfl.paper.cells import Cell, chosen, every_table, load_table
from flashfl.paper.reproduce import reproduce
from flashfl.paper.results import RECIPE, Stored, command_of, settled, stale
from flashfl.paper.tables import ABOUT, add_flashplus, panels, table_of
from flashfl.report.page import table_page
from flashfl.run import compare as comparing
from flashfl.run.config import OUTSIDE, make_config
from flashfl.run.track import flat

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


def markdown(cell: Cell, results: Path, seeds: int | None = None) -> str:
    """The cell alone in a table of the paper."""
    return table_of("main", [cell], seeds, Stored(results)).markdown()


def edit_line(results: Path, cell: Cell, of_seed: int = 0, **change: Any) -> None:
    """Change fields of a stored result."""
    path = results / f"{cell.dataset}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    made = [{**r, **change} if r["place"] == cell.place(of_seed) else r for r in records]
    path.write_text("".join(json.dumps(r) + "\n" for r in made))


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_of_every_table_can_be_run(name: str) -> None:
    table = load_table(name)
    cells = table.cells
    assert table.title
    assert set(table.rows) <= {"dataset", "alpha", "density"}
    for cell in cells:
        config = cell.config(1)
        assert config.train.seed == 1
        assert config.method.name == cell.method["name"]
    assert len({c.place(0) + c.column for c in cells}) == len(cells)
    for cell in cells:
        assert cell in chosen(cells, method=cell.column), "a column can be asked for by its name"


def test_unknown_table_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'main'"):
        load_table("mian")


def test_filters() -> None:
    cells = load_table("main").cells
    found = chosen(cells, dataset="cifar10", alpha="1", density="0.05")
    assert {c.column for c in found} == {"dense", "NST", "PDST", "SPDST", "JMWST r1", "JMWST r5"}
    assert {c.density for c in found} == {0.05, 1.0}
    with pytest.raises(ConfigError, match="unknown dataset 'cifar11': did you mean 'cifar10'"):
        chosen(cells, dataset="cifar10,cifar11")
    with pytest.raises(ConfigError, match=r"unknown density '0\.07'"):
        chosen(cells, density="0.05,0.07")
    with pytest.raises(ConfigError, match="unknown method 'spdts': did you mean 'spdst'"):
        chosen(cells, method="SPDTS")
    with pytest.raises(ConfigError, match="no entry of the table matches all of these filters"):
        chosen(cells, dataset="femnist", alpha="1")
    with pytest.raises(ConfigError, match="cannot be filtered by density"):
        chosen(load_table("hetero").cells, density="0.1")


def test_missing_results_folder_or_unknown_format_is_an_error(tmp_path: Path, capsys: Any) -> None:
    assert main(["reproduce", "main", "--results", str(tmp_path / "none")]) == 1
    assert main(["reproduce", "main", "--out", str(tmp_path / "table.csv")]) == 1
    said = capsys.readouterr().err
    assert "there is no such folder" in said
    assert "must end in one of .md, .html, .png" in said


def test_committed_results_render_without_running_anything(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["reproduce", "main", "--dataset", "cifar10", "--alpha", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("| cifar10 | 1 |") == 16
    assert "| method | ours % | best % | before % | paper % | difference | spreads | seeds |" in out
    assert "| SPDST | 85.63 ± 0.04 | 85.78 |  | 85.64 ± 0.58 | -0.01 | 0.0 | 2 |" in out
    assert "| JMWST r1 | 85.13 ± 0.13 | 85.40 | 85.14 | 85.34 ± 0.27 | -0.21 | 0.6 | 2 |" in out
    assert "not run" not in out
    assert main(["reproduce", "main", "--dataset", "mnist"]) == 0
    out = capsys.readouterr().out
    assert out.count("| mnist |") == out.count("| 3 |") == 33
    assert "not run" not in out
    assert main(["reproduce", "wfa"]) == 0  # the paper has no figures for it
    assert "| ours % | best % | seeds |" in capsys.readouterr().out


def test_committed_results_are_drawn(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    found = panels(chosen(load_table("main").cells, dataset="cifar10", alpha="1"), 1, Stored(Path("results")))
    assert [len(lines) for lines in found.values()] == [6, 6, 6]
    assert found["cifar10, alpha 1, density 0.01"]["dense"] == found["cifar10, alpha 1, density 0.1"]["dense"]
    add_flashplus(found, Path("results/bench/plus.jsonl"))
    assert [len(lines.get("flashplus", ())) for lines in found.values()] == [0, 2, 2]  # two budgets, two seeds each
    for seed in (0, 1):
        assert found["cifar10, alpha 1, density 0.01"]["flashplus"][seed][-1][1] > 0.91
    asked = ["reproduce", "main", "--dataset", "cifar10", "--alpha", "1"]
    assert main([*asked, "--out", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "none").mkdir()
    assert main([*asked, "--results", str(tmp_path / "none"), "--out", str(tmp_path / "other.png")]) == 1
    assert "nothing to draw" in capsys.readouterr().err


def committed() -> list[dict[str, Any]]:
    """Every committed result."""
    files = sorted((ROOT / "results").glob("*.jsonl"))
    found = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len(found) >= 157
    return found


def test_committed_results_are_sorted_unique_and_name_their_commit() -> None:
    places = [record["place"] for record in committed()]
    assert len(set(places)) == len(places)
    for path in (ROOT / "results").glob("*.jsonl"):
        own = [p for p in places if p.startswith(f"{path.stem}/")]
        assert own == sorted(own)
        assert len(own) == len(path.read_text().splitlines())
    assert all(record["commit"] and record["machine"] and record["checksum"] for record in committed())


def committed_cells() -> dict[str, Cell]:
    """Every cell by its place without the seed. Where results have chosen a learning rate, with this rate."""
    stored = Stored(ROOT / "results")
    cells = [settled(cell, stored) or cell for table in every_table().values() for cell in table.cells]
    return {cell.place(0).removesuffix("0"): cell for cell in cells}


def test_every_committed_result_belongs_to_a_cell() -> None:
    known = committed_cells()
    assert all(record["place"].removesuffix(str(record["seed"])) in known for record in committed())


def test_committed_results_have_the_settings_of_their_cells() -> None:
    """But for settings that only one of them knows, and those that change the last bits at most."""
    cells = committed_cells()
    machine = {f"train.{name}" for name in (*OUTSIDE, "threads", "lanes")} | {"task.data_root", "task.verify"}
    for record in committed():
        cell = cells[record["place"].removesuffix(str(record["seed"]))]
        if not stale(record, cell):
            mine, theirs = flat(cell.config(record["seed"]).to_json()), flat(record["config"])
            same = mine.keys() & theirs.keys() - machine
            assert {k: mine[k] for k in same} == {k: theirs[k] for k in same}


def made_by(command: str) -> dict[str, Any]:
    words = command.split()[2:]
    pairs = dict(zip((w[2:].replace("-", "_") for w in words[::2]), words[1::2], strict=True))
    return make_config({}, pairs).to_json()


def test_commands_in_results_give_their_configurations() -> None:
    for record in committed():
        made = made_by(record["command"])
        assert made["method"] == record["config"]["method"]
        for table in ("task", "train"):  # a setting that a result does not record did not exist yet
            for name, value in record["config"][table].items():
                if name != "device":  # commands do not say where to run
                    assert made[table][name] == value


@pytest.mark.parametrize("table", TABLES)
def test_every_cell_has_a_command(table: str) -> None:
    for cell in load_table(table).cells:
        config = cell.config(0).to_json()
        assert made_by(command_of(config)) == config


def test_equal_configurations_have_one_place() -> None:
    places: dict[str, str] = {}
    for cell in (cell for table in every_table().values() for cell in table.cells):
        config = json.dumps(cell.config(0).to_json(), sort_keys=True)
        assert places.setdefault(config, cell.place(0)) == cell.place(0)


def test_cells_are_run_once_and_record_their_origin(tmp_path: Path) -> None:
    cell = small_cell()
    results, runs = tmp_path / "results", tmp_path / "runs"
    assert reproduce([cell, cell], 2, results, runs, 5, {}) == (2, 0)
    assert reproduce([cell, cell], 2, results, runs, 5, {}) == (0, 0), "nothing is run twice"
    record = Stored(results).get(cell, 1)
    assert record is not None
    assert record["seed"] == 1
    assert record["rounds"] == 2
    assert len(record["curve"]) == 2
    assert record["bytes"]["up"] > 0
    assert record["commit"]
    assert record["command"].startswith("flashfl run --method spdst")
    assert command_of(record["config"]) == record["command"]


def test_processes_share_the_cells_of_a_table(tmp_path: Path, capsys: Any) -> None:
    taken, free = small_cell(), small_cell(density=0.3)
    results, runs = tmp_path / "results", tmp_path / "runs"
    lock = runs / f"recipe{RECIPE}" / f"{taken.place(0)}.lock"
    holds = "import sys; from pathlib import Path; from flashfl.run.lock import claim\n"
    holds += "with claim(Path(sys.argv[1])) as ours: print(ours, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holds, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert reproduce([taken, free], 1, results, runs, 5, {}) == (1, 0)
        other.kill()
    assert f"{taken.place(0)}: skipped, as another process runs it" in capsys.readouterr().err
    assert Stored(results).get(free, 0) is not None
    assert reproduce([taken, free], 1, results, runs, 5, {}) == (1, 0)


def test_new_recipe_makes_results_stale(tmp_path: Path, monkeypatch: Any) -> None:
    cell = small_cell()
    reproduce([cell], 1, tmp_path / "results", tmp_path / "runs", 5, {})
    monkeypatch.setattr(results_module, "RECIPE", 99)
    record = Stored(tmp_path / "results").get(cell, 0)
    assert record is not None
    assert stale(record, cell)
    assert Stored(tmp_path / "results").pending([cell], 1) == [(cell, 0)]
    with pytest.MonkeyPatch.context() as patch:
        trained = []
        real = Trainer.train
        patch.setattr(Trainer, "train", lambda *given: trained.append(1) or real(*given))
        assert reproduce([cell], 1, tmp_path / "results", tmp_path / "runs", 5, {}) == (1, 0)
    assert trained, "the old recipe's run is not passed off as the new one's"
    fresh = Stored(tmp_path / "results").get(cell, 0)
    assert fresh is not None
    assert not stale(fresh, cell)


def test_results_of_a_changed_method_are_stale() -> None:
    hetero = Cell({"dataset": "mnist", "alpha": 1.0}, {"name": "hetero-spdst"}, "hetero-SPDST", None, {})
    assert stale({"recipe": RECIPE}, hetero)
    assert not stale({"recipe": RECIPE}, small_cell())


def test_all_stored_seeds_count_unless_fewer_are_asked_for(tmp_path: Path) -> None:
    cell = small_cell()
    reproduce([cell], 2, tmp_path / "results", tmp_path / "runs", 5, {})
    every, one = (markdown(cell, tmp_path / "results", seeds).splitlines()[-1] for seeds in (None, 1))
    assert (every.count(" | 2 | "), every.count("±")) == (1, 2)  # ours, and the paper's
    assert (one.count(" | 1 | "), one.count("±")) == (2, 1)  # alpha is 1 too


def test_damaged_result_is_run_again(tmp_path: Path) -> None:
    cell = small_cell()
    path, place = tmp_path / f"{cell.dataset}.jsonl", json.dumps(cell.place(0))
    damaged = ['{"accuracy": 0.', "5", '{"accuracy": 0.5}', "[" * 100_000, f'{{"place": {place}']
    for text in damaged:
        path.write_text(text + "\n")
        with pytest.warns(RuntimeWarning, match=r"lines \[1\] are not results"):
            assert Stored(tmp_path).pending([cell], 1) == [(cell, 0)]
    path.write_text(f'{{"place": {place}, "accuracy": 0.5}}\n')
    with pytest.warns(RuntimeWarning, match=r"lines \[1\] are not results"):
        assert Stored(tmp_path).pending([cell], 1) == [(cell, 0)]


def test_adding_a_result_keeps_all_other_lines(tmp_path: Path) -> None:
    cell = small_cell()
    results = tmp_path / "results"
    reproduce([cell], 1, results, tmp_path / "runs", 5, {})
    record = Stored(results).get(cell, 0)
    assert record is not None
    other = [json.dumps({**record, "place": place}) for place in ("mnist/z", "mnist/a")]
    (results / "mnist.jsonl").write_text(f"{other[0]}\nnot JSON\n{other[1]}\n")
    for accuracy in (0.1, 0.2):
        Stored(results).add(cell, {**record, "accuracy": accuracy})
    lines = (results / "mnist.jsonl").read_text().splitlines()
    assert lines == [other[1], json.dumps({**record, "accuracy": 0.2}), other[0], "not JSON"]


def test_of_two_lines_for_one_place_the_last_counts(tmp_path: Path) -> None:
    cell, results = small_cell(), tmp_path / "results"
    reproduce([cell], 1, results, tmp_path / "runs", 5, {})
    path = results / "mnist.jsonl"
    other = {**json.loads(path.read_text()), "accuracy": 0.123}
    with path.open("a") as file:
        file.write(json.dumps(other) + "\n")
    assert "| 12.30 |" in markdown(cell, results)


def test_processes_add_results_at_the_same_time(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from flashfl.paper.cells import Cell\n"
        "from flashfl.paper.results import Stored\n"
        "cell = Cell({'dataset': 'mnist'}, {'name': 'dense'}, '', None, {})\n"
        "for i in range(40): Stored(Path(sys.argv[1])).add(cell, {'place': f'{sys.argv[2]}-{i:02d}'})"
    )
    both = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name]) for name in ("a", "b")]
    assert [process.wait() for process in both] == [0, 0]
    assert len((tmp_path / "mnist.jsonl").read_text().splitlines()) == 80


def test_copied_result_is_not_another_seed(tmp_path: Path) -> None:
    cell, results = small_cell(), tmp_path / "results"
    reproduce([cell], 1, results, tmp_path / "runs", 5, {})
    path = results / "mnist.jsonl"
    record = json.loads(path.read_text())
    with path.open("a") as file:
        file.write(json.dumps({**record, "place": cell.place(1)}) + "\n")
    assert len(Stored(results).all(cell, None)) == 1


def test_fresh_results_are_not_averaged_with_stale_ones(tmp_path: Path) -> None:
    cell, results = small_cell(), tmp_path / "results"
    reproduce([cell], 2, results, tmp_path / "runs", 5, {})
    edit_line(results, cell, of_seed=1, recipe=0)
    assert [found["seed"] for found in Stored(results).all(cell, None)] == [0]
    edit_line(results, cell, recipe=0)
    assert "(stale)" in markdown(cell, results)


def test_dropped_clients_are_shown(tmp_path: Path, monkeypatch: Any) -> None:
    cell, results, real = small_cell(), tmp_path / "results", Trainer.train

    def fails(self: Trainer, order: Any, client: int, *given: Any) -> Any:
        if order.tag == (2, 1, 0) and client == min(calls.setdefault(order.tag, {client})):
            raise ClientFailed("it has had enough")
        return real(self, order, client, *given)

    calls: dict[Any, set[int]] = {}
    monkeypatch.setattr(Trainer, "train", fails)
    assert reproduce([cell], 1, results, tmp_path / "runs", 5, {}) == (1, 0)
    assert "(1 clients dropped)" in markdown(cell, results)


def stopped_at(monkeypatch: Any, rounds: int) -> None:
    """Let the budget end after so many rounds, those of stage 1 included."""
    seen: list[int] = []

    def clock() -> float:
        return 1e9 if len(seen) >= rounds else 0.0

    real = comparing.Display.__call__
    monkeypatch.setattr(comparing.Display, "__call__", lambda *given: seen.append(1) or real(*given))
    monkeypatch.setattr(comparing.time, "monotonic", clock)


def test_cell_continues_after_the_budget_is_spent(tmp_path: Path, capsys: Any) -> None:
    # Two runs may choose sparse compute differently, as it is measured.
    cell = small_cell({**LONG, "rounds": 8, "sparse_compute": False})
    results, runs = tmp_path / "results", tmp_path / "runs"
    whole = tmp_path / "whole"
    assert reproduce([cell], 1, whole, tmp_path / "other", 5, {}) == (1, 0)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(patch, 4)
        assert reproduce([cell, small_cell()], 1, results, runs, 5, {}) == (0, 0)
    assert "2 cells are left: run the command again" in capsys.readouterr().err
    # However the data and the device are named: the run is the same.
    assert reproduce([cell], 1, results, runs, 5, {"device": "cpu", "data_root": str(tmp_path)}) == (1, 0)
    assert "starting again" not in capsys.readouterr().err
    [there, asked] = (json.loads((at / "mnist.jsonl").read_text()) for at in (results, whole))
    for name in ("checksum", "curve", "bytes", "rounds", "commit"):
        assert there[name] == asked[name]


def test_machine_settings_do_not_make_another_cell(tmp_path: Path) -> None:
    cell, results = small_cell(), tmp_path / "results"
    asked = {"device": "cpu", "data_root": str(tmp_path), "checkpoint_every": 1, "threads": 1}
    assert reproduce([cell], 1, results, tmp_path / "runs", 5, asked) == (1, 0)
    assert reproduce([cell], 1, results, tmp_path / "runs", 5, {}) == (0, 0)


def test_cell_begun_by_other_code_says_so(tmp_path: Path) -> None:
    cell, results, runs = small_cell({**LONG, "rounds": 6}), tmp_path / "results", tmp_path / "runs"
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(patch, 4)
        assert reproduce([cell], 1, results, runs, 5, {}) == (0, 0)
    record = runs / f"recipe{RECIPE}" / cell.place(0) / "results.jsonl"
    first, *rest = record.read_text().splitlines(keepends=True)
    header = json.loads(first)
    header["code"]["flashfl"] = "0123abc"
    record.write_text(json.dumps(header) + "\n" + "".join(rest))
    with pytest.warns(RuntimeWarning, match="the code of flashfl changed since"):
        assert reproduce([cell], 1, results, runs, 5, {}) == (1, 0)
    assert json.loads((results / "mnist.jsonl").read_text())["commit"].endswith(", begun by source 0123abc")


@pytest.mark.parametrize("damage", ["cut", "line", "empty", "gone"])
def test_cell_with_damaged_records_is_run_again(tmp_path: Path, capsys: Any, damage: str) -> None:
    cell, results, runs = small_cell({**LONG, "rounds": 6}), tmp_path / "results", tmp_path / "runs"
    with pytest.MonkeyPatch.context() as patch:
        stopped_at(patch, 5)
        assert reproduce([cell], 1, results, runs, 5, {}) == (0, 0)
    record = runs / f"recipe{RECIPE}" / cell.place(0) / "results.jsonl"
    lines = record.read_text().splitlines(keepends=True)
    made = {"cut": lines[:3], "line": [*lines[:2], "{\n", *lines[2:]], "empty": [], "gone": []}[damage]
    record.write_text("".join(made))
    if damage == "gone":
        record.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of rounds set aside
        assert reproduce([cell], 1, results, runs, 5, {}) == (1, 0)
    assert "cannot continue" in capsys.readouterr().err
    found = Stored(results).get(cell, 0)
    assert found is not None
    assert (found["rounds"], len(found["curve"])) == (6, 6)


def test_unwritable_results_folder_fails_before_running(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be a folder"):
        reproduce([small_cell()], 1, tmp_path / "file", tmp_path / "runs", 5, {})
    for minutes in ("-5", "nan"):
        assert main(["reproduce", "main", "--budget-minutes", minutes]) == 1
    assert capsys.readouterr().err.count("at least 0. 0 only shows results") == 2


def test_commit_is_not_that_of_a_surrounding_checkout(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHFL_COMMIT", raising=False)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(results_module, "PACKAGE", tmp_path)
    results_module.commit.cache_clear()
    try:
        assert results_module.commit().startswith("source ")
    finally:
        results_module.commit.cache_clear()


def test_failing_cell_does_not_stop_the_others(tmp_path: Path, capsys: Any) -> None:
    missing = Cell(
        {"dataset": "cifar100", "alpha": 1.0, "data_root": str(tmp_path)}, {"name": "dense"}, "dense", None, {}
    )
    assert reproduce([missing, small_cell()], 1, tmp_path / "results", tmp_path / "runs", 5, {}) == (1, 1)
    assert "dense-seed0 failed: DataError" in capsys.readouterr().err


def test_missing_data_set_is_reported_once(tmp_path: Path, capsys: Any) -> None:
    task = {"dataset": "cifar100", "alpha": 1.0, "data_root": str(tmp_path)}
    cells = [Cell(task, {"name": "pdst", "density": d}, "PDST", None, {}) for d in (0.1, 0.05, 0.01)]
    assert reproduce(cells, 1, tmp_path / "results", tmp_path / "runs", 5, {}) == (0, 3)
    said = capsys.readouterr().err
    assert said.count("failed: DataError") == 1
    assert "cifar100: other cells are skipped" in said


def test_runtime_error_names_its_cell_and_the_others_go_on(tmp_path: Path, capsys: Any) -> None:
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
    assert "failed: RuntimeError: the device is lost" in said
    assert "Traceback" in said


def test_no_budget_no_run(tmp_path: Path) -> None:
    assert reproduce([small_cell()], 1, tmp_path / "results", tmp_path / "runs", 0, {}) == (0, 0)


def test_tables_show_what_is_missing_and_what_differs(tmp_path: Path) -> None:
    some = chosen(load_table("main").cells, dataset="cifar10", alpha="1", density="0.05")
    assert table_of("main", some, 1, Stored(tmp_path)).markdown().count("not run") == 6
    table = table_of("main", some, 1, Stored(ROOT / "results"))
    assert "not run" not in table.markdown()
    assert "87.13 ± 0.18" in table.markdown()
    html = table_page(table, ABOUT)
    assert html.startswith("<!doctype html>")
    data = json.loads(html.split('type="application/json">')[1].split("</script>")[0])
    assert [[cell["text"] for cell in row] for row in data["parts"][0]["table"]["rows"]] == [
        [e.text for e in r] for r in table.rows
    ]


@pytest.mark.slow
def test_kill_during_a_cell_loses_no_finished_result(tmp_path: Path) -> None:
    script = tmp_path / "go.py"
    script.write_text(
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.run.test_reproduce import LONG, small_cell\n"
        "from flashfl.paper.reproduce import reproduce\n"
        "cells = [small_cell(LONG), small_cell(LONG, nm=4)]\n"
        f"reproduce(cells, 1, Path({str(tmp_path)!r}) / 'results', Path({str(tmp_path)!r}) / 'runs', 9, {{}})\n"
    )
    first, second = small_cell(LONG), small_cell(LONG, nm=4)
    process = subprocess.Popen([sys.executable, str(script)])
    running = tmp_path / "runs" / f"recipe{RECIPE}" / second.place(0) / "results.jsonl"
    until = time.monotonic() + 240
    while time.monotonic() < until and not (running.exists() and running.read_text().count('"round"') > 12):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = Stored(tmp_path / "results").get(first, 0)
    assert done is not None
    subprocess.run([sys.executable, str(script)], check=True)
    assert Stored(tmp_path / "results").get(first, 0) == done, "a finished cell is not run again"
    record = Stored(tmp_path / "results").get(second, 0)
    assert record is not None
    assert record["rounds"] == 40


def test_commands_of_committed_results_give_their_settings() -> None:
    for record in committed():
        parser, commands = _parser()
        words, overrides = _settings_apart(record["command"].split()[1:], commands["run"])
        config = _config(parser.parse_args(words), overrides).to_json()
        for table, settings in record["config"].items():
            told = {k: v for k, v in settings.items() if k not in ("device", "data_root", "workers")}
            assert {k: config[table][k] for k in told} == told, record["place"]


def stored_result(results: Path, cell: Cell, accuracy: float, **more: Any) -> None:
    """Write a result of a cell without running it."""
    record = {
        "place": cell.place(0), "recipe": results_module.recipe_of(cell.method["name"]), "seed": 0,
        "accuracy": accuracy, "best": accuracy, "curve": [[1, accuracy, 10, 10]], "bytes": {"up": 10, "down": 10},
        "rounds": 1, "clients_per_round": 1, "values": 1, "seconds": 1.0, "density": 0.05, **more,
    }  # fmt: skip
    Stored(results).add(cell, record)


def test_learning_rate_of_a_rival_is_that_which_did_best_on_held_out_samples(tmp_path: Path, capsys: Any) -> None:
    [cell] = [c for c in load_table("rivals").cells if c.method["name"] == "topk"]
    tried = [c for c in load_table("rivals_lr").cells if c.method["name"] == "topk"]
    stored = Stored(tmp_path)
    assert [c.train["lr"] for c in tried] == [0.03, 0.1, 0.3]
    stored_result(tmp_path, replace(cell, tuned=""), 0.9)
    assert stored.all(cell, None) == [], "a run at the usual rate is not the row's before that rate is chosen"
    for other, accuracy in zip(tried, (0.5, 0.7, 0.7), strict=True):
        assert settled(cell, stored) is None, "a rate has not been tried yet"
        stored_result(tmp_path, other, accuracy)
    chosen_cell = settled(cell, stored)
    assert chosen_cell is not None
    assert chosen_cell.column == "top-K error feedback lr 0.1"
    assert chosen_cell.config(0).train.lr == 0.1
    assert settled(chosen_cell, stored) == chosen_cell
    assert stored.pending([cell], 1) == [], "0.1 is the usual rate, which has been run"
    stored_result(tmp_path, tried[2], 0.8)
    other_cell = settled(cell, stored)
    assert other_cell is not None
    assert other_cell.config(0).train.lr == 0.3
    assert stored.pending([cell], 1) == [(other_cell, 0)]
    assert main(["reproduce", "rivals", "--method", "topk", "--results", str(tmp_path)]) == 0
    assert "| top-K error feedback lr 0.3 | not run |" in capsys.readouterr().out


def test_every_rival_can_be_tuned_with_three_rates_of_its_own_settings() -> None:
    for cell in load_table("rivals").cells:
        train = {"rounds": 100, **cell.train}
        rates = [
            c.train["lr"]
            for c in load_table("rivals_lr").cells
            if c.method == cell.method and {k: v for k, v in c.train.items() if k != "lr"} == train
        ]
        assert len(rates) == (3 if cell.tuned else 0), cell.column
        assert rates == sorted(set(rates))
    held_out = {c.task["held_out"] for c in load_table("rivals_lr").cells}
    assert held_out == {5000}


def test_cell_without_a_chosen_rate_is_skipped_and_says_what_to_run(tmp_path: Path, capsys: Any) -> None:
    cells = [c for c in load_table("rivals").cells if c.method["name"] == "topk"]
    assert reproduce(cells, 1, tmp_path / "results", tmp_path / "runs", 1.0, {}) == (0, 0)
    assert "skipped. First run `flashfl reproduce rivals_lr`" in capsys.readouterr().err


def test_result_is_read_where_the_uploads_reach_a_limit(tmp_path: Path) -> None:
    cells = [c for c in load_table("feddst").cells if c.method["name"] == "feddst"]
    assert len({c.place(0) for c in cells}) == 1, "one run gives both rows"
    gib = 1 << 30
    curve = [
        [100, 0.9, gib // 2, gib],
        [200, 0.95, gib, 2 * gib],
        [300, 0.97, 2 * gib - 5, 4 * gib],
        [400, 0.96, 3 * gib, 6],
    ]
    stored_result(tmp_path, cells[0], 0.96, curve=curve, bytes={"up": 3 * gib, "down": 6 * gib}, rounds=400)
    stored = Stored(tmp_path)
    first, second = (stored.all(cell, None)[0] for cell in cells)
    assert (first["accuracy"], first["rounds"], first["bytes"]["up"]) == (0.95, 200, gib)
    assert (second["accuracy"], second["best"], second["rounds"]) == (0.97, 0.97, 300)
    text = table_of("feddst", cells, None, stored).markdown()
    assert "| mnist | 0.2 | FedDST 1 GiB up | 95.00 | 95.00 | 96.10 | -1.10 |" in text
    stored_result(tmp_path, cells[0], 0.95, curve=curve[:2], bytes={"up": gib + 1, "down": 0})
    assert len(stored.all(cells[0], None)) == 1
    assert stored.all(cells[1], None) == [], "a run that ended before 2 GiB says nothing about it"
