"""Clients that stay silent, and replies that are too large or hold control characters."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

import httpx
from flower_support import PATIENT, QUICK, assert_equal, federation, node_of, only, train
from flwr.app import Error, Message
from flwr.supercore.error import ApiErrorCode, FlowerError

import flashfl as fl
from flashfl.core.errors import ConfigError
from flashfl.engine.encoding import Encoding
from flashfl.engine.memory import ClientMemory
from flashfl.engine.store import MaskStore
from flashfl.flower import FlowerOptions, records, superlink, supernode
from flashfl.flower.attendance import Attendance
from flashfl.flower.engine import SLACK
from flashfl.flower.registry import Registry
from tests.conftest import make_task
from tests.test_every_method import VARIANTS, small

BAD = 2
EVERY = {"per_round": 8}
HURRIED = replace(PATIENT, timeout=600.0, wait=300.0, grace=0.2)


def silent(message: Message, reply: Message) -> Iterable[Message]:
    return []


# -- silent clients -----------------------------------------------------------------------------------------------


def test_silent_client_costs_the_grace_period_and_is_asked_less_often(caplog: pytest.LogCaptureFixture) -> None:
    task, began = make_task("norm"), time.monotonic()
    with caplog.at_level(logging.WARNING, "flwr.flashfl"):
        grid = federation(task, only(node_of(BAD), "train", silent))
        run = train(small("pdst"), task, grid, options=HURRIED, rounds=9, **EVERY)
    assert time.monotonic() - began < 60, "far less than one timeout"
    asked = [BAD in record.cohort for record in run.history]
    assert asked == [True, False, True, False, False, True, False, False, False]
    assert all((BAD in record.failures) == (BAD in record.cohort) for record in run.history)
    assert f"for client {BAD}; 7 of 8 replies are in" in caplog.text
    assert f"client {BAD} did not reply (3 times in a row); skipping it in the next 4 rounds" in caplog.text
    gone = federation(task)
    gone.leave(node_of(BAD))
    assert_equal(run, train(small("pdst"), task, gone, rounds=9, per_round=7))


def test_silent_node_costs_the_start_no_more_than_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    task, began = make_task("norm"), time.monotonic()
    grid = federation(task, only(node_of(BAD), "query", silent))
    run = train(small("pdst"), task, grid, options=replace(HURRIED, clients=7), per_round=7, rounds=1)
    assert time.monotonic() - began < 60
    assert run.history[0].cohort == (0, 1, 3, 4, 5, 6, 7)
    assert f"have not registered: {node_of(BAD)}" in caplog.text


def test_run_goes_on_when_passed_over_clients_are_needed() -> None:
    """With two clients and two needed, the silent one is asked again at once."""
    task = make_task("norm", clients=2)
    seen: list[int] = []

    def once(message: Message, reply: Message) -> Iterable[Message]:
        seen.append(1)
        return [] if len(seen) == 1 else [reply]

    grid = federation(task, only(node_of(1), "train", once))
    run = train(small("pdst"), task, grid, options=replace(QUICK, timeout=0.5), per_round=2, min_replies=2)
    assert run.history[0].attempt == 1
    assert all(record.cohort == (0, 1) for record in run.history)


def test_results_do_not_depend_on_the_grace_period_if_all_reply() -> None:
    task = make_task("norm")
    runs = [
        train(small("nst"), task, federation(task), options=replace(PATIENT, grace=g, enough=e))
        for g, e in ((0.0, 0.1), (60.0, 1.0))
    ]
    assert_equal(*runs)


def test_slow_client_gets_three_times_its_usual_time() -> None:
    attendance = Attendance(FlowerOptions(timeout=600.0, grace=10.0, enough=0.5))
    assert attendance.time_allowed("train", [3, 4], [1.0]) == 600.0, "too few replies"
    assert attendance.time_allowed("train", [3], [9.0, 2.0, 4.0]) == 14.0, "half were in after 4 s"
    assert attendance.time_allowed("train", [3], [90.0, 20.0, 40.0]) == 120.0, "three times what half took"
    for seconds in (20.0, 300.0, 30.0):
        attendance.replied("train", 3, seconds)
        attendance.replied("evaluate", 3, 1.0)
    assert attendance.time_allowed("train", [3], [2.0, 4.0]) == 90.0
    assert attendance.time_allowed("evaluate", [3], [2.0, 4.0]) == 12.0, "each kind of work has its own times"
    assert attendance.time_allowed("evaluate", [5], [2.0, 4.0]) == 14.0, "a client whose times are not known"
    attendance.replied("train", 3, 300.0)
    attendance.replied("train", 3, 300.0)
    assert attendance.time_allowed("train", [3], [2.0, 4.0]) == 600.0, "never above the timeout"
    assert Attendance(FlowerOptions(), need=3).time_allowed("train", [3], [2.0, 4.0]) == 600.0, "min_replies count"
    assert Attendance(FlowerOptions(enough=1.0)).time_allowed("train", [3], [2.0, 4.0, 5.0]) == 600.0


def test_client_that_missed_a_round_gets_a_sixth_of_the_grace_period() -> None:
    attendance = Attendance(FlowerOptions())
    assert attendance.time_allowed("train", [3], [2.0, 4.0]) == 64.0
    attendance.round_over([3])
    assert attendance.time_allowed("train", [3], [2.0, 4.0]) == 14.0
    assert attendance.time_allowed("train", [3, 5], [2.0, 4.0, 4.0]) == 64.0, "another one did not"
    attendance.replied("train", 3, 40.0)
    assert attendance.time_allowed("train", [3], [2.0, 4.0]) == 120.0
    attendance.round_over([3])
    assert attendance.time_allowed("train", [3], [2.0, 4.0]) == 50.0, "its usual time and a sixth of the grace period"


@pytest.mark.parametrize("seconds", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("died", [0, 1, 7])
def test_sleeping_and_killed_client_cost_less_than_20_s_a_round(seconds: float, died: int) -> None:
    """Defaults, six clients, with a clock of numbers: client 5 never trains, client 4 dies in round `died`."""
    attendance, lost, late = Attendance(FlowerOptions()), [], 0
    for number in range(40):
        asked = [client for client in range(6) if client not in attendance.passed_over]
        missing = [client for client in asked if client == 5 or (client == 4 and number >= died)]
        present = [client for client in asked if client not in missing]
        times = [seconds * (1 + client / 10) for client in present]
        allowed = attendance.time_allowed("train", missing, times) if missing else max(times)
        lost.append(allowed - max(times))
        late += len(missing) > 0
        for client, took in zip(present, times, strict=True):
            attendance.replied("train", client, took)
        attendance.round_over(missing)
    assert max(lost[2:]) < max(20, 2 * 1.5 * seconds), "where rounds are long, a first miss costs twice the usual time"
    assert max(lost[max(2, died + 1) :]) < 20, lost
    assert sum(lost[2:]) / 38 < 3, lost
    assert late <= 12, "they are asked less and less often"


def test_reply_ends_being_passed_over() -> None:
    attendance = Attendance(FlowerOptions())
    for _ in range(10):
        attendance.round_over([1])
    assert attendance.passed_over == {1: 64}
    attendance.round_over([])
    assert attendance.passed_over == {1: 63}
    attendance.replied("train", 1, 5.0)
    assert not attendance.passed_over
    attendance.round_over([1])
    assert attendance.passed_over == {1: 1}


@pytest.mark.parametrize("bad", [{"grace": -1.0}, {"enough": 0.0}, {"enough": 1.5}, {"timeout": 0.0}])
def test_impossible_waiting_options_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        FlowerOptions(**bad)  # type: ignore[arg-type]


def test_only_present_and_refresh_use_the_network() -> None:
    task = make_task("norm")
    grid = federation(task)
    registry = Registry(grid, task, PATIENT)
    assert (registry.size, registry.fixed, registry.entries, registry.save()["size"]) == (0, None, {}, 0)
    assert not grid.pushed
    assert len(registry.present()) == 8
    assert len(grid.pushed) == 8


# -- text from strangers ------------------------------------------------------------------------------------------

NASTY = "\x1b[2J\r\nINFO: all is well\u202e\u2028\x00" + "x" * 10_000


def assert_harmless(text: str) -> None:
    assert text.isprintable(), text
    assert "all is well" in text
    assert len(text) < 1000


def test_printable_escapes_and_cuts() -> None:
    assert records.printable("a\nb\x1b[0m\u202e\ud800 ü") == "a\\nb\\x1b[0m\\u202e\\ud800 ü"
    assert records.printable("abc", 2) == "ab..."
    assert_harmless(records.printable(NASTY))


@pytest.mark.parametrize("how", ["failed", "error", "record"])
def test_text_of_a_failed_client_is_escaped(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def nasty(message: Message, reply: Message) -> Iterable[Message]:
        if how == "error":
            return [Message(Error(2, NASTY), reply_to=message)]
        reply.content = records.fields(*(("failed", {"why": NASTY}) if how == "failed" else (NASTY, {"a": 1})))
        return [reply]

    task = make_task("norm")
    run = train(small("pdst"), task, federation(task, only(node_of(BAD), "train", nasty)), rounds=1, **EVERY)
    assert_harmless(run.history[0].failures[BAD])
    for record in caplog.records:
        assert record.getMessage().isprintable()


@pytest.mark.parametrize("field", ["layout", "package", "client", "fixed", "why"])
def test_text_of_a_registration_is_escaped(field: str, caplog: pytest.LogCaptureFixture) -> None:
    def nasty(message: Message, reply: Message) -> Iterable[Message]:
        said = records.read_fields(reply.content, "client")
        reply.content = records.fields("failed" if field == "why" else "client", {**said, field: NASTY})
        return [reply]

    task = make_task("norm")
    registry = Registry(federation(task, only(node_of(BAD), "query", nasty)), task, PATIENT)
    registry.present()
    assert (node_of(BAD) in registry.refused) == (field != "package")
    for text in (*registry.refused.values(), *(record.getMessage() for record in caplog.records)):
        assert text.isprintable()
        assert len(text) < 1000


def test_endless_text_is_not_read() -> None:
    with pytest.raises(records.BadRecord, match="characters"):
        records.read_fields(records.fields("client", {"fixed": "[" * (1 << 21)}), "client")


# -- the size of a reply ------------------------------------------------------------------------------------------


def test_reply_larger_than_the_order_allows_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, read = list[int](), Encoding.received

    def spy(inbox: Encoding, client: int, data: bytes) -> None:
        arrived.append(client)
        read(inbox, client, data)

    def padded(message: Message, reply: Message) -> Iterable[Message]:
        name, data = records.read_blob(reply.content, "update")
        reply.content = records.blob(name, data + bytes(SLACK + 20_000))
        return [reply]

    monkeypatch.setattr(Encoding, "received", spy)
    task = make_task("norm")
    run = train(small("pdst"), task, federation(task, only(node_of(BAD), "train", padded)), rounds=1, **EVERY)
    assert re.search(r"the reply has \d+ bytes, at most \d+ are allowed for this order", run.history[0].failures[BAD])
    assert sorted(arrived) == [0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("values", ["fp32", "int8"])
@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=["-".join([n, *map(str, c)]) for n, c in VARIANTS])
def test_honest_updates_stay_below_the_largest_without_slack(
    name: str, changes: dict[str, Any], values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashfl.flower.engine.SLACK", 0)
    task = make_task("norm")
    run = train(small(name, **changes), task, federation(task), rounds=3, values=values)
    assert not any(record.failures for record in run.history)


def test_largest_update_follows_the_density_of_the_order() -> None:
    task = make_task("norm")
    sizes = []
    for density in (0.05, 0.5):
        method = fl.PDST(density=density)
        state = method.init(fl_plan(task))
        [(client, order)] = method.orders(state, task.clients[:1])
        account = Encoding(ClientMemory(MaskStore(task.layout, {})))
        account.sent(client, order)
        sizes.append(account.largest_update(client.id))
    assert 4 * 0.4 * task.layout.prunable_size < sizes[1] - sizes[0] < 4 * 0.5 * task.layout.prunable_size
    page = (Path(fl.__file__).parent / "wire" / "FORMAT.md").read_text()
    assert f"more than {SLACK} bytes longer than the largest update" in page


def fl_plan(task: fl.Task) -> Any:
    from flashfl.run.config import TrainConfig, plan_of

    return plan_of(TrainConfig(per_round=1), task, len(task.clients))


# -- the SuperNode and the SuperLink's database --------------------------------------------------------------------


def refused(code: int) -> httpx.HTTPStatusError:
    body = json.dumps(FlowerError(code, "").to_json("the node cannot be activated"))
    response = httpx.Response(400, text=body, request=httpx.Request("POST", "http://superlink"))
    return httpx.HTTPStatusError("refused", request=response.request, response=response)


def test_supernode_joins_again_once_the_superlink_has_forgotten_it(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[Any] = [refused(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)] * 2 + ["joined"]

    def activate() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert supernode.try_again(activate, pause=0.01) == "joined"
    said = capsys.readouterr().err
    assert said.count("Trying again") == 2
    assert "register it there. Or an earlier process of this node crashed" in said


def test_supernode_gives_up_after_a_while_and_on_other_errors() -> None:
    calls = []

    def activate() -> None:
        calls.append(1)
        raise refused(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)

    with pytest.raises(httpx.HTTPStatusError):
        supernode.try_again(activate, seconds=0.1, pause=0.03)
    assert 2 <= len(calls) <= 5
    assert not supernode.not_activated(refused(ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL))
    assert not supernode.not_activated(OSError("no route"))


def test_superlink_creates_its_files_for_its_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        (tmp_path / "link.db").touch()

    command = SimpleNamespace(flower_superlink=start, uvicorn=SimpleNamespace(run=None))
    monkeypatch.setitem(sys.modules, "flwr.superlink.cli.flower_superlink", command)
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    before = os.umask(0o022)
    try:
        superlink.main()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "link.db").stat().st_mode) == 0o600
    assert "FLWR_INTERNAL_GRPC_CONTROL_API" not in os.environ, "it would open another port"
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    [line] = [line for line in page.splitlines() if "--database link.db" in line]
    assert line.startswith("python -m flashfl.flower.superlink ")
