"""A real deployment: processes, TLS, authenticated SuperNodes, and their failures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from deployment import APP, STOCK, CountingProxy, Deployment, deployment, free_port, wait_for
from flower_support import only
from flwr.app import Error, Message

import flashfl as fl
from flashfl.core.record import RoundRecord
from flashfl.core.rng import fold
from flashfl.data.tasks import TaskConfig, build_task
from flashfl.flower import FlashStrategy, FlowerOptions, client_app
from flashfl.flower.testing import InProcessGrid
from flashfl.run.config import TrainConfig

pytestmark = pytest.mark.slow

TRAIN: dict[str, Any] = {"per_round": 3, "batch": 16, "eval_every": 1, "min_replies": 2, "checkpoint_every": 1}
TRAIN |= {"robust": "on"}
SPDST = fl.SPDST(density=0.05, warmup_epochs=3)
SETTINGS = "warmup_epochs=3"


def digits(clients: int) -> fl.Task:
    return build_task(TaskConfig(clients=clients), fold(0, "task"))


def rounds(folder: Path) -> list[RoundRecord]:
    path = folder / "results.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [RoundRecord.from_json(line) for line in lines if line["type"] == "round"]


def end(folder: Path) -> dict[str, Any]:
    last: dict[str, Any] = json.loads((folder / "results.jsonl").read_text().splitlines()[-1])
    assert last["type"] == "end"
    return last


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Deployment]:
    """A SuperLink and three SuperNodes, two of them ours and one as Flower starts it."""
    with deployment(tmp_path / "flower") as made:
        for number in range(3):
            made.supernode(number, 3, launcher=STOCK if number == 2 else "flashfl.flower.supernode")
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The checksum of five rounds with three clients on the CPU engine."""
    return fl.simulate(SPDST, digits(3), 5, workers=1, **TRAIN).checksum


def test_three_supernodes_with_tls_and_authentication_train_spdst(
    three: Deployment, undisturbed: str, tmp_path: Path
) -> None:
    run = three.run(settings=SETTINGS, train__rounds=5, flower__clients=3, folder=str(tmp_path / "run"))
    assert three.wait(run, 240) == "finished:completed"
    assert end(tmp_path / "run")["checksum"] == undisturbed, "the bits of a simulation, over TLS and three processes"
    assert end(tmp_path / "run")["metric"] > 0.8
    assert [line.cohort for line in rounds(tmp_path / "run")] == [(0, 1, 2)] * 6
    assert not any(line.failures for line in rounds(tmp_path / "run"))


def test_supernode_without_a_registered_key_cannot_join(three: Deployment, tmp_path: Path) -> None:
    from deployment import make_key

    make_key(three.folder / "node7.key")  # it has a key, but nobody has registered it
    three.supernode(7, 8)
    run = three.run(
        settings=SETTINGS + " warmup_clients=0", train__rounds=2, flower__clients=3, folder=str(tmp_path / "run")
    )
    assert three.wait(run, 180) == "finished:completed"
    assert all(7 not in line.cohort for line in rounds(tmp_path / "run"))
    assert "SuperNode ID" not in three.log("node7")


def test_restarted_supernode_joins_again(three: Deployment) -> None:
    """The SuperLink counts a killed node as online for a minute, and Flower's own SuperNode then exits with 305."""
    wait_for(lambda: "SuperNode ID" in three.log("node1"), 60, "the SuperNode")
    three.kill("node1", signal.SIGKILL)
    three.log_from_here("node1")
    time.sleep(2)
    three.supernode(1, 3)
    wait_for(lambda: "SuperNode ID" in three.log("node1"), 150, "the restarted SuperNode")
    assert "Trying again" in three.log("node1")
    modes = {path.stat().st_mode & 0o777 for path in three.folder.glob("link.db*")}
    assert modes == {0o600}, "nobody else can read the SuperLink's database"


def test_supernode_killed_during_a_round_is_dropped(three: Deployment, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = three.run(settings=SETTINGS, train__rounds=5, flower__clients=3, flower__timeout=30.0, folder=str(folder))
    wait_for(lambda: len(rounds(folder)) >= 2, 180, "the second round")
    seen = three.log("node1").count("Receiving: train")
    wait_for(lambda: three.log("node1").count("Receiving: train") > seen, 60, "an order for client 1")
    three.kill("node1", signal.SIGKILL)
    assert three.wait(run, 400) == "finished:completed"
    done = rounds(folder)
    assert len(done) == 6
    assert 1 in {client for line in done for client in line.failures}
    assert all(set(line.failures) <= {1} for line in done)
    assert all({0, 2} <= set(line.cohort) for line in done)
    assert end(folder)["metric"] > 0.7


@pytest.mark.parametrize("which", ["the ServerApp", "the SuperLink"])
def test_killed_server_resumes(which: str, three: Deployment, undisturbed: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = {"settings": SETTINGS, "train__rounds": 5, "flower__clients": 3, "folder": str(folder)}
    three.run(**config)
    wait_for(lambda: len(rounds(folder)) >= 3, 180, "the third round")
    if which == "the ServerApp":
        os.kill(three.serverapp(), signal.SIGKILL)
    else:
        three.kill("superlink", signal.SIGKILL)
        three.log_from_here("superlink")
        three.superlink()
    before = len(rounds(folder))
    assert before < 6
    again = three.run(**config, resume=True)
    assert three.wait(again, 300) == "finished:completed"
    assert end(folder)["checksum"] == undisturbed, "as if it had never been killed"
    assert len(rounds(folder)) == 6


def test_rogue_supernode_does_not_change_the_model(tmp_path: Path) -> None:
    bad, folder = 3, tmp_path / "run"
    path = os.pathsep.join([str(Path(__file__).parent / "rogue"), os.environ.get("PYTHONPATH", "")])
    with deployment(tmp_path / "flower") as made:
        for number in range(4):
            made.supernode(number, 4, env={"PYTHONPATH": path} if number == bad else None)
        run = made.run(settings=SETTINGS, train__rounds=4, train__per_round=4, flower__clients=4, folder=str(folder))
        assert made.wait(run, 240) == "finished:completed"
        assert "ROGUE" in made.log(f"node{bad}")
    reasons = [line.failures[bad] for line in rounds(folder)]
    assert {reason.split(":")[0] for reason in reasons} == {"BadChecksum", "NonFinite"}
    assert end(folder)["checksum"] == without(bad, 4), "the model is as if the rogue had never answered"


def without(bad: int, clients: int) -> str:
    task = digits(clients)

    def crash(message: Message, reply: Message) -> list[Message]:
        return [Message(Error(2, "gone"), reply_to=message)]

    grid = InProcessGrid({}, tamper=only(100 + bad, "train", crash))
    for client in range(clients):
        grid.join(100 + client, client_app(task), {"partition-id": client})
    config = TrainConfig(rounds=4, **{**TRAIN, "per_round": clients})
    strategy = FlashStrategy(SPDST, task, config, FlowerOptions(clients=clients), quiet=True)
    strategy.start(grid)
    assert strategy.run is not None
    return strategy.run.checksum


def test_bytes_through_a_proxy_match_the_accounting(tmp_path: Path) -> None:
    """One client behind a counting proxy. What Flower adds is measured: idle, and with next to no weights."""
    found: dict[float, dict[str, tuple[float, int]]] = {}
    with deployment(tmp_path / "flower") as made, contextlib.closing(CountingProxy(made.port)) as proxy:
        made.supernode(0, 1, via=proxy.port, launcher=STOCK)
        wait_for(lambda: "SuperNode ID" in made.log("node0"), 60, "the SuperNode")
        start = (proxy.up, proxy.down)
        time.sleep(15)
        idle = {"up": (proxy.up - start[0]) / 15, "down": (proxy.down - start[1]) / 15}
        for density in (0.0005, 1.0, 0.1, 0.02):
            folder, up, down, began = tmp_path / f"run-{density}", proxy.up, proxy.down, time.monotonic()
            run = made.run(
                settings=f"method=pdst density={density}", train__rounds=4, train__per_round=1, train__min_replies=1,
                flower__clients=1, folder=str(folder),
            )  # fmt: skip
            assert made.wait(run, 240) == "finished:completed"
            total, took = end(folder)["bytes"], time.monotonic() - began
            found[density] = {
                "up": (proxy.up - up - took * idle["up"], total["up"]),
                "down": (proxy.down - down - took * idle["down"], total["down"]),
            }
    print(json.dumps([idle, found]))
    for way in ("up", "down"):
        fixed = found[0.0005][way][0] - found[0.0005][way][1]
        for density in (1.0, 0.1, 0.02):
            seen, accounted = found[density][way]
            assert abs(seen - accounted - fixed) <= 0.05 * accounted, (density, way, idle, found)


def test_ray_simulation_is_bit_identical(tmp_path: Path) -> None:
    """`flwr run` on a SuperLink in simulation mode, which starts Ray."""
    made = Deployment(tmp_path / "flower")
    port = free_port()
    (tmp_path / "flower" / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    try:
        made.start(
            "superlink", "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_for(lambda: "Uvicorn running" in made.log("superlink"), 60, "the SuperLink")
        words = f'settings="{SETTINGS}" train.rounds=3 folder="{tmp_path / "run"}"'
        said = made.flwr(
            "run", str(APP), "here", "--run-config", words, "--format", "json",
            "--federation-config", "num-supernodes=6 client-resources-num-cpus=1",
        )  # fmt: skip
        assert made.wait(int(json.loads(said)["run-id"]), 300) == "finished:completed"
    finally:
        made.close()
    here = fl.simulate(SPDST, digits(6), 3, workers=1, **TRAIN)
    assert end(tmp_path / "run")["checksum"] == here.checksum
    assert here.traffic.up == end(tmp_path / "run")["bytes"]["up"]


def test_ten_supernodes_with_tls_open_the_simulations_secure_sum(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="pip install 'flashfl[privacy]'")
    from flashfl.flower.private import make_identity

    settings = "warmup_clients=4 warmup_epochs=1 secure=true per_round=10 max_steps=2"
    keys = {client: make_identity(client, tmp_path / "keys") for client in range(10)}
    (tmp_path / "keys" / "identities.json").write_text(json.dumps(keys))
    method, train = fl.SPDST(density=0.05, warmup_clients=4, warmup_epochs=1), {**TRAIN, "per_round": 10}
    expected = fl.simulate(method, digits(10), 1, workers=1, device="cpu", secure=True, max_steps=2, **train)
    with deployment(tmp_path / "flower") as made:
        for number in range(10):
            named = f'identity="{tmp_path}/keys/client-{number}.key" identities="{tmp_path}/keys/identities.json"'
            made.supernode(number, 10, config=named)
        run = made.run(settings=settings, train__rounds=1, flower__clients=10, folder=str(tmp_path / "run"))
        assert made.wait(run, 1500) == "finished:completed"
        assert end(tmp_path / "run")["checksum"] == expected.checksum


def test_supernodes_killed_at_each_of_five_secure_steps_leave_the_exact_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of ten nodes are killed in one round over TLS, one in each step. Up to the masked input none counts."""
    pytest.importorskip("dp_accounting", reason="pip install 'flashfl[privacy]'")
    from flashfl.engine import cpu
    from flashfl.flower.private import make_identity

    ends = {1: 0, 3: 1, 5: 2, 7: 3, 9: 4}
    keys = {client: make_identity(client, tmp_path / "keys") for client in range(10)}
    (tmp_path / "keys" / "identities.json").write_text(json.dumps(keys))
    settings = "warmup_clients=0 secure=true per_round=10 max_steps=2 policy.survive=0.51 policy.corrupt=0.0"
    mortal = os.pathsep.join([str(Path(__file__).parent / "mortal"), os.environ.get("PYTHONPATH", "")])
    with deployment(tmp_path / "flower") as made:
        for number in range(10):
            named = f'identity="{tmp_path}/keys/client-{number}.key" identities="{tmp_path}/keys/identities.json"'
            env = {"PYTHONPATH": mortal, "ENDS_AT_STEP": str(ends[number])} if number in ends else None
            made.supernode(number, 10, config=f"{named} policy-survive=0.51 policy-corrupt=0.0", env=env)
        run = made.run(
            settings=settings, train__rounds=1, flower__clients=10, flower__timeout=60.0, folder=str(tmp_path / "run")
        )
        assert made.wait(run, 1500) == "finished:completed"
        assert all(f"ENDS {step}" in made.log(f"node{client}") for client, step in ends.items())
    [record] = rounds(tmp_path / "run")
    assert (record.attempt, set(record.failures)) == (0, {1, 3, 5})
    monkeypatch.setattr(cpu, "drops", lambda s, client, share: client in ends)
    monkeypatch.setattr(cpu, "dropout_step", lambda s, client: ends[client])
    more = {**TRAIN, "per_round": 10, "dropout": 0.1, "policy": {"survive": 0.51, "corrupt": 0.0}}
    method = fl.SPDST(density=0.05, warmup_clients=0)
    expected = fl.simulate(method, digits(10), 1, workers=1, device="cpu", secure=True, max_steps=2, **more)
    assert set(expected.history[0].failures) == {1, 3, 5}
    assert end(tmp_path / "run")["checksum"] == expected.checksum
