"""Secure aggregation and differential privacy on Flower: the same bits as in a simulation, and cheats are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")
pytest.importorskip("dp_accounting", reason="pip install 'flashfl[privacy]'")

from flower_support import PATIENT, QUICK, federation, node_of, train
from flwr.app import Context, Message, RecordDict

import flashfl as fl
from flashfl.core.errors import ConfigError, RunStopped
from flashfl.flower import FlashStrategy, private, records, server_task
from flashfl.flower.host import Host
from flashfl.flower.private import make_identity, read_identity
from flashfl.flower.testing import InProcessGrid
from flashfl.privacy.keys import Directory
from flashfl.privacy.messages import HEADER, STEPS, flags

SETTINGS = {"rounds": 2, "per_round": 10, "max_steps": 2, "batch": 16, "eval_every": 1}
METHOD = fl.SPDST(density=0.05, warmup_clients=4, warmup_epochs=1)


@pytest.fixture(scope="module")
def task() -> fl.Task:
    return fl.tasks.digits(clients=10)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    folder = tmp_path_factory.mktemp("keys")
    keys = {client: make_identity(client, folder) for client in range(10)}
    (folder / "identities.json").write_text(json.dumps(keys))
    shared = str(folder / "identities.json")
    return {client: {"identity": str(folder / f"client-{client}.key"), "identities": shared} for client in keys}


@pytest.fixture(scope="module")
def simulated(task: fl.Task) -> fl.Run:
    return fl.simulate(METHOD, task, progress=False, device="cpu", workers=1, secure=True, **SETTINGS)


def request_of(message: Message) -> bytes:
    return records.read_blob(message.content, "private")[1] if "private" in message.content else b""


class Killed:
    """Clients whose replies never arrive from a step of the training phase on."""

    def __init__(self, clients: Iterable[int], step: int) -> None:
        self.nodes, self.step, self.gone = {node_of(c) for c in clients}, step, set[int]()

    def __call__(self, node: int, message: Message, reply: Message) -> Iterable[Message]:
        request = request_of(message)
        if request and node in self.nodes and request[0] == self.step and message.metadata.group_id.startswith("2."):
            self.gone.add(node)
        return [] if node in self.gone and request else [reply]


def test_existing_key_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*clients: str) -> None:
        monkeypatch.setattr("sys.argv", ["private", str(tmp_path), *clients])
        private.main()

    make("1", "1")
    with pytest.raises(SystemExit, match=r"client-1\.key exists already, and nothing was written\. Leave out client 1"):
        make("0", "1")
    assert not (tmp_path / "client-0.key").exists()
    old = json.loads((tmp_path / "identities.json").read_text())
    (tmp_path / "client-1.key").unlink()
    make("0", "1")
    new = json.loads((tmp_path / "identities.json").read_text())
    assert new["1"] != old["1"]
    assert new == {str(c): read_identity(tmp_path / f"client-{c}.key").public.hex() for c in (0, 1)}


def test_unreadable_keys_name_the_command_that_makes_them(tmp_path: Path) -> None:
    for read in (read_identity, Directory.read):
        with pytest.raises(ConfigError, match=r"Make keys with: python -m flashfl\.flower\.private FOLDER CLIENT"):
            read(tmp_path / "missing")


def test_secure_run_on_flower_is_bit_identical_to_the_simulation(
    task: fl.Task, nodes: dict[int, dict[str, str]], simulated: fl.Run
) -> None:
    run = train(METHOD, task, federation(task, nodes=nodes), secure=True, **SETTINGS)
    assert run.checksum == simulated.checksum
    assert [r.bytes for r in run.history][1:] == [r.bytes for r in simulated.history][1:]
    assert all(r.failures == {} and r.privacy is not None for r in run.history)


@pytest.mark.parametrize("step", range(5), ids=lambda step: STEPS[step].replace(" ", "-"))
def test_clients_killed_at_each_step_on_flower(
    task: fl.Task, nodes: dict[int, dict[str, str]], simulated: fl.Run, step: int
) -> None:
    """Two of ten clients vanish in the first training round: before their input is in they do not count."""
    method = fl.PDST(density=0.05)
    grid = federation(task, Killed((3, 6), step), nodes)
    run = train(method, task, grid, secure=True, options=QUICK, **{**SETTINGS, "rounds": 1})
    [record] = run.history
    assert record.attempt == 0
    assert set(record.failures) == ({3, 6} if step <= 2 else set())
    settings = {**SETTINGS, "rounds": 1, "secure": True}
    everyone = fl.simulate(method, task, progress=False, device="cpu", workers=1, **settings)
    assert (run.checksum == everyone.checksum) == (step > 2)


def test_too_few_survivors_open_nothing_and_the_round_is_repeated(
    task: fl.Task, nodes: dict[int, dict[str, str]]
) -> None:
    killed = Killed(range(4), 2)
    grid = federation(task, killed, nodes)
    run = train(fl.PDST(density=0.05), task, grid, secure=True, options=QUICK, **{**SETTINGS, "rounds": 1})
    [record] = run.history
    assert record.attempt == 1
    assert "TooFew: 6 of 10" in record.missed[9]
    assert record.cohort == tuple(range(4, 10))  # silent clients are not asked again at once


class Cheat(InProcessGrid):
    """A server that changes the requests of one step."""

    step = 0

    def change(self, request: bytes, node: int) -> bytes:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        changed = []
        for message in messages:
            request = request_of(message)
            if request and request[0] == self.step:
                request = self.change(request, message.metadata.dst_node_id)
                message.content["private"] = records.blob("private", request)["private"]
            changed.append(message)
        return super().push_messages(changed)


class AsksBoth(Cheat):
    step = 3

    def change(self, request: bytes, node: int) -> bytes:
        return request[: 5 + HEADER + 2] + flags({4}, range(10))


class ShowsOthers(Cheat):
    """Half of the clients hear that client 9 dropped out."""

    step = 3

    def change(self, request: bytes, node: int) -> bytes:
        if node <= node_of(5):
            return request
        return request[: 5 + HEADER] + flags(set(range(9)), range(10)) + flags({9}, range(10))


@pytest.mark.parametrize(("cheat", "refusal"), [(AsksBoth, "AsksForBoth"), (ShowsOthers, "DifferentCohorts")])
def test_cheating_server_is_refused_by_name(
    task: fl.Task, nodes: dict[int, dict[str, str]], cheat: type[Cheat], refusal: str
) -> None:
    grid = federation(task, nodes=nodes)
    grid.__class__ = cheat
    with pytest.raises(RunStopped, match=refusal):
        train(fl.PDST(density=0.05), task, grid, secure=True, retries=0, **SETTINGS)


def test_clients_with_an_identity_tell_no_sample_count_and_refuse_plain_rounds(
    task: fl.Task, nodes: dict[int, dict[str, str]]
) -> None:
    grid = federation(task, nodes=nodes)
    with pytest.raises(RunStopped, match="secure rounds only"):
        train(fl.PDST(density=0.05), task, grid, retries=0, **SETTINGS)
    strategy = FlashStrategy(fl.PDST(density=0.05), task, fl.TrainConfig(per_round=10), PATIENT, quiet=True)
    engine = strategy.connect(grid)
    assert {client.n for client in engine.registry.present()} == {1}


def test_clients_with_an_identity_send_no_input_without_masks(task: fl.Task, nodes: dict[int, dict[str, str]]) -> None:
    with pytest.raises(RunStopped, match="Unmasked: the server asks for an unprotected update"):
        train(fl.PDST(density=0.05), task, federation(task, nodes=nodes), retries=0, dp_noise=1.0, **SETTINGS)


def test_clients_with_an_identity_do_not_evaluate_models_for_the_server(task: fl.Task) -> None:
    context = Context(run_id=1, node_id=1, node_config={"identity": "k"}, state=RecordDict(), run_config={})
    for kind in ("train", "evaluate"):
        reply = Host(task).serve(Message(records.blob("order", b""), 1, kind), context)
        assert "secure rounds only" in (records.failure(reply) or "")


def test_clients_without_keys_cannot_take_part_in_secure_rounds(task: fl.Task) -> None:
    with pytest.raises(RunStopped, match="UnknownIdentity"):
        train(fl.PDST(density=0.05), task, federation(task), secure=True, retries=0, **SETTINGS)


def test_masked_inputs_on_flower_are_uniform(task: fl.Task, nodes: dict[int, dict[str, str]]) -> None:
    masked: list[np.ndarray] = []

    def record(node: int, message: Message, reply: Message) -> Iterable[Message]:
        if (request := request_of(message)) and request[0] == 2:
            masked.append(np.frombuffer(records.read_blob(reply.content, "answer")[1][HEADER:], np.uint8))
        return [reply]

    train(fl.PDST(density=0.05), task, federation(task, record, nodes), secure=True, **{**SETTINGS, "rounds": 1})
    assert len(masked) == 10
    for words in masked:
        counts = np.bincount(words, minlength=256)
        expected = counts.sum() / 256
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("secure", [True, False])
def test_differential_privacy_on_flower(task: fl.Task, nodes: dict[int, dict[str, str]], secure: bool) -> None:
    grid = federation(task, nodes=nodes if secure else None)
    run = train(fl.PDST(density=0.05), task, grid, secure=secure, dp_epsilon=20.0, **SETTINGS)
    assert run.privacy is not None
    assert 19 < run.privacy.known <= 20.0


def test_client_that_lost_its_mask_gets_it_again(
    task: fl.Task, nodes: dict[int, dict[str, str]], simulated: fl.Run
) -> None:
    grid = federation(task, nodes=nodes)

    def forget(state: object, record: object) -> None:
        for context in grid.contexts.values():
            for name in ("flashfl.rounds", "flashfl.masks"):
                context.state.pop(name, None)

    run = train(METHOD, task, grid, secure=True, watch=forget, **SETTINGS)
    assert run.checksum == simulated.checksum


def test_noise_for_spdst_is_allowed_before_clients_are_known(task: fl.Task) -> None:
    """The server's task has one client, and a round has more."""
    method = fl.SPDST(density=0.3, warmup_clients=0)
    server = server_task(task.build(), task.test)
    run = train(method, server, federation(task), dp_noise=1.0, **{**SETTINGS, "rounds": 1})
    assert run.privacy is not None
    with pytest.raises(ConfigError, match="clients cannot measure how dense each layer should be"):
        train(fl.SPDST(density=0.3, warmup_clients=2), server, federation(task), dp_noise=1.0, **SETTINGS)


def test_strategy_takes_secure_as_an_argument(task: fl.Task) -> None:
    assert FlashStrategy(METHOD, task, secure=True).train.secure
    with pytest.raises(ConfigError, match=r"clients of .* have different masks"):
        train(fl.NST(), task, federation(task), secure=True, **SETTINGS)


@pytest.mark.filterwarnings("ignore:rounds changed")
def test_resume_on_flower_keeps_epsilon(task: fl.Task, nodes: dict[int, dict[str, str]], tmp_path: Path) -> None:
    grid = federation(task, nodes=nodes)
    settings = {**SETTINGS, "secure": True, "dp_noise": 4.0}
    first = train(fl.PDST(density=0.05), task, grid, tmp_path / "run", **settings)
    again = train(fl.PDST(density=0.05), task, grid, tmp_path / "run", resume=True, **{**settings, "rounds": 3})
    assert first.privacy is not None
    assert again.privacy is not None
    assert again.privacy.known > first.privacy.known
    assert [r.privacy for r in again.history][:2] == [r.privacy for r in first.history]
