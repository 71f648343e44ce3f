"""Reports: groups, curves, tables, figures, the page, and damaged runs."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
import re
import shutil
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashfl.cli import main
from flashfl.core.errors import ConfigError
from flashfl.core.record import Score
from flashfl.report import curves, figures
from flashfl.report.command import page_for
from flashfl.report.groups import groups_of, groups_table, rounds_csv, summary_of, task_tables
from flashfl.report.load import Found, load
from flashfl.report.page import page, page_data, script_json
from flashfl.report.watch import Feed, serve
from flashfl.run.table import Entry, Table, transfer
from tests.report.runs import edited


def test_comparison_writes_a_page(compared: Path) -> None:
    text = (compared / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    [data] = data["parts"]
    assert [g["label"] for g in data["groups"]] == ["dense", "nst", "spdst", "jmwst"]
    assert len(data["runs"]) == 8


def test_unwritable_page_is_a_warning(compared: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="could not be written"):
        assert page_for(tmp_path / "file" / "below", [compared / "nst-seed0"]) is None


def test_seeds_are_one_group_and_settings_separate_groups(compared: Path, tmp_path: Path) -> None:
    assert [len(runs) for runs in groups_of(load([compared]).runs).values()] == [2, 2, 2, 2]
    other = tmp_path / "denser"
    shutil.copytree(compared / "nst-seed0", other)
    path = other / "results.jsonl"
    path.write_text(path.read_text().replace('"density": 0.1, "adapt"', '"density": 0.3, "adapt"', 1))
    labels = list(groups_of(load([compared / "nst-seed1", other]).runs))
    assert labels == ["nst · density 0.1", "nst · density 0.3"]


def test_damaged_folders_are_reported_and_others_read(damaged: Path) -> None:
    found = load([damaged, damaged / "nowhere"])
    assert {run.folder.name for run in found.runs} == {"good", "cut"}
    assert {folder.name for folder in found.problems} == {
        "headless", "binary", "fields", "unbegun", "nowhere",
    }  # fmt: skip
    assert all(str(folder) in why for folder, why in found.problems.items())
    states = {run.folder.name: run.state for run in found.runs}
    assert states == {"good": "finished", "cut": "unfinished"}


DAMAGE = {
    "dence": lambda text: text.replace('"dense":', '"dence":'),
    "metric": lambda text: re.sub(r'"metric": [0-9.]+', '"metric": "high"', text),
    "flops": lambda text: re.sub(r'"flops": [0-9.e+]+', '"flops": "x"', text),
    "layers": lambda text: re.sub(r'"layer_mismatch": \[[0-9.]+, ', '"layer_mismatch": [', text),
    "densities": lambda text: text.replace('"layer_densities"', '"layer_densitie5"', 1),
    "cohort": lambda text: re.sub(r'"cohort_densities": \[[0-9.]+', '"cohort_densities": ["x"', text),
    "histogram": lambda text: re.sub(r'"histogram": \[\[\d+, ', '"histogram": [[', text),
    "alpha": lambda text: re.sub(r'"alpha": [0-9.]+', '"alpha": null', text),
    "shapes": lambda text: text.replace('"layers": [["', '"layers": [["x", 7], ["'),
    "versions": lambda text: re.sub(r'"versions": \{[^}]*\}', '"versions": null', text),
    "nobody": lambda text: re.sub(r'"cohort": \[[^]]*\]', '"cohort": []', text),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_run_damaged_in_one_field_is_reported(compared: Path, tmp_path: Path, kind: str) -> None:
    whole = (compared / "nst-seed0" / "results.jsonl").read_text()
    shutil.copytree(compared / "nst-seed1", tmp_path / "good")
    shutil.copytree(compared / "nst-seed0", tmp_path / "bad")
    (tmp_path / "bad" / "results.jsonl").write_text(DAMAGE[kind](whole))
    assert (tmp_path / "bad" / "results.jsonl").read_text() != whole
    found = load([tmp_path])
    assert [folder.name for folder in found.problems] == ["bad"]
    assert [g["label"] for g in Feed(tmp_path).data()["parts"][0]["groups"]] == ["nst"]


def test_no_damaged_byte_breaks_a_report(compared: Path, tmp_path: Path) -> None:
    whole = (compared / "nst-seed0" / "results.jsonl").read_bytes()
    shutil.copytree(compared / "nst-seed1", tmp_path / "good")
    shutil.copytree(compared / "nst-seed0", tmp_path / "bad")
    chance = random.Random(0)
    for _ in range(300):
        text, at = bytearray(whole), chance.randrange(len(whole))
        text[at] = chance.choice([text[at] ^ 1 << chance.randrange(7), chance.randrange(32, 127)])
        (tmp_path / "bad" / "results.jsonl").write_bytes(text)
        found = load([tmp_path])
        assert len(found.runs) + len(found.problems) == 2
        script_json(page_data(found))
        groups_table(found).markdown()
        rounds_csv(found)


def test_damaged_snapshot_skips_only_its_round(compared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(compared / "nst-seed0", folder)
    next((folder / "snapshots").iterdir()).write_bytes(b"g???")
    [run] = load([folder]).runs
    assert len(run.heat()[0]) == 4


def test_run_without_snapshots_has_no_masks_to_compare(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "nst-seed0", tmp_path / "run", ignore=shutil.ignore_patterns("snapshots"))
    [run] = load([tmp_path]).runs
    assert run.heat() == ([], None)


def test_snapshot_with_a_wrong_name_skips_only_its_round(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "nst-seed0", tmp_path / "run")
    path = tmp_path / "run" / "results.jsonl"
    path.write_text(re.sub(r'"snapshot": "\w+"', '"snapshot": "7"', path.read_text(), count=1))
    assert len(load([tmp_path]).runs[0].heat()[0]) == 4


def test_band_is_mean_and_deviation_of_all_rounds() -> None:
    shown = curves.band([{1: 1.0, 2: 2.0}, {1: 3.0, 2: 2.0, 3: 5.0}])
    assert shown == {"round": [1, 2, 3], "mean": [2, 2, 5], "std": [pytest.approx(2**0.5, rel=1e-5), 0, 0]}


def test_thinning_keeps_both_ends() -> None:
    assert curves.thin(range(1000), 5)[0] == 0
    assert curves.thin(range(1000), 5)[-1] == 999
    assert len(curves.thin(range(1000), 5)) == 5
    assert curves.thin(range(3), 5) == [0, 1, 2]


def test_mismatch_is_zero_for_frozen_masks_and_lower_with_consensus(compared: Path) -> None:
    groups = groups_of(load([compared]).runs)
    moved = {label: summary_of(runs).mismatch for label, runs in groups.items()}
    assert moved["spdst"] == moved["dense"] == 0
    assert moved["nst"] > moved["jmwst"] > 0
    rounds, table = curves.heat(groups["nst"])
    assert rounds == [1, 2, 3, 4, 5]
    assert all(table[i][i] == 0 for i in range(5))
    assert curves.heat(groups["dense"]) == ([], [])


def test_summary_adds_up(compared: Path) -> None:
    runs = groups_of(load([compared]).runs)["spdst"]
    found = summary_of(runs)
    assert found.seeds == 2
    assert found.density == pytest.approx(0.1, abs=1e-3)
    assert found.up == sum(run.end["bytes"]["up"] for run in runs if run.end) / 2
    assert found.saving == pytest.approx(found.paper_saving, rel=0.25)
    # Compared with what dense FedAvg sends in the same rounds: it has no first stage.
    plain = summary_of(groups_of(load([compared]).runs)["dense"])
    assert found.saving == pytest.approx((plain.up + plain.down) / (found.up + found.down), rel=0.02)
    assert found.rounds == 5
    assert found.orders == 10


def test_saving_counts_batchnorm_statistics(compared: Path) -> None:
    runs = groups_of(load([compared]).runs)["nst"]
    about = runs[0].header["task"]
    assert about["values"] > about["trained"], "its BatchNorm has statistics"
    messages = 2 * sum(len(record.cohort) for record in runs[0].rounds)
    found = summary_of(runs[:1])
    assert found.saving == pytest.approx(4 * about["values"] * messages / (found.up + found.down))


def test_terminal_table_of_usual_width_fits_80_columns() -> None:
    head = ("method", "accuracy %", "best %", "density", "up / round", "down / round", "mask mismatch", "time (s)")
    texts = ("hetero-jmwst", "97.45 ± 10.12", "97.45", "0.0200", "123.4 kB", "123.4 kB", "0.123", "123.4")
    lines = Table(head, [[Entry(text) for text in texts]], "title").terminal().splitlines()
    assert lines[0] == "title"
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == " ".join(texts).split()
    assert {len(line) for line in lines[-2:]} == {len(lines[-1])}


def test_total_columns_say_that_they_are_of_a_run(compared: Path) -> None:
    head = groups_table(load([compared])).head
    assert {"up / run", "down / run", "FLOPs / run", "seconds / run"} <= set(head)


@pytest.mark.parametrize(("count", "text"), [
    (162_000_000, "1300 / 130 / 13"), (46_000, "0.37 / 0.037 / 0.0037"), (9e12, "72000000 / 7200000 / 720000"),
])  # fmt: skip
def test_seconds_of_a_transfer_are_plain_numbers(count: float, text: str) -> None:
    assert transfer(count).text == text


def test_tables_have_every_group_and_every_round(compared: Path) -> None:
    found = load([compared])
    lines = groups_table(found).markdown().splitlines()
    assert len(lines) == 2 + 4
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    rows = list(csv.DictReader(io.StringIO(rounds_csv(found))))
    assert len(rows) == sum(len(run.rounds) for run in found.runs)
    by_run = {run.folder.name: run.rounds[-1].metrics["after"].metric for run in found.runs}
    assert float(rows[-1]["accuracy"]) == by_run[Path(rows[-1]["run"]).name]


def test_odd_names_do_not_break_tables_or_figures(compared: Path, tmp_path: Path) -> None:
    for i, data in enumerate(("a|b\nc", "$\\frac{$")):
        task = {"task": {"dataset": data}}
        edited(compared / "nst-seed0", tmp_path / str(i), lambda h, task=task: h | {"config": h["config"] | task})
    (tmp_path / "not\na run" / "checkpoints").mkdir(parents=True)
    found = load([tmp_path])
    lines = groups_table(found).markdown().splitlines()
    assert lines[2].startswith(r"| nst · dataset a\|b c |")
    assert len(lines) == 2 + 2 + 1 + len(found.problems) == 6
    pytest.importorskip("matplotlib")
    figures.overview(found.runs).draw_without_rendering()


@pytest.mark.parametrize("name", figures.NAMES)
def test_every_figure_is_drawn(compared: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"{name}.png"
    assert main(["figure", name, str(compared), "--out", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["accuracy-rounds", "accuracy-bytes", "mismatch-rounds", "sm-layers"])
def test_single_point_is_visible(compared: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    edited(compared / "nst-seed0", tmp_path / "a", rounds=1)
    lines = figures.figure(name, load([tmp_path]).runs).axes[0].get_lines()
    assert lines
    assert all(line.get_marker() == "o" for line in lines if len(line.get_xdata()) == 1)


@pytest.mark.parametrize("name", [*figures.NAMES, "overview"])
def test_long_names_hide_no_curve(compared: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    for i, source in enumerate(("nst", "jmwst", "nst")):
        method = {"name": f"{'a method with a long name ' * 5}{i}"}
        new = tmp_path / str(i)
        edited(compared / f"{source}-seed0", new, lambda h, m=method: h | {"config": h["config"] | {"method": m}})
    runs = load([tmp_path]).runs
    made = figures.overview(runs) if name == "overview" else figures.figure(name, runs)
    made.draw_without_rendering()
    legends = [*made.legends, *(axes.get_legend() for axes in made.axes if axes.get_legend())]
    assert legends or name == "sm-heatmap"
    panels = [axes for axes in made.axes if axes.get_visible()]
    for legend in legends:
        box = legend.get_window_extent()
        assert made.bbox.x0 <= box.x0 <= box.x1 <= made.bbox.x1
        assert made.bbox.y0 <= box.y0
        assert not any(box.overlaps(axes.get_window_extent()) for axes in panels)
    titles = [axes.title.get_window_extent() for axes in panels if axes.get_title()]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(titles, 2))


def _perplexity(header: dict[str, Any]) -> dict[str, Any]:
    return {**header, "task": {**header["task"], "metric": {"name": "perplexity", "higher_is_better": False}}}


def test_other_metric_is_named_and_its_best_is_the_lowest(compared: Path, tmp_path: Path) -> None:
    found = load([edited(compared / "nst-seed0", tmp_path / "a", _perplexity)])
    [run] = found.runs
    lowest = replace(run.rounds[0], metrics={"after": Score(1.0, 0.01234567, 0.1)})
    found = Found([replace(run, rounds=[lowest, *run.rounds[1:]])])
    [run] = found.runs
    scores = [record.score.metric for record in run.counted if record.score]
    assert run.numbers.best == min(scores) == 0.01234567
    head, _, row = groups_table(found).markdown().splitlines()[:3]
    assert head.startswith("| method | seeds | perplexity (lower is better) | best | density |")
    assert row.startswith(f"| nst | 1 | {scores[-1]:.4g} | {min(scores):.4g} |")
    assert rounds_csv(found).splitlines()[0].split(",")[7] == "perplexity"
    about = {"name": "perplexity", "percent": False, "direction": " (lower is better)"}
    assert page_data(found)["parts"][0]["metric"] == about


def test_tasks_have_their_own_tables_and_panels(compared: Path, tmp_path: Path) -> None:
    edited(compared / "nst-seed0", tmp_path / "a", _perplexity)
    shutil.copytree(compared / "dense-seed0", tmp_path / "b")
    found = load([tmp_path])
    titles = ["digits · perplexity", "digits · accuracy"]
    parts = page_data(found)["parts"]
    assert [part["title"] for part in parts] == titles
    assert [part["metric"]["name"] for part in parts] == ["perplexity", "accuracy"]
    assert [[g["label"] for g in part["groups"]] for part in parts] == [["nst"], ["dense"]]
    lines = task_tables(found).splitlines()
    assert lines[0] == "**digits · perplexity**"
    assert lines[2].startswith("| method | seeds | perplexity (lower is better) | best |")
    assert lines[lines.index("**digits · accuracy**") + 2].startswith("| method | seeds | accuracy % | best % |")
    rows = csv.DictReader(io.StringIO(rounds_csv(found)))
    assert {(row["task"], row["method"]) for row in rows} == set(zip(titles, ("nst", "dense"), strict=True))
    pytest.importorskip("matplotlib")
    drawn = figures.figure("accuracy-rounds", found.runs).axes
    assert [axes.get_ylabel() for axes in drawn] == ["perplexity (lower is better)", "accuracy (%)"]
    assert [len(axes.get_lines()) for axes in drawn] == [1, 1]
    assert len(figures.overview(found.runs).axes) == 2 * len(figures.ONE)


def test_unknown_figure_names_the_nearest(compared: Path) -> None:
    with pytest.raises(ConfigError, match="sm-heatmap"):
        figures.figure("heatmap", load([compared]).runs)


@pytest.mark.parametrize("form", ["html", "png", "csv", "md"])
def test_every_format_is_written(compared: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / f"r.{form}"
    assert main(["report", str(compared), "--out", str(out)]) == 0
    assert out.stat().st_size > 200


@pytest.mark.parametrize("form", ["html", "md"])
def test_report_of_a_name_that_is_no_text_is_written(compared: Path, tmp_path: Path, form: str) -> None:
    task = {"task": {"dataset": "caf\udce9"}}  # as Python reads names in Latin-1
    folder = edited(compared / "nst-seed0", tmp_path / "run", lambda h: h | {"config": h["config"] | task})
    assert main(["report", str(folder), "--out", str(tmp_path / f"r.{form}")]) == 0


def test_unknown_format_and_empty_report_fail_clearly(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(compared), "--out", str(tmp_path / "r.xls")]) == 1
    assert "html, png, csv, md" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nothing"), "--out", str(tmp_path / "r.html")]) == 1
    assert "nothing" in capsys.readouterr().err


def test_data_cannot_end_its_script_element() -> None:
    text = script_json({"a": "</script><!--", "b": float("nan"), "c": [float("inf"), 1.5]})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><!--", "b": None, "c": [None, 1.5]}


def test_page_of_many_rounds_stays_small(compared: Path) -> None:
    found = load([compared / "jmwst-seed0"])
    [run] = found.runs
    run.rounds.extend(replace(run.rounds[-1], round=r) for r in range(5, 2000))
    run.__dict__.pop("counted", None)
    assert len(page(page_data(found))) < 400_000


def test_feed_is_computed_again_only_after_a_change(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "nst-seed0", tmp_path / "a")
    feed = Feed(tmp_path)
    first = feed.data()
    assert feed.data() is first
    with (tmp_path / "a" / "results.jsonl").open("a") as file:
        file.write("\n")
    assert feed.data()["stamp"] != first["stamp"]


def test_watch_serves_only_this_machine(compared: Path) -> None:
    import threading

    server, address = serve(compared, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        assert server.server_address[0] == "127.0.0.1"
        with urllib.request.urlopen(address + "data.json") as answer:
            assert json.load(answer)["parts"][0]["groups"]
        for request in (urllib.request.Request(address, headers={"Host": "evil.example"}), address + "x"):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request)
            assert error.value.code in (403, 404)
            error.value.close()
        with pytest.raises(ConfigError, match="--port"):
            serve(compared, server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
    with pytest.raises(ConfigError, match="not a folder"):
        serve(compared / "none")
