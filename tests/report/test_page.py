"""The page in a real browser: it draws, reacts, fits the screen, and uses no network."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashfl.methods import METHODS
from flashfl.report.command import write
from flashfl.report.load import load
from flashfl.report.watch import serve
from tests.report.runs import edited

Open = Callable[..., Any]
CHARTS = {
    "accuracy-by-round": ".line",
    "accuracy-by-bytes": ".line",
    "mask-mismatch-between-rounds": ".line",
    "layer-densities": ".dot",
    "mask-mismatch-round-by-round": ".cell",
    "mask-mismatch-by-layer": ".line",
    "flops-and-bytes": ".dot",
    "bytes-per-client-and-round": ".bar",
    "wall-time-by-work": ".bar",
    "who-holds-what": ".cell",
}


def count(browser: Any, selector: str) -> int:
    return int(browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector))


def hover(browser: Any, selector: str, x: float = 0.5, y: float = 0.5) -> str:
    """Move the real pointer over a part of the page; what the tooltip says then."""
    box = browser.execute_script(
        "const n = document.querySelector(arguments[0]); n.scrollIntoView({block: 'center'});"
        "const b = n.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
        selector,
    )
    move = {"type": "mouseMoved", "x": box[0] + x * box[2], "y": box[1] + y * box[3]}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {**move, "x": move["x"] - 3})
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", move)
    return str(browser.execute_script("const t = document.getElementById('tip'); return t.hidden ? '' : t.innerText"))


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_every_chart_has_marks_and_the_page_fits(page: str, open_page: Open, width: int, dark: bool) -> None:
    browser = open_page(page, width, dark)
    for section, marks in CHARTS.items():
        assert count(browser, f"#{section} svg {marks}") > 0, section
    assert errors(browser) == []
    wide = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]
    sizes = browser.execute_script(
        "const size = (t) => parseFloat(getComputedStyle(t).fontSize);"
        "const ratio = (s) => s.getBoundingClientRect().width / s.viewBox.baseVal.width;"
        "const seen = (s) => [...s.querySelectorAll('text')].map((t) => ratio(s) * size(t));"
        "return [...document.querySelectorAll('svg')].flatMap(seen)"
    )
    assert min(sizes) >= 10
    theme = browser.execute_script("return document.documentElement.dataset.theme")
    assert theme == ("dark" if dark else "light")


def test_nothing_is_fetched(page: str, open_page: Open) -> None:
    browser = open_page(page)
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert "http://" not in browser.page_source.replace("http://www.w3.org/2000/svg", "")


def test_long_names_leave_room_on_a_narrow_screen(compared: Path, tmp_path: Path, open_page: Open) -> None:
    long = "nst as somebody who has much to say would call it"
    for name in ("one", "two"):
        method = {"name": f"{long}, number {name}"}
        edited(compared / "nst-seed0", tmp_path / name, lambda h, m=method: h | {"config": h["config"] | {"method": m}})
    browser = open_page(write(load([tmp_path]), tmp_path / "long.html").as_uri(), 400)
    seen = browser.execute_script(
        "const s = document.querySelector('.scroll'); s.scrollLeft = s.scrollWidth;"
        "const shown = (n) => { const b = n.getBoundingClientRect();"
        " return n.contains(document.elementFromPoint((b.left + b.right) / 2, (b.top + b.bottom) / 2)); };"
        "return [...s.querySelectorAll('tr')].flatMap((r) => [shown(r.firstChild), shown(r.lastChild)])"
    )
    assert seen == [True] * 6


def test_every_method_is_named_beside_its_point(compared: Path, tmp_path: Path, open_page: Open) -> None:
    """All methods at two points: names stay apart, and dots that lie on one another stay small."""
    for i, name in enumerate(METHODS):
        method = {"name": name}
        source = compared / ("dense-seed0", "nst-seed0")[i % 2]
        edited(source, tmp_path / name, lambda h, m=method: h | {"config": h["config"] | {"method": m}})
    browser = open_page(write(load([tmp_path]), tmp_path / "all.html").as_uri())
    for chart in ("accuracy-by-all-bytes", "flops-and-bytes"):
        found = browser.execute_script(
            "return [...document.querySelectorAll(`#${arguments[0]} text.point`)].map((n) => {"
            " const b = n.getBBox(); return [n.textContent, b.x, b.y, b.x + b.width, b.y + b.height]; })", chart
        )  # fmt: skip
        assert sorted(name for name, *_ in found) == sorted(METHODS)
        boxes = [box for _, *box in found]
        overlapping = [(a, b) for a, b in itertools.combinations(boxes, 2)
                       if a[0] < b[2] - 1 and b[0] < a[2] - 1 and a[1] < b[3] - 3 and b[1] < a[3] - 3]  # fmt: skip
        assert overlapping == []
    radii = browser.execute_script(
        "return [...document.querySelectorAll('#layer-densities .dot')].map((n) => n.r.baseVal.value)"
    )
    assert max(radii) <= 10


def test_total_stands_at_the_end_of_its_bar(page: str, open_page: Open) -> None:
    ends = open_page(page).execute_script(
        "const s = document.querySelector('#bytes-per-client-and-round svg');"
        "const box = (n) => n.getBoundingClientRect(), of = (k) => [...s.querySelectorAll(k)].map(box);"
        "return of('.total').map((t) => [t.left, Math.max(...of('.bar').filter((b) => Math.abs(b.top - t.top) < 20)"
        ".map((b) => b.right)), ...of('.mark').filter((m) => Math.abs(m.top - t.top) < 20).map((m) => m.left)])"
    )
    assert len(ends) == 4
    assert any(mark[0] > end + 60 for _, end, *mark in ends if mark), "a mark far behind its bar is what this is about"
    assert all(0 < text - end < 20 for text, end, *mark in ends if not mark or not end - 4 < mark[0] < end + 60)


@pytest.mark.parametrize(("where", "says"), [
    ("#accuracy-by-round .catch", ["round", "spdst", "%", "±"]),
    ("#accuracy-by-bytes .catch", ["after round", "%"]),
    ("#mask-mismatch-between-rounds .catch", ["nst", "jmwst", "0."]),
    ("#layer-densities .catch", ["layer", "weight", "%"]),
    ("#mask-mismatch-round-by-round svg", ["rounds", "SM", "0."]),
    ("#mask-mismatch-by-layer .catch", ["features"]),
    ("#flops-and-bytes .catch", ["bytes", "accuracy", "seed"]),
    ("#bytes-per-client-and-round .catch", ["values", "mask", "overhead", "paper's formula"]),
    ("#wall-time-by-work .catch", ["train", " s"]),
    ("#who-holds-what svg", ["client", "class", "samples"]),
])  # fmt: skip
def test_hovering_shows_values(page: str, open_page: Open, where: str, says: list[str]) -> None:
    said = hover(open_page(page), where)
    for word in says:
        assert word in said, (where, said)


def test_hovered_value_is_the_recorded_value(page: str, compared: Path, open_page: Open) -> None:
    said = hover(open_page(page), "#accuracy-by-round .catch", x=0.999)
    runs = [run for run in load([compared]).runs if run.method == "spdst"]
    mean = sum(run.counted[-1].metrics["after"].metric for run in runs) / len(runs)
    assert said.startswith("round 5")
    shown = re.search(r"spdst\n([\d.]+) %", said)
    assert shown
    assert float(shown[1]) == pytest.approx(100 * mean, abs=0.006)


def test_legend_hides_and_shows_methods(page: str, open_page: Open) -> None:
    browser = open_page(page)
    before = {s: count(browser, f"#{s} svg .line") for s in ("accuracy-by-round", "mask-mismatch-between-rounds")}
    assert set(before.values()) == {4}
    browser.execute_script("document.querySelectorAll('#legend button')[1].click()")
    assert all(count(browser, f"#{s} svg .line") == 3 for s in before)
    assert count(browser, "tr.off") == 1
    browser.execute_script("document.querySelectorAll('#legend button')[1].click()")
    assert all(count(browser, f"#{s} svg .line") == 4 for s in before)
    lines = count(browser, "#mask-mismatch-by-layer .chart:first-of-type svg .line")
    browser.execute_script("document.querySelector('.layers button').click()")
    assert count(browser, "#mask-mismatch-by-layer .chart:first-of-type svg .line") == lines - 1
    assert errors(browser) == []


def test_close_up_leaves_out_early_rounds_and_all_rounds_are_one_click_away(
    compared: Path, tmp_path: Path, open_page: Open
) -> None:
    place = edited(compared / "spdst-seed0", tmp_path / "run")
    lines = [json.loads(line) for line in (place / "results.jsonl").read_text().splitlines()]
    scored = [line for line in lines if line.get("metrics")]
    scored[0]["metrics"]["after"]["metric"] = 0.0  # far below the later ones
    (place / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser = open_page(write(load([place]), tmp_path / "page.html").as_uri())
    charts = ("#accuracy-by-round svg circle.dot", "#accuracy-by-bytes svg circle.dot")
    assert [count(browser, chart) for chart in charts] == [len(scored) - 1] * 2
    browser.execute_script("document.querySelectorAll('#accuracy-by-round .choice button')[1].click()")
    assert [count(browser, chart) for chart in charts] == [len(scored)] * 2
    assert errors(browser) == []


def test_three_runs_share_one_chart(compared: Path, tmp_path: Path, open_page: Open) -> None:
    chosen = [compared / f"{name}-seed0" for name in ("nst", "spdst", "jmwst")]
    browser = open_page(write(load(chosen), tmp_path / "three.html").as_uri())
    assert count(browser, "#accuracy-by-round svg .line") == 3
    assert count(browser, "#accuracy-by-round svg .band") == 0  # one seed has no spread
    said = hover(browser, "#accuracy-by-round .catch")
    assert all(name in said for name in ("nst", "spdst", "jmwst"))


def test_heading_sorts_the_table(page: str, open_page: Open) -> None:
    browser = open_page(page)

    def column(name: str) -> list[str]:
        script = "return [...document.querySelectorAll(`td[data-column='${arguments[0]}']`)].map(t => t.innerText)"
        return list(browser.execute_script(script, name))

    name = "mask mismatch"
    press = "[...document.querySelectorAll('.sum th')].find(t => t.innerText.startsWith(arguments[0])).click()"
    browser.execute_script(press, name)
    assert column(name) == sorted(column(name), reverse=True)
    browser.execute_script(press, name)
    assert column(name) == sorted(column(name))


def test_page_shows_another_metric(compared: Path, tmp_path: Path, open_page: Open) -> None:
    metric = {"name": "perplexity", "higher_is_better": False}
    edited(compared / "nst-seed0", tmp_path / "a", lambda h: {**h, "task": {**h["task"], "metric": metric}})
    browser = open_page(write(load([tmp_path]), tmp_path / "other.html").as_uri())
    said = hover(browser, "#perplexity-by-round .catch")
    assert "nst" in said
    assert "%" not in said
    assert count(browser, "#perplexity-by-bytes svg .line") == 1
    assert errors(browser) == []


def test_theme_can_be_switched(page: str, open_page: Open) -> None:
    browser = open_page(page)
    shade = "return getComputedStyle(document.body).backgroundColor"
    before = browser.execute_script(shade)
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert browser.execute_script(shade) != before


def test_damaged_runs_are_reported(damaged: Path, tmp_path: Path, open_page: Open) -> None:
    browser = open_page(write(load([damaged]), tmp_path / "damaged.html").as_uri())
    named = browser.execute_script("return document.getElementById('problems').innerText")
    assert all(name in named for name in ("headless", "binary", "fields", "unbegun"))
    assert count(browser, "#accuracy-by-round svg .line") == 2
    assert errors(browser) == []


def test_names_are_never_executed(compared: Path, tmp_path: Path, open_page: Open) -> None:
    evil = "</script><img src=x onerror=document.title='no'>"
    lines = (compared / "nst-seed0" / "results.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    header["config"]["method"]["name"] = evil
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "results.jsonl").write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    browser = open_page(write(load([folder]), tmp_path / "evil.html").as_uri())
    assert browser.title == "flashfl report"
    assert evil in browser.execute_script("return document.getElementById('legend').innerText")
    assert errors(browser) == []


def test_page_without_runs_says_so(tmp_path: Path, open_page: Open) -> None:
    browser = open_page(write(load([tmp_path / "none"]), tmp_path / "none.html").as_uri())
    assert "No runs to show" in browser.execute_script("return document.body.innerText")
    assert errors(browser) == []


def test_watch_follows_a_running_run(compared: Path, tmp_path: Path, open_page: Open) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    lines = (compared / "jmwst-seed0" / "results.jsonl").read_text().splitlines(keepends=True)
    shutil.copytree(compared / "jmwst-seed0" / "snapshots", tmp_path / "runs" / "jmwst" / "snapshots")
    results = tmp_path / "runs" / "jmwst" / "results.jsonl"
    results.write_text("".join(lines[:4]))
    server, address = serve(tmp_path / "runs", port=0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        browser = open_page(address)
        said = browser.execute_script("return document.querySelector('.sum').innerText")
        assert "unfinished, round 2 of 5" in said
        assert count(browser, "#accuracy-by-round .dot") == 2
        results.write_text("".join(lines))
        WebDriverWait(browser, 15).until(lambda b: count(b, "#accuracy-by-round .dot") == 5)
        assert "unfinished" not in browser.execute_script("return document.querySelector('.sum').innerText")
        assert errors(browser) == []
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
