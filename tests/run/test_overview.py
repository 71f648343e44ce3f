"""All tables on one page: the spreads, the colours, what is missing, and the page that is committed."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flashfl.cli import main
from flashfl.core.errors import ConfigError
from flashfl.paper.cells import Cell, every_table, load_table
from flashfl.paper.far import reasons
from flashfl.paper.overview import every_cell, overview
from flashfl.paper.page import page
from flashfl.paper.results import RECIPE, Stored
from flashfl.paper.tables import miss_of

ROOT = Path(__file__).parents[2]
PLACE = "cifar10/alpha0.1/jmwst-d0.1-r_int=5-seed0"  # 75.47 ± 1.18 in one table of the paper, ± 1.08 in another
CELL = load_table("main").cells[0]  # dense FedAvg on CIFAR-10, alpha 1: 87.13 ± 0.18


def record(accuracy: float, seed: int = 0, cell: Cell = CELL, swing: float = 0.0) -> dict[str, Any]:
    """A stored result whose last ten evaluations lie `swing` above and below its accuracy in turn."""
    curve = [[10 * i, accuracy + swing * (-1) ** i, 0, 0] for i in range(1, 31)]
    return {
        "place": cell.place(seed), "recipe": RECIPE, "seed": seed, "accuracy": accuracy, "best": accuracy, "views": {},
        "curve": curve, "bytes": {"up": 10, "down": 10}, "rounds": 600, "clients_per_round": 10, "values": 10,
        "seconds": 1.0, "commit": "abc",
    }  # fmt: skip


def stored(folder: Path, *records: tuple[Cell, dict[str, Any]]) -> Stored:
    found = Stored(folder)
    for cell, one in records:
        found.add(cell, one)
    return found


def kinds(html: str) -> list[str]:
    """The classes of the rows of a page."""
    found: list[str] = []

    class Rows(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "tr" and attrs:
                found.append(str(dict(attrs)["class"]))

    Rows().feed(html)
    return found


def test_every_table_is_on_the_page() -> None:
    assert every_table().keys() == {path.stem for path in (ROOT / "src/flashfl/paper/data").glob("*.json")} - {"far"}
    assert {name: len(cells) for name, cells in every_cell().items()} == {
        name: len(table.cells) for name, table in every_table().items()
    }


def test_spread_of_one_seed_is_that_of_its_last_ten_evaluations() -> None:
    miss = miss_of(CELL, [record(0.8613, swing=0.01)])
    assert miss is not None
    assert miss.points == pytest.approx(-1.0)
    ours = 1.0 * (10 / 9) ** 0.5  # ten values, one point above and below their mean
    assert miss.spreads == pytest.approx(1.0 / (ours**2 + 0.18**2) ** 0.5)


def test_spread_over_seeds_counts_if_it_is_larger() -> None:
    miss = miss_of(CELL, [record(0.8513), record(0.8713, seed=1)])
    assert miss is not None
    assert miss.spreads == pytest.approx(1.0 / (2.0 + 0.18**2) ** 0.5)


def test_spread_is_taken_from_the_table_that_states_it() -> None:
    shared = next(c for c in load_table("fedspa").cells if c.method["name"] == "jmwst" and c.alpha == 1000)
    alone = load_table("nm").cells[0]
    assert shared.paper is not None
    assert "std" not in shared.paper
    found, none = miss_of(shared, [record(0.8718, cell=shared)]), miss_of(alone, [record(0.8, cell=alone)])
    assert found is not None
    assert found.spreads == pytest.approx(0, abs=1e-6)
    assert none is not None
    assert none.spreads is None, "the paper states no spread for it anywhere"


def test_a_table_that_states_a_spread_is_compared_with_its_own() -> None:
    cells = [next(c for c in load_table(name).cells if c.place(0) == PLACE) for name in ("main", "r_int")]
    misses = [miss_of(cell, [record(0.7447, cell=cell)]) for cell in cells]
    assert [miss and miss.spreads for miss in misses] == [pytest.approx(1 / 1.18), pytest.approx(1 / 1.08)]


def test_no_figure_means_no_difference() -> None:
    assert miss_of(CELL, []) is None
    assert miss_of(load_table("wfa").cells[0], [record(0.8)]) is None


@pytest.mark.parametrize(("accuracy", "kind"), [(0.8713, "near"), (0.8684, "apart"), (0.8613, "far")])
def test_rows_are_coloured_by_combined_spreads(tmp_path: Path, accuracy: float, kind: str) -> None:
    found = overview({"main": [CELL]}, None, stored(tmp_path, (CELL, record(accuracy))))
    assert kinds(page(found))[0] == kind


def test_cell_without_result_is_grey_and_listed_as_missing(tmp_path: Path) -> None:
    other = load_table("main").cells[1]
    found = overview({"main": [CELL, other]}, None, stored(tmp_path, (CELL, record(0.87))))
    assert kinds(page(found))[:2] == ["near", "none"]
    assert [[entry.text for entry in row] for row in found.missing.rows] == [
        ["cifar10", "main 1", "not run yet", "`flashfl reproduce --all --dataset cifar10 --budget-minutes 600`"]
    ]


def far(folder: Path, *cells: tuple[str, Cell, float]) -> list[list[str]]:
    """The rows about far cells. Given are a table, its cell, and the cell's accuracy."""
    held = stored(folder, *((cell, record(accuracy, cell=cell)) for _, cell, accuracy in cells))
    found = overview({name: [c for n, c, _ in cells if n == name] for name, _, _ in cells}, None, held)
    return [[entry.text for entry in row] for row in found.far.rows]


def test_far_cells_are_listed_with_what_is_known(tmp_path: Path) -> None:
    at = {c.place(0): c for c in load_table("main").cells}
    nst, near = at["cifar10/alpha0.1/nst-d0.1-seed0"], at["cifar10/alpha1/nst-d0.1-seed0"]
    [row] = far(tmp_path, ("main", nst, 0.6), ("main", near, 0.8346))
    assert row[:2] == ["cifar10", "main, alpha 0.1: NST 0.1, -11.18 (best -11.18)"]
    assert row[2].startswith("Explained. The paper probably reports best evaluations.")


def test_far_cell_that_nobody_has_looked_at_says_so(tmp_path: Path) -> None:
    cell = load_table("hetero").cells[1]
    assert far(tmp_path, ("hetero", cell, 0.5)) == [
        ["cifar10", "hetero, alpha 1: hetero-JMWST r1, -34.67 (best -34.67)", "Not understood. Nothing was tried."]
    ]


def test_many_far_cells_are_counted(tmp_path: Path) -> None:
    cells = [c for c in load_table("main").cells if c.dataset == "mnist"]
    [row] = far(tmp_path, *(("main", cell, 0.5) for cell in cells))
    assert row[1] == "main 33: -48.79 to -41.06"


def test_reasons_name_sections_of_the_log() -> None:
    sections = re.findall("^## (.*)$", (ROOT / "LOG.md").read_text(), re.MULTILINE)
    assert {reason["section"] for reason in reasons()} <= set(sections)


def test_missing_data_set_says_how_to_get_it(tmp_path: Path) -> None:
    found = overview(every_cell(dataset="cifar100,sst2"), None, Stored(tmp_path))
    assert not found.sections
    why = {row[0].text: row[2].text for row in found.missing.rows}
    assert found.missing.rows[0][1].text == "main 48, hetero 9"
    assert why == {"cifar100": "needs the data set", "sst2": "needs the weights of BERT-base"}
    assert any(note.startswith("cifar100: Unpack https://") for note in found.missing.notes)


def test_filters_choose_cells_of_all_tables() -> None:
    found = every_cell(dataset="cifar10", alpha="1", method="SPDST")
    tables = {"main", "nm", "savings", "zerofl", "rivals", "initialisation", "static_bn", "vgg16"}
    assert {name for name, cells in found.items() if cells} == tables
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        every_cell(dataset="cifar11")


def test_columns_without_figures_are_left_out(tmp_path: Path) -> None:
    cell = load_table("wfa").cells[0]
    [section] = overview({"wfa": [cell]}, None, stored(tmp_path, (cell, record(0.87, cell=cell)))).sections
    assert {"paper %", "difference", "spreads", "dataset"}.isdisjoint(section.table.head)
    assert {"alpha", "method", "ours %"} <= set(section.table.head)


def test_text_of_results_cannot_become_markup(tmp_path: Path) -> None:
    cell = Cell(CELL.task, CELL.method, "<script>alert(1)</script>", CELL.paper, {})
    html = page(overview({"main": [cell]}, None, stored(tmp_path, (cell, record(0.87, cell=cell)))))
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_page_needs_no_network_and_no_script(tmp_path: Path) -> None:
    html = page(overview(every_cell(), None, Stored(ROOT / "results")))
    assert not re.search(r"<(script|img|iframe)|@import|url\(", html)
    assert 'name="viewport"' in html
    assert html.count("<section ") == html.count("</section>") >= 14
    assert "*" not in re.sub(r"<style>.*</style>", "", html, flags=re.DOTALL)  # of Markdown


def test_committed_page_is_what_the_command_writes(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["reproduce", "--all", "--out", str(tmp_path / "all.md")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'all.md'}\n"
    assert (tmp_path / "all.md").read_text() == (ROOT / "docs" / "results.md").read_text(), "run scripts/results"


def test_page_is_written_to_results_html_by_default(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "--all", "--results", str(ROOT / "results"), "--dataset", "mnist"]) == 0
    assert capsys.readouterr().out == "results.html\n"
    html = (tmp_path / "results.html").read_text()
    assert "mnist, alpha 0.1" in html
    assert "cifar10, alpha" not in html


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "needs one table"),
        (["main", "--all"], "needs one table"),
        (["--all", "--out", "all.png"], "--out all.png: must end in one of .md, .html\n"),
    ],
)
def test_reproduce_refuses_unclear_requests(words: list[str], why: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["reproduce", *words]) == 1
    assert why in capsys.readouterr().err


def test_all_runs_what_is_missing(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    asked: list[Cell] = []

    def run(cells: list[Cell], *given: Any) -> tuple[int, int]:
        asked.extend(cells)
        return 0, 0

    monkeypatch.setattr("flashfl.paper.reproduce.reproduce", run)
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "--all", "--dataset", "mnist", "--budget-minutes", "1"]) == 0
    assert len(asked) == sum(cell.dataset == "mnist" for cells in every_cell().values() for cell in cells)
    assert {cell.dataset for cell in asked} == {"mnist"}
