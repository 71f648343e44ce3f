"""What a newcomer reads off the page and the figures: names, keys to colours, and nothing hidden."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flashfl as fl
from flashfl.core.errors import FlashError
from flashfl.report import figures
from flashfl.report.command import write
from flashfl.report.groups import groups_of, tasks_of
from flashfl.report.load import load
from tests.report.runs import edited

Open = Callable[..., Any]


def texts(browser: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((n) => n.textContent)"
    return list(browser.execute_script(script, selector))


def test_header_names_data_model_rounds_and_densities(page: str, open_page: Open) -> None:
    browser = open_page(page)
    shown = dict(zip(texts(browser, "header dt"), texts(browser, "header dd"), strict=True))
    assert shown == {
        "Data set": "digits", "Model": "digits 241,898 weights", "Clients": "4 (2 a round)", "Rounds": "5",
        "Density": "0.1, 0.12, 1 at the end", "Metric": "accuracy higher is better", "Seeds": "2",
    }  # fmt: skip


class Net(nn.Sequential):
    """A user's own model."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with another metric than accuracy, started from Python."""
    folder, draw = tmp_path_factory.mktemp("regression"), torch.Generator().manual_seed(0)
    made = [(torch.rand(12, 6, generator=draw), torch.rand(12, 1, generator=draw)) for _ in range(5)]
    rmse: Callable[..., torch.Tensor] = lambda output, target: nn.functional.mse_loss(output, target).sqrt()  # noqa: E731
    task = fl.Task(
        Net, made[:4], made[4], loss=nn.functional.mse_loss, metric=rmse, metric_name="rmse", higher_is_better=False,
        name="houses",
    )  # fmt: skip
    fl.simulate(fl.PDST(0.3), task, 3, folder=folder / "run", eval_every=1, per_round=2, workers=1, device="cpu")
    return folder


def test_header_of_a_python_run_names_task_class_and_metric(regression: Path, open_page: Open) -> None:
    browser = open_page(write(load([regression]), regression / "page.html").as_uri())
    shown = texts(browser, "header dd")
    assert shown[:2] == ["houses", "Net 401 weights"]
    assert "rmse lower is better" in shown
    assert "accuracy" not in browser.execute_script("return document.body.innerText").lower()


def test_curves_of_a_metric_above_one_stay_inside_their_chart(tmp_path: Path, open_page: Open) -> None:
    draw, mse = torch.Generator().manual_seed(0), nn.functional.mse_loss
    made = [(torch.rand(12, 6, generator=draw), 4 * torch.rand(12, 1, generator=draw)) for _ in range(5)]
    task = fl.Task(Net, made[:4], made[4], loss=mse, metric=mse, metric_name="mse", higher_is_better=False)
    fl.simulate(fl.PDST(0.3), task, 4, folder=tmp_path / "run", eval_every=1, lr=0.1, per_round=2, workers=1)
    browser = open_page(write(load([tmp_path]), tmp_path / "page.html").as_uri())
    outside = """
        const inside = (a, b) => a.top >= b.top && a.bottom <= b.bottom && a.left >= b.left && a.right <= b.right;
        const curves = [...document.querySelectorAll("svg .line")];
        const box = (n) => n.getBoundingClientRect();
        return [curves.length, curves.filter((n) => !inside(box(n), box(n.closest("svg")))).length];
    """
    curves, out = browser.execute_script(outside)
    assert curves
    assert not out


def test_runs_that_differ_list_their_values_in_the_header(compared: Path, tmp_path: Path) -> None:
    from flashfl.report.page import facts

    def with_rounds(header: dict[str, Any], rounds: int) -> dict[str, Any]:
        return header | {"config": header["config"] | {"train": header["config"]["train"] | {"rounds": rounds}}}

    for rounds in (20, 9, 10):
        edited(compared / "nst-seed0", tmp_path / str(rounds), lambda h, rounds=rounds: with_rounds(h, rounds))
    assert ("Rounds", "9, 10, 20", "") in facts(load([tmp_path]).runs)
    edited(compared / "nst-seed0", tmp_path / "more", lambda h: with_rounds(h, 300))
    assert ("Rounds", "9 to 300", "") in facts(load([tmp_path]).runs)
    assert facts([]) == []


def test_ticks_of_short_times_differ(compared: Path, tmp_path: Path, open_page: Open) -> None:
    """They were "0.0 s", "0.1 s", "0.1 s"."""
    folder = edited(compared / "nst-seed0", tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for line in lines:
        if "cohort" in line:
            line["seconds"] = {"train": 0.04}
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser = open_page(write(load([tmp_path]), tmp_path / "page.html").as_uri())
    ticks = texts(browser, "#wall-time-by-work text:not([class])")
    assert ticks[:3] == ["0 s", "0.05 s", "0.1 s"]


def test_card_claims_no_test_set_and_no_evaluation_of_each_round(page: str, open_page: Open) -> None:
    [said] = texts(open_page(page), "#accuracy-by-round .about")
    assert said.startswith("Accuracy at each evaluation (higher is better)")


def test_wide_table_shows_that_it_scrolls_on_a_phone(page: str, open_page: Open) -> None:
    state = (
        "const e = document.querySelector('#summary .edge');"
        "return [e.className, getComputedStyle(document.querySelector('.hint')).display]"
    )
    browser = open_page(page, 400)
    assert browser.execute_script(state) == ["edge more", "block"]
    browser.execute_script("const s = document.querySelector('.scroll'); s.scrollLeft = s.scrollWidth; s.onscroll()")
    assert browser.execute_script(state) == ["edge less", "none"]
    assert open_page(page, 1400).execute_script(state) == ["edge", "none"]


def test_layers_are_named(page: str, open_page: Open) -> None:
    browser = open_page(page)
    names = [f"features.{i}" for i in (0, 3, 6, 9)]
    assert texts(browser, "#layer-densities text.tick") == names
    assert texts(browser, "#mask-mismatch-by-layer .legend button")[:4] == names
    assert texts(open_page(page, 400), "#layer-densities text.tick") == names


def test_flops_points_are_labelled_without_overlap(page: str, open_page: Open) -> None:
    browser = open_page(page, 400)
    assert texts(browser, "#flops-and-bytes text.point") == ["dense", "nst", "spdst", "jmwst"]
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('#flops-and-bytes text.point')].map((t) => t.getBoundingClientRect())"
        ".map((b) => [b.left, b.right, b.top + 2, b.bottom - 2])"  # letters are lower than their line
    )
    for i, (left, right, top, bottom) in enumerate(boxes):
        assert 0 <= left < right <= 400
        assert all(right <= a or b <= left or bottom <= c or d <= top for a, b, c, d in boxes[:i])


def test_heatmaps_have_a_key_to_their_colours(page: str, open_page: Open) -> None:
    browser = open_page(page)
    most = browser.execute_script("return Math.max(...data.parts[0].splits[0].counts.flat())")
    assert texts(browser, "#who-holds-what .keys") == [f"0{most} samples"]
    shade = browser.execute_script("return document.querySelector('#who-holds-what .ramp').style.background")
    assert "gradient" in shade


def test_mask_that_moved_only_in_dense_rounds_is_not_said_to_stay(
    compared: Path, tmp_path: Path, open_page: Open
) -> None:
    """A method that trains densely, then prunes once: dense rounds have no snapshot."""
    folder = edited(compared / "spdst-seed0", tmp_path / "once")
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    first, second, third = [line for line in lines if line.get("snapshot")][:3]
    first["snapshot"] = second["snapshot"] = ""
    third["mismatch"] = 0.98
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser = open_page(write(load([tmp_path]), tmp_path / "page.html").as_uri())
    [said] = texts(browser, "#mask-mismatch-round-by-round .about")
    assert said.endswith("all their recorded masks are the same (dense rounds record none): spdst.")


def test_curves_on_one_another_are_drawn_in_turns(page: str, open_page: Open) -> None:
    """Dense and SPDST never move their masks: both curves lie at 0."""
    dashes = open_page(page).execute_script(
        "return [...document.querySelectorAll('#mask-mismatch-between-rounds .line')].map((g) => [...g.children]"
        ".map((p) => [p.getAttribute('stroke-dasharray'), p.getAttribute('stroke-dashoffset')]))"
    )
    dense, nst, spdst, jmwst = dashes
    assert dense == [["9 9", "0"]]
    assert spdst == [["9 9", "-9"]]
    assert nst == jmwst == [[None, None]]


def test_groups_with_one_colour_are_told_apart(compared: Path, tmp_path: Path, open_page: Open) -> None:
    """There are ten colours. The eleventh line is dashed and its chips are striped."""

    def named(header: dict[str, Any], i: int) -> dict[str, Any]:
        return header | {"config": header["config"] | {"method": {"name": f"m{i:02}"}}}

    for i in range(21):
        folder = edited(compared / "nst-seed0", tmp_path / f"{i:02}", lambda h, i=i: named(h, i))
        lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        for line in lines:
            for score in line.get("metrics", {}).values():
                score["metric"] = 0.04 * i  # no curve lies on another
        (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser = open_page(write(load([tmp_path]), tmp_path / "page.html").as_uri())
    lines = browser.execute_script(
        "return [...document.querySelectorAll('#accuracy-by-round .line')].map((g) => "
        "[g.style.stroke, g.firstChild.getAttribute('stroke-dasharray')])"
    )
    assert [dash for _, dash in lines[:10]] == [None] * 10
    assert len({tuple(line) for line in lines}) == 21
    for chips in ("#legend button", "#summary tbody td:first-child"):
        shades = browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((n) => n.style.getPropertyValue('--c'))", chips
        )
        assert len(set(shades)) == 21
    assert not browser.get_log("browser")


def test_round_ticks_are_whole_numbers(page: str, compared: Path, open_page: Open) -> None:
    browser = open_page(page)
    for section in ("accuracy-by-round", "mask-mismatch-between-rounds", "mask-mismatch-by-layer"):
        ticks = texts(browser, f"#{section} text.tick")
        assert ticks
        assert all(tick.isdigit() for tick in ticks)
    pytest.importorskip("matplotlib")
    for name in ("accuracy-rounds", "mismatch-rounds", "sm-layers"):
        drawn = figures.figure(name, load([compared]).runs)
        drawn.canvas.draw()
        for axes in drawn.axes:
            assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_figures_name_layers_and_points_and_hide_no_curve(compared: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = load([compared]).runs
    [axes] = figures.figure("layer-sensitivity", runs).axes
    names = [f"features.{i}" for i in (0, 3, 6, 9)]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == names
    layers = figures.figure("sm-layers", runs)
    assert [text.get_text() for text in layers.legends[0].get_texts()] == names
    [axes] = figures.figure("flops-bytes", runs).axes
    assert [text.get_text() for text in axes.texts] == ["dense", "nst", "spdst", "jmwst"]
    [axes] = figures.figure("mismatch-rounds", runs).axes
    dense, nst, spdst, _ = axes.get_lines()
    assert dense.get_linestyle() == spdst.get_linestyle() == "--"
    assert dense._unscaled_dash_pattern != spdst._unscaled_dash_pattern
    assert nst.get_linestyle() == "-"


def test_figure_says_that_lower_is_better(regression: Path) -> None:
    pytest.importorskip("matplotlib")
    [axes] = figures.figure("accuracy-rounds", load([regression]).runs).axes
    assert axes.get_ylabel() == "rmse (lower is better)"


def test_page_of_several_tasks_has_a_part_for_each(regression: Path, compared: Path, open_page: Open) -> None:
    """An error and an accuracy have no axis in common, and a page must not average or scale them together."""
    browser = open_page(write(load([regression, compared]), regression / "both.html").as_uri())
    assert texts(browser, "#legend a") == texts(browser, ".task h2") == ["houses · Net · rmse", "digits · accuracy"]
    assert texts(browser, "header dd") == []
    assert texts(browser, "#task-1 dd")[:2] == ["houses", "Net 401 weights"]
    assert texts(browser, "#task-1 .legend button") == ["pdst"]
    assert texts(browser, "#task-2 .legend button") == ["dense", "nst", "spdst", "jmwst"]
    assert texts(browser, "h2").count("Summary") == 2
    assert "rmse (lower is better)" in texts(browser, "#summary th")
    assert "accuracy %" in texts(browser, "#summary-2 th")
    assert len(texts(browser, "#rmse-by-round .line")) == 1
    assert len(texts(browser, "#accuracy-by-round-2 .line")) == 4
    browser.execute_script("document.querySelectorAll('#task-2 .legend button')[1].click()")
    assert len(texts(browser, "#rmse-by-round .line")) == 1
    assert len(texts(browser, "#accuracy-by-round-2 .line")) == 3
    assert not browser.get_log("browser")


def renamed(header: dict[str, Any]) -> dict[str, Any]:
    """A run of a task and a method whose names are long and have no spaces."""
    method = {"name": "a_method_with_an_exceedingly_long_name_and_no_space_to_break_it_at"}
    about = {"dataset": "prices-of-houses-in-a-county-with-a-long-name", "model": "ANetworkWithAVeryLongNameToo"}
    metric = {"name": "mean_squared_error_in_dollars", "higher_is_better": False}
    task = header["task"] | {"info": header["task"]["info"] | about, "metric": metric}
    return header | {"config": header["config"] | {"method": method}, "task": task}


@pytest.mark.parametrize("width", [390, 360])
@pytest.mark.parametrize("tasks", [1, 2])
def test_only_tables_scroll_sideways_on_a_phone(
    compared: Path, tmp_path: Path, open_page: Open, width: int, tasks: int
) -> None:
    edited(compared / "nst-seed0", tmp_path / "long", renamed)
    if tasks == 2:
        edited(compared / "jmwst-seed0", tmp_path / "other")
    browser = open_page(write(load([tmp_path]), tmp_path / "page.html").as_uri(), width)
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    wider = browser.execute_script(
        "return [...document.querySelectorAll('body *')].filter((n) => !n.closest('.scroll') && "
        "(n.getBoundingClientRect().right > innerWidth + 1 || "
        "(n.scrollWidth > n.clientWidth + 1 && getComputedStyle(n).overflowX === 'auto'))).map((n) => n.outerHTML)"
    )
    assert wider == []


def test_standard_deviation_is_whole_on_a_phone(compared: Path, tmp_path: Path, open_page: Open) -> None:
    """The last of its digits lay behind the edge of the screen, so that it looked like a smaller one."""
    for seed in (0, 1):
        folder = edited(compared / f"jmwst-seed{seed}", tmp_path / str(seed), renamed)
        lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        for line in lines:
            for score in line.get("metrics", {}).values():
                score["metric"] = 31_234_567.0 + 1111.1 * seed
        (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser = open_page(write(load([tmp_path]), tmp_path / "page.html").as_uri(), 390)
    assert [t.strip() for t in texts(browser, "#summary td:nth-child(3)")] == ["3.124e+07 ± 785.7"]
    edges = browser.execute_script(
        "return ['.scroll', '#summary td:nth-child(3) span:last-child'].map((at) => "
        "document.querySelector(at).getBoundingClientRect().right)"
    )
    assert edges[1] <= edges[0]
    ticks = texts(browser, "#mean-squared-error-in-dollars-by-round text:not(.tick)")[:-2]
    assert len(set(ticks)) == len(ticks) >= 3  # they were "31.2 M" each


@pytest.mark.parametrize("width", [390, 1400])
def test_long_labels_are_whole_and_apart(compared: Path, tmp_path: Path, open_page: Open, width: int) -> None:
    """Labels with the same beginning were cut to the same text beside bars, and lay over one another beside points."""

    def named(header: dict[str, Any], i: int) -> dict[str, Any]:
        method = {"name": f"a method with a long name and so many words that nothing fits {i}"}
        return header | {"config": header["config"] | {"method": method}}

    for i in range(6):
        edited(compared / "nst-seed0", tmp_path / str(i), lambda h, i=i: named(h, i))
    browser = open_page(write(load([tmp_path]), tmp_path / "page.html").as_uri(), width)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    bars = "".join(texts(browser, "#wall-time-by-work text.strong")).replace(" ", "")
    points = "".join(texts(browser, "#flops-and-bytes text.point")).replace(" ", "")
    for i in range(6):
        assert f"amethodwithalongnameandsomanywordsthatnothingfits{i}" in bars
        assert f"amethodwithalongnameandsomanywordsthatnothingfits{i}" in points
    for selector in ("#wall-time-by-work text.strong", "#flops-and-bytes text.point"):
        boxes = browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((t) => t.getBoundingClientRect())"
            ".map((b) => [b.left, b.right, b.top + 2, b.bottom - 2])", selector
        )  # fmt: skip
        for i, (left, right, top, bottom) in enumerate(boxes):
            assert 0 <= left < right <= width
            assert all(right <= a or b <= left or bottom <= c or d <= top for a, b, c, d in boxes[:i])


def test_runs_with_another_loss_or_metric_are_not_one_run(tmp_path: Path) -> None:
    """Reports show both, and neither resumes the other."""
    data = [(torch.randn(20, 3), torch.randn(20)) for _ in range(3)]

    def train(name: str, loss: Any, metric: Any, resume: bool = False) -> None:
        net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))
        task = fl.Task(net, data, loss=loss, metric=metric, higher_is_better=False, prunable="body")
        settings: dict[str, Any] = {"rounds": 2, "per_round": 2, "workers": 1, "progress": False, "resume": resume}
        fl.simulate(fl.PDST(density=0.5), task, folder=tmp_path / name, **settings)

    torch.manual_seed(0)
    train("a", F.mse_loss, F.mse_loss)
    train("b", F.l1_loss, F.mse_loss)
    train("c", F.mse_loss, F.l1_loss)
    found = load([tmp_path])
    assert not found.problems
    assert [len(runs) for runs in tasks_of(found.runs).values()] == [2, 1]
    assert any("loss l1_loss" in label for label in groups_of(found.runs))
    with pytest.raises(FlashError, match="loss: mse_loss there, l1_loss here"):
        train("a", F.l1_loss, F.mse_loss, resume=True)
    with pytest.raises(FlashError, match="metric: mse_loss there, l1_loss here"):
        train("a", F.mse_loss, F.l1_loss, resume=True)
