"""The command line: what it prints, what it returns, and one clear line for each error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors import safe_open

import flashfl as fl
from flashfl import cli
from flashfl.core.parts import _PARTS
from flashfl.run import compare as comparing
from flashfl.run.config import RunConfig, make_config
from flashfl.run.options import options_of
from flashfl.run.results import Results

TINY = [
    "--rounds", "2", "--per-round", "2", "--clients", "4", "--limit", "80", "--max-steps", "1", "--eval-every", "1",
    "--workers", "1", "--device", "cpu", "--warmup-clients", "2", "--warmup-epochs", "1",
]  # fmt: skip
PLAIN = TINY[: TINY.index("--warmup-clients")]  # for methods without a first stage


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def end_of(folder: Path) -> dict[str, Any]:
    """The last line of a run's results."""
    end = Results.read(folder).end
    assert end is not None
    return end


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 1) -> str:
    """The one line that a failing command prints."""
    assert cli.main([*words]) == code
    said = capsys.readouterr()
    assert not said.out
    assert "Traceback" not in said.err
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("flashfl: ")
    return lines[0]


# -- help ---------------------------------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"flashfl {fl.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for command in (
        "run",
        "compare",
        "reproduce",
        "export",
        "report",
        "figure",
        "watch",
        "methods",
        "settings",
        "data",
    ):
        assert f"\n    {command}" in text
        with pytest.raises(SystemExit) as caught:
            cli.main([command, "--help"])
        assert caught.value.code == 0
        assert "usage: flashfl" in capsys.readouterr().out


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: flashfl" in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train"])
    assert caught.value.code == 2
    assert "invalid choice: 'train'" in capsys.readouterr().err


def test_methods_lists_every_method_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods"]) == 0
    text = capsys.readouterr().out
    for name, method in fl.METHODS.items():
        assert f"\n{name}\n" in "\n" + text
        assert (method.__doc__ or "").strip().splitlines()[0] in text
    assert "--density" in text
    assert "random|gradient|momentum" in text
    assert "--r-int" in text
    assert text.endswith("`flashfl methods NAME` describes one method, what its settings mean, and how to run it.\n")


@pytest.mark.parametrize("name", list(fl.METHODS))
def test_methods_name_describes_one_method_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == name
    assert lines[1].strip() == (fl.METHODS[name].__doc__ or "").splitlines()[0]
    assert any(line.startswith("  Bytes: ") for line in lines)
    options = [i for i, line in enumerate(lines) if line.startswith("    --") and line.endswith(")")]
    assert len(options) == len(options_of(fl.METHODS[name]))
    assert all(lines[i + 1].startswith(" " * 8) for i in options), "every setting is explained"
    words = lines[-1].split()
    assert words[:4] == ["flashfl", "run", "--method", name]
    config = make_config({}, dict(zip((w[2:] for w in words[2::2]), words[3::2], strict=True)))
    assert config.method == fl.METHODS[name]()


def test_methods_name_explains_inherited_settings_and_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", "flashplus"]) == 0
    text = capsys.readouterr().out
    assert "--warmup-epochs 10  (int)\n        epochs that these clients train.\n" in text
    assert "--adapt.rate 0.25  (float)\n        the share of active weights that are pruned.\n" in text
    assert "--grow 0.0  (float)\n        over the run, the density rises from density * (1 - grow)" in text
    assert "--average 0.98 --weight-decay 0.0005" in text
    assert "The other settings" not in text


@dataclass(frozen=True)
class Needy(fl.Method):
    """Says nothing of its own."""

    name: ClassVar[str] = "needy"
    density: float
    adapt: fl.PruneRegrow
    rate: float = 0.5

    def init(self, plan: fl.Plan) -> fl.State:
        return fl.PDST(density=self.density).init(plan)

    def aggregate(self, s: fl.State, sums: fl.Sums) -> fl.State:
        return fl.PDST(density=self.density).aggregate(s, sums)


def test_method_settings_without_a_default_are_required(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fl.METHODS, "needy", Needy)
    assert cli.main(["methods"]) == 0
    shown = capsys.readouterr().out.partition("needy\n")[2].split("\n\n")[0]
    assert [line.split()[:2] for line in shown.splitlines() if "--" in line and "adapt" not in line] == [
        ["--density", "required"],
        ["--rate", "0.5"],
    ]
    assert "--adapt.growth" in shown
    assert cli.main(["compare", "--methods", "pdst", "--seeds", "1", "--out", "a", "--quiet", *PLAIN]) == 0
    words = ["--adapt.rate", "0.1", *PLAIN]
    assert cli.main(["run", "--method", "needy", "--density", "0.3", "--out", "b", "--quiet", *words]) == 0


def test_settings_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["settings"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    listed = {line[0][2:].replace("-", "_") for line in lines if line and line[0].startswith("--")}
    record = RunConfig().to_json()
    settings = {**record["train"], **record["task"]}
    nested = {f"{name}.{part}" for name, value in settings.items() if isinstance(value, dict) for part in value}
    assert listed == nested | {name for name, value in settings.items() if not isinstance(value, dict)}


# -- run ----------------------------------------------------------------------------------------------------------


def test_run_then_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *TINY, "--out", "one"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("spdst: accuracy ")
    assert "density 0.0200" in said.out, "the embedded task's default"
    assert "results in one" in said.out
    assert "round 2/2" in said.err
    end = end_of(tmp_path / "one")
    assert f"checksum {end['checksum']}" in said.out

    assert cli.main(["export", "one"]) == 0
    assert capsys.readouterr().out == "one/model.safetensors\n"
    assert cli.main(["export", "one", "--out", "there/model.safetensors"]) == 0
    with safe_open(tmp_path / "there" / "model.masks.safetensors", "pt") as file:
        masks = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        assert sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks) == pytest.approx(0.02, abs=1e-4)


def test_overwrite_keeps_the_old_run_if_the_new_one_cannot_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *TINY, "--out", "one"]) == 0
    before = sorted(path for path in (tmp_path / "one").rglob("*") if path.is_file())
    capsys.readouterr()
    mnist = ["--dataset", "mnist", "--data-root", str(tmp_path)]
    assert cli.main(["run", *TINY, *mnist, "--out", "one", "--overwrite"]) == 1
    assert "data set 'mnist' is not complete" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        assert "wandb" in refused(capsys, "run", *TINY, "--track", "wandb", "--out", "one", "--overwrite")
    assert sorted(path for path in (tmp_path / "one").rglob("*") if path.is_file()) == before
    assert cli.main(["export", "one"]) == 0
    assert cli.main(["run", *TINY, "--out", "one", "--overwrite"]) == 0
    assert not (tmp_path / "one" / "model.safetensors").exists(), "that of the run before"


def test_folder_data_set_does_not_become_a_path_of_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("a/1.png", "b/1.png", "a/2.png", "b/2.png"):
        path = tmp_path / "ü b" / "img" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (20 if "1" in name else 16, 20 if "1" in name else 16)).save(path)
    (tmp_path / "deep").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "deep")
        which = "folder:../ü b/img"
        assert "--size N" in refused(capsys, "data", "check", which)
        assert "size = -1: must be at least 0" in refused(capsys, "data", "check", which, "--size", "-1")
        assert cli.main(["data", "check", which, "--size", "16"]) == 0
        few = ["--rounds", "1", "--clients", "2", "--per-round", "1", "--workers", "1", "--device", "cpu"]
        assert cli.main(["run", "--method", "dense", "--dataset", which, "--size", "16", *few, "--quiet"]) == 0
    assert [path.name for path in (tmp_path / "deep" / "runs").iterdir()] == ["folder-..-ü-b-img-dense-seed0"]


def test_unencodable_character_does_not_end_a_command(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "flashfl.cli", "reproduce", "main", "--dataset", "mnist", "--results"]
    made = subprocess.run(
        [*words, str(Path(__file__).parents[1] / "results")], env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert b" ? " in made.stdout


def test_quiet_shows_only_the_final_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *PLAIN, "--method", "dense", "--quiet"]) == 0
    said = capsys.readouterr()
    assert not said.err
    assert len(said.out.splitlines()) == 2
    assert "results in runs/digits-dense-seed0" in said.out


def test_config_file_with_settings_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text("[train]\nrounds = 9\n[method]\nname = 'jmwst'\ndensity = 0.5\n")
    words = ["run", "c.toml", *TINY, "--out", "x", "--quiet", "--density=0.3", "--adapt.growth", "gradient", "--seed=4"]
    assert cli.main(words) == 0
    config = Results.read(tmp_path / "x").header["config"]
    assert config["method"]["name"] == "jmwst"
    assert config["method"]["density"] == 0.3
    assert config["method"]["adapt"]["growth"] == "gradient"
    assert (config["train"]["rounds"], config["train"]["seed"]) == (2, 4)


def test_folder_with_a_run_is_not_overwritten_without_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", *PLAIN, "--method", "pdst", "--out", "x", "--quiet"]
    assert cli.main(words) == 0
    before = (tmp_path / "x" / "results.jsonl").read_bytes()
    (tmp_path / "x" / "notes.txt").write_text("mine")
    capsys.readouterr()
    said = refused(capsys, *words)
    assert "x already holds a run" in said
    assert "--resume" in said
    assert "--overwrite" in said
    assert (tmp_path / "x" / "results.jsonl").read_bytes() == before
    assert cli.main([*words, "--overwrite", "--seed", "5"]) == 0
    assert Results.read(tmp_path / "x").header["config"]["train"]["seed"] == 5
    assert (tmp_path / "x" / "notes.txt").read_text() == "mine"


def test_interrupted_run_resumes_to_the_same_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *TINY, "--rounds", "4", "--method", "jmwst", "--quiet"]
    assert cli.main([*words, "--out", "whole"]) == 0
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        calls = iter(range(99))

        def interrupt(self: object, state: object, line: object) -> None:
            if next(calls) == 2:
                signal.raise_signal(signal.SIGTERM)

        patch.setattr("flashfl.run.progress.Display.__call__", interrupt)
        assert cli.main([*words, "--out", "cut"]) == 130
    said = capsys.readouterr()
    assert said.err.strip() == "flashfl: interrupted; add --resume to continue after the last finished round"
    assert len(Results.read(tmp_path / "cut").rounds) == 3
    assert cli.main([*words, "--out", "cut", "--resume"]) == 0
    ends = [end_of(tmp_path / name) for name in ("whole", "cut")]
    assert ends[0]["checksum"] == ends[1]["checksum"]
    assert ends[0]["bytes"] == ends[1]["bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--denisty", "0.1"], "unknown option 'denisty': did you mean 'density'?"),
        (["run", "--density", "2"], "density = 2.0: must be above 0 and at most 1"),
        (["run", "--density", "0"], "density = 0.0: must be above 0"),
        (["run", "--density"], "--density needs a value: --density VALUE"),
        (["run", "--static-bn", "--rounds", "3"], "--static-bn needs a value"),
        (["run", "--rounds", "ten"], "--rounds ten: expected int"),
        (["run", "--method", "fedavg"], "unknown method 'fedavg'"),
        (["run", "--per-round", "50"], "per_round = 50: must be at least 1 and at most 20. There are 20 clients"),
        (["run", "--dataset", "cifr10"], "cifr10"),
        (["run", "none.toml"], "cannot read the configuration none.toml: No such file or directory"),
        (["run", "--device", "tpu"], "device = 'tpu': expected auto, cpu, cuda or cuda:N"),
        (["run", "--out", "/dev/null/x", *TINY], "/dev/null/x cannot be a folder, because /dev/null is a file"),
        (["run", "--optimizer", "adam"], "optimizer = 'adam': there is no such setting. Clients train with SGD"),
        (["methods", "spdts"], "unknown method 'spdts': did you mean 'spdst'?"),
        (["compare", "--methods", "nst,jmwts"], "unknown method 'jmwts': did you mean 'jmwst'?"),
        (["compare", "--methods", ","], "--methods names no method"),
        (["compare", "--seeds", "0"], "--seeds 0: must be at least 1"),
        (["compare", "--rounds", "-1"], "rounds = -1: must be at least 1"),
        (["export", "nowhere"], "there is no folder nowhere"),
        (["reproduce", "tabel"], "unknown table 'tabel'"),
    ],
)  # fmt: skip
def test_errors_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *words)
    assert not Path("runs/compare").exists(), "and nothing has been run"


def test_setting_may_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *PLAIN, "--method", "pdst", "--values-down=", "--values-up", "", "--out", "x", "--quiet"]
    assert cli.main(words) == 0
    config = Results.read(tmp_path / "x").header["config"]
    assert (config["train"]["values_down"], config["train"]["values_up"]) == ("", "")


def test_number_of_clients_that_a_partition_file_does_not_have_is_warned_of(tmp_path: Path) -> None:
    assert cli.main(["data", "partition", "digits", "--clients", "5", "--save", "p.npz"]) == 0
    words = ["run", "--rounds", "1", "--per-round", "2", "--max-steps", "1", "--workers", "1", "--device", "cpu"]
    words += ["--method", "pdst", "--quiet", "--partition-file", "p.npz", "--overwrite", "--out", "x"]
    with pytest.warns(RuntimeWarning, match="clients = 6: not used, because p.npz holds a split over 5 clients"):
        assert cli.main([*words, "--clients", "6"]) == 0
    for same in ([], ["--clients", "5"]):
        assert cli.main([*words, *same]) == 0  # a warning would be an error


# -- compare ------------------------------------------------------------------------------------------------------


def test_compare_prints_a_table_and_runs_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["compare", *TINY, "--methods", "dense,nst,spdst", "--seeds", "2", "--out", "c", "--density", "0.1"]
    assert cli.main(words) == 0
    first = capsys.readouterr()
    assert "[6/6] spdst seed 1" in first.err
    for name in ("dense", "nst", "spdst"):
        assert f"\n{name} " in first.out
    assert max(map(len, first.out.split("\n\n")[1].splitlines())) <= 80
    assert "\nToo close to tell, as the" in first.out, "it says how the ordering stands against the paper's"
    for name, density in (("dense", 1.0), ("spdst", 0.1)):
        folders = [tmp_path / "c" / f"{name}-seed{seed}" for seed in (0, 1)]
        assert end_of(folders[0])["checksum"] != end_of(folders[1])["checksum"]
        assert Results.read(folders[0]).rounds[-1].density == pytest.approx(density, abs=1e-3)

    def never(*given: object, **named: object) -> object:
        raise AssertionError("nothing is left to run")

    monkeypatch.setattr(comparing, "simulate", never)
    assert cli.main(words) == 0
    again = capsys.readouterr()
    assert again.err.count(": reused from c/") == len(again.err.splitlines()) == 6
    assert again.out == first.out


def test_compare_continues_after_an_interruption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *PLAIN, "--rounds", "4", "--methods", "dense,pdst", "--seeds", "1", "--quiet"]
    assert cli.main([*words, "--out", "whole"]) == 0
    rounds = []
    with pytest.MonkeyPatch.context() as patch:

        def count(self: object, state: object, line: object) -> None:
            rounds.append(line)
            if len(rounds) == 6:
                signal.raise_signal(signal.SIGTERM)

        patch.setattr("flashfl.run.progress.Display.__call__", count)
        assert cli.main([*words, "--out", "cut"]) == 130
        assert capsys.readouterr().err.strip().endswith("run the same command again to continue")
        assert cli.main([*words, "--out", "cut"]) == 0
    assert len(rounds) == 8, "no round is done twice"
    for name in ("dense-seed0", "pdst-seed0"):
        ends = [end_of(tmp_path / each / name) for each in ("whole", "cut")]
        assert ends[0]["checksum"] == ends[1]["checksum"]


def test_compare_replaces_other_settings_only_with_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", *PLAIN, "--methods", "pdst", "--seeds", "1", "--out", "c", "--quiet"]
    assert cli.main(words) == 0
    assert cli.main([*words, "--rounds", "1"]) == 1
    assert "c/pdst-seed0 holds a run with other settings" in capsys.readouterr().err
    assert cli.main([*words, "--rounds", "1", "--overwrite"]) == 0
    capsys.readouterr()
    run = Results.read(tmp_path / "c" / "pdst-seed0")
    assert len(run.rounds) == 1
    names = sorted(p.name for p in (tmp_path / "c" / "pdst-seed0" / "checkpoints").glob("*.json"))
    assert names == ["checkpoint-00000001.json"]
    assert cli.main(["export", "c/pdst-seed0"]) == 0


def test_compare_gives_a_setting_to_the_methods_that_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = "dense,hetero-spdst,pdst"
    assert cli.main(["compare", *TINY, "--methods", methods, "--seeds", "1", "--density", "0.3", "--quiet"]) == 0
    capsys.readouterr()
    densities = {
        name: Results.read(tmp_path / "runs" / "compare" / f"{name}-seed0").header["config"]["method"]
        for name in methods.split(",")
    }
    assert densities["pdst"]["density"] == 0.3
    assert "density" not in densities["dense"]
    assert densities["hetero-spdst"]["densities"] == [0.1, 0.15, 0.2]


def test_quick_shrinks_any_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--quick", "--workers", "1", "--device", "cpu", "--out", "q", "--quiet"]) == 0
    assert "results in q" in capsys.readouterr().out
    assert len([r for r in Results.read(tmp_path / "q").rounds if r.counts]) == 2


def test_central_is_one_client_with_all_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rounds", "2", "--limit", "80", "--max-steps", "2", "--workers", "1", "--device", "cpu"]
    assert cli.main(["run", *words, "--central", "--method", "sparse", "--out", "x", "--quiet"]) == 0
    capsys.readouterr()
    assert [r.cohort for r in Results.read(tmp_path / "x").rounds] == [(0,), (0,)]


# -- custom methods -----------------------------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import flashfl as fl
from flashfl.core.parts import part
from flashfl.methods import PDST


@part
@dataclass(frozen=True)
class Still:
    rate: float = 0.2

    def moments(self, epochs, batches):
        return {1: Fraction(1, 5)}

    def move(self, layout, vectors, masks, scores, rate, keys, counts):
        pass


@dataclass(frozen=True)
class Own(PDST):
    name: ClassVar[str] = "own"
    still: Still = field(default_factory=Still)

    def order(self, s, client):
        return s.order(client, self.local(s, adapt=self.still))


fl.METHODS["own"] = Own
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file that registers a method and a rule; they are forgotten again."""
    (tmp_path / "lib").mkdir()
    path = tmp_path / "lib" / "a_method_of_mine.py"
    path.write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield str(path)
    sys.modules.pop(path.stem, None)
    fl.METHODS.pop("own", None)
    _PARTS.pop("Still", None)


def test_several_files_are_loaded(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "another_file.py"
    other.write_text("import flashfl as fl\nfl.METHODS['other'] = fl.PDST\n")
    try:
        assert cli.main(["methods", "--load", own, "--load", str(other)]) == 0
        assert {"own", "other"} <= set(capsys.readouterr().out.split())
    finally:
        fl.METHODS.pop("other", None)
        sys.modules.pop("another_file", None)


def test_custom_method_is_loaded_from_its_file(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--load FILE.py" in refused(capsys, "run", "--method", "own", *PLAIN)
    words = ["--load", own, "--quiet", *PLAIN]
    assert cli.main(["run", "--method", "own", "--still.rate", "0.1", "--out", "a", *words]) == 0
    header = Results.read(tmp_path / "a").header
    assert header["config"]["method"]["still"] == {"rate": 0.1}
    assert list(header["code"]) == ["flashfl", "a_method_of_mine"]
    assert cli.main(["run", "--method", "own", "--still.rate", "0.1", "--out", "a", "--resume", *words]) == 0
    assert cli.main(["export", "a", "--load", own]) == 0
    capsys.readouterr()
    assert cli.main(["run", "--out", "a", "--resume", "--load", own, "--quiet"]) == 0
    assert f"To update it, run `flashfl export --load {own} a`" in capsys.readouterr().out
    assert cli.main(["compare", "--methods", "own,pdst", "--seeds", "1", "--out", "c", *words]) == 0
    capsys.readouterr()
    assert cli.main(["methods", "--load", own]) == 0
    assert "\nown\n" in capsys.readouterr().out
    assert cli.main(["methods", "own", "--load", own]) == 0
    assert capsys.readouterr().out.endswith(f"    flashfl run --load {own} --method own --density 0.05\n")


@pytest.mark.parametrize("threads", ["1", "2"])
def test_worker_processes_know_custom_rules(own: str, tmp_path: Path, threads: str) -> None:
    """Two threads: workers are not forked, and import the file themselves."""
    words = ["run", "--method", "own", "--load", own, "--threads", threads, *PLAIN]
    script = [sys.executable, "-m", "flashfl.cli", *words, "--workers", "2", "--out", "a"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not any(r.failures for r in Results.read(tmp_path / "a").rounds)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("nowhere.py", None, "expected an existing file whose name ends in .py"),
        ("mine.txt", "", "expected an existing file whose name ends in .py"),
        ("json.py", "", "another module is also called json; rename the file"),
        ("broken_one.py", "x = (", "importing it failed (SyntaxError: "),
        ("broken_two.py", "import no_such_thing", "importing it failed (ModuleNotFoundError: No module named"),
    ],
)
def test_file_that_cannot_be_loaded(
    name: str, text: str | None, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    if text is not None:
        Path(name).write_text(text)
    assert f"--load {name}: {said}" in refused(capsys, "methods", "--load", name)


def test_neighbour_of_a_loaded_file_does_not_shadow_an_installed_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder comes last on the path. That alone does not protect namespace packages: they have no __init__.py."""
    (tmp_path / "site" / "spread" / "part").mkdir(parents=True)
    (tmp_path / "site" / "spread" / "part" / "__init__.py").write_text("")
    (tmp_path / "site" / "whole.py").write_text("installed = True")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    lib = tmp_path / "lib"
    lib.mkdir()
    mine = lib / "a_file_of_mine.py"
    mine.write_text("import helper_beside, json, numpy, whole; assert whole.installed; numpy.zeros(1)")
    for name in ("helper_beside", "json", "numpy", "whole"):
        (lib / f"{name}.py").write_text("")
    (lib / "numpy").mkdir()
    assert cli.main(["methods", "--load", str(mine)]) == 0
    for name in ("a_file_of_mine", "helper_beside", "whole"):
        sys.modules.pop(name)
    sys.path.remove(str(lib))
    (lib / "spread.py").write_text("raise SystemExit('the neighbour was imported')")
    mine.write_text("import spread.part")
    capsys.readouterr()
    said = refused(capsys, "methods", "--load", str(mine))
    assert f"{lib / 'spread.py'} would hide the installed package spread. Rename that file" in said
    assert str(lib) not in sys.path


def test_method_registered_under_another_name_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records would be taken for those of the method that has the name."""
    monkeypatch.setitem(fl.METHODS, "better", fl.PDST)
    said = refused(capsys, "run", "--method", "better", *PLAIN)
    assert "the method registered as 'better' has the name 'pdst': both must be equal" in said
