"""Files that a stranger wrote into a run's folder: every one is refused with a named error, or changes nothing outside.

`mutations` changes every field of a record in turn. Digests are made right again, so that the content is really read.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flashfl as fl
from flashfl.cli import main
from flashfl.core.errors import CheckpointError, ConfigError, FlashError
from flashfl.run import sealed
from flashfl.run.results import Results
from tests.conftest import make_task

SETTINGS: dict[str, Any] = {"per_round": 4, "batch": 4, "eval_every": 2, "workers": 1, "checkpoint_every": 1}
METHODS: dict[str, fl.Method] = {
    "nst": fl.NST(density=0.3),
    "jmwst": fl.JMWST(density=0.3, warmup_clients=2, warmup_epochs=1),
    "hetero-spdst": fl.HeteroSPDST(densities=(0.3, 0.1), shares=(0.5, 0.5), warmup_clients=2, warmup_epochs=1),
    "scaffold": fl.METHODS["scaffold"](),  # clients remember tensors too
}
ODD: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**64, 10**30, 0.5, -0.0, float("nan"), 1e308, "", "x", "../../victim", "a" * 16,
    [], [[]], [None], {}, {"a": 1}, {"is": "Local"}, {"is": "Recipe", "key": 1, "budgets": [1]},
]  # fmt: skip
Path_ = tuple[str | int, ...]


def go(folder: Path | None, method: fl.Method = METHODS["nst"], **more: Any) -> fl.Run:
    return fl.simulate(method, make_task("dropout"), 3, folder=folder, **SETTINGS, **more)


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Where every field of a record lies."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in inner:
        yield from places(below, (*at, name))


def mutations(record: dict[str, Any], odd: list[Any]) -> list[Callable[[], dict[str, Any]]]:
    """Every field replaced by every odd value, removed, or renamed by one bit."""

    def change(at: Path_, how: Callable[[Any, Any], Any]) -> dict[str, Any]:
        out = copy.deepcopy(record)
        table: Any = out
        for name in at[:-1]:
            table = table[name]
        how(table, at[-1])
        return out

    def rename(table: Any, name: Any) -> None:
        value = table.pop(name)
        if isinstance(table, dict):
            table[chr(ord(name[0]) ^ 1) + name[1:] if name else "x"] = value

    found: list[Callable[[], dict[str, Any]]] = []
    for at in places(record):
        found += [lambda at=at, v=v: change(at, lambda table, name: table.__setitem__(name, v)) for v in odd]
        found += [lambda at=at: change(at, lambda table, name: table.pop(name)), lambda at=at: change(at, rename)]
    return found


def forge(path: Path, record: dict[str, Any]) -> None:
    """Write a checkpoint's record with a digest that fits."""
    record = {name: value for name, value in record.items() if name not in ("digest", "signature")}
    path.write_text(json.dumps({**record, "digest": sealed.digest(record)}))


def first_checkpoint(folder: Path) -> Path:
    """The older of two checkpoints; the newer one is removed, so that a resumed run has a round to go."""
    [old, new] = sorted((folder / "checkpoints").glob("*.json"))
    new.unlink()
    return old


def resume_all(method: fl.Method, folder: Path, count: int | None) -> Counter[str]:
    """How resuming ended for `count` random mutations of a checkpoint's record, or for all."""
    source, work, outside = folder / "source", folder / "work", folder / "victim"
    go(source, method)
    outside.write_text("mine")
    path = first_checkpoint(source).relative_to(source)
    every = mutations(json.loads((source / path).read_text()), ODD)
    ends: Counter[str] = Counter()
    for mutate in every if count is None else random.Random(18).sample(every, count):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(source, work)
        forge(work / path, mutate())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                go(work, method, resume=True)
            ends["went on"] += 1
        except FlashError as error:  # anything else fails the test
            ends[type(error).__name__] += 1
        assert outside.read_text() == "mine"
    print(method.name, ends.total(), dict(ends))
    return ends


@pytest.mark.parametrize("name", METHODS)
def test_forged_checkpoint_records_raise_named_errors_only(name: str, tmp_path: Path) -> None:
    ends = resume_all(METHODS[name], tmp_path, 40)
    assert ends["CheckpointError"] > 25, ends
    assert set(ends) <= {"CheckpointError", "FlashError", "went on"}, ends


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_all_forged_checkpoint_records_raise_named_errors_only(name: str, tmp_path: Path) -> None:
    ends = resume_all(METHODS[name], tmp_path, None)
    assert set(ends) <= {"CheckpointError", "FlashError", "went on"}, ends


# -- signatures ----------------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "checkpoint.key"
    path.write_bytes(os.urandom(32))
    monkeypatch.setenv(sealed.KEY, str(path))
    return path


def test_signed_run_resumes_to_the_same_result(key: Path, tmp_path: Path) -> None:
    whole = go(tmp_path / "run")
    first_checkpoint(tmp_path / "run")
    assert go(tmp_path / "run", resume=True).checksum == whole.checksum


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "unsigned",
            "is not signed: its run had no key. If you trust the file, resume without --checkpoint-key",
        ),
        ("changed", "checkpoint-00000002.json is signed with another key, or was changed since"),
        ("another key", "checkpoint-00000002.json is signed with another key"),
        ("short key", "has 3 bytes, and at least 16 are needed"),
        ("no key file", "cannot be read"),
    ],
)
def test_checkpoint_without_the_right_signature_is_one_clear_error(
    how: str, said: str, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path / "run")
    path = first_checkpoint(tmp_path / "run")
    record = json.loads(path.read_text())
    other = tmp_path / "other.key"
    if how == "unsigned":
        forge(path, record)
    elif how == "changed":  # by somebody who makes the digest right
        signature, record["state"]["round"] = record["signature"], 1
        forge(path, record)
        path.write_text(json.dumps({**json.loads(path.read_text()), "signature": signature}))
    else:
        if how != "no key file":
            other.write_bytes(b"abc" if how == "short key" else os.urandom(32))
        monkeypatch.setenv(sealed.KEY, str(other))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=said):
        go(tmp_path / "run", resume=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("key_given", [b"abc", None])
def test_bad_key_is_an_error_before_the_first_round(key_given: bytes | None, key: Path, tmp_path: Path) -> None:
    sealed._read_key.cache_clear()
    if key_given is None:
        key.unlink()
    else:
        key.write_bytes(key_given)

    def never(state: fl.State, record: Any) -> None:
        pytest.fail("a round was trained")

    with pytest.raises(ConfigError, match="the checkpoint key"):
        go(tmp_path / "run", watch=never)
    assert not (tmp_path / "run" / "results.jsonl").exists()


def test_changed_tensors_of_a_signed_checkpoint_are_refused(key: Path, tmp_path: Path) -> None:
    go(tmp_path / "run")
    path = first_checkpoint(tmp_path / "run").with_suffix(".safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not match its digest"):
        go(tmp_path / "run", resume=True)


def test_command_line_takes_a_checkpoint_key(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(sealed.KEY, "")
    words = ["--rounds", "1", "--clients", "4", "--per-round", "2", "--workers", "1", "--quiet"]
    run = str(tmp_path / "run")
    assert main(["run", "--out", run, "--checkpoint-key", str(key), *words]) == 0
    assert main(["export", run, "--checkpoint-key", str(key)]) == 0
    key.write_bytes(os.urandom(32))
    sealed._read_key.cache_clear()
    capsys.readouterr()
    assert main(["export", run, "--checkpoint-key", str(key)]) == 1
    assert "is signed with another key, or was changed since. Give the key" in capsys.readouterr().err


# -- the results file ----------------------------------------------------------------------------------------------


def test_flipped_key_in_results_is_one_clear_error(tmp_path: Path) -> None:
    """A key of a round's record, at any depth but in tables by name (seconds, clients), or the type of any line."""
    go(tmp_path)
    path = tmp_path / "results.jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[2])
    known = [at for at in places(record) if len(at) == 1 or at[0] in ("bytes", "total", "paper_bytes")]
    assert len(known) > 25
    for number, at in [(2, at) for at in known] + [(0, ("type",)), (3, ("type",)), (len(lines) - 1, ("type",))]:
        changed = json.loads(lines[number])
        table = changed if len(at) == 1 else changed[at[0]]
        name = str(at[-1])
        table[chr(ord(name[0]) ^ 1) + name[1:]] = table.pop(name)
        path.write_text("\n".join([*lines[:number], json.dumps(changed), *lines[number + 1 :]]) + "\n")
        with pytest.raises(FlashError, match=rf"results\.jsonl(, line {number + 1}: | does not begin with)"):
            Results.read(tmp_path)
        with pytest.raises(FlashError, match=r"results\.jsonl"):
            go(tmp_path, resume=True)


@pytest.mark.parametrize("at", [("config",), ("config", "train"), ("identity",), ("identity", "settings"), ("task",)])
def test_forged_header_of_results_is_one_clear_error(at: Path_, tmp_path: Path) -> None:
    go(tmp_path)
    path = tmp_path / "results.jsonl"
    first, *rest = path.read_text().splitlines()
    for value in (7, "x", [1], None):
        header = json.loads(first)
        table = header if len(at) == 1 else header[at[0]]
        table[at[-1]] = value
        path.write_text("\n".join([json.dumps(header), *rest]) + "\n")
        with pytest.raises(FlashError, match=rf"the first line of its results\.jsonl has no table '{at[-1]}'"):
            go(tmp_path, resume=True)


@pytest.mark.parametrize("to", ["another file", "nothing", "itself", "/dev/null", "a folder"])
@pytest.mark.parametrize("resume", [True, False])
def test_linked_results_file_is_one_clear_error(to: str, resume: bool, tmp_path: Path) -> None:
    go(tmp_path / "run")
    path, other = tmp_path / "run" / "results.jsonl", tmp_path / "other.jsonl"
    if to == "another file":
        path.rename(other)
    elif to == "a folder":
        path.unlink()
        other.mkdir()
    else:
        path.unlink()
    path.symlink_to({"itself": path, "/dev/null": Path("/dev/null")}.get(to, other))
    before = other.read_bytes() if other.is_file() else None
    points = sorted((tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(ConfigError, match=r"results\.jsonl is a link or not a file.*Replace it"):
        go(tmp_path / "run", resume=resume, overwrite=not resume)
    assert path.is_symlink()
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == points
    assert before is None or other.read_bytes() == before


def test_links_in_a_run_folder_do_not_lead_to_other_files(tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("mine")
    run.mkdir()
    (run / "lock").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"lock is a link.*remove it"):
        go(run)
    (run / "lock").unlink()
    for name in ("model.safetensors", "model.masks.safetensors", f"results.jsonl.{os.getpid()}.partial"):
        (run / name).symlink_to(victim)
    go(run)
    assert victim.read_text() == "mine"
