"""Who may do what on a real SuperLink: control, the database, and keys that are bound to clients."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

import httpx
from deployment import Deployment, deployment, wait_for

from flashfl.flower.superlink import allowed, guard
from flashfl.run.results import Results

CONTROL, FLEET = "/v1/control/start-run", "/v1/fleet/pull-messages"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink and three SuperNodes."""
    with deployment(tmp_path_factory.mktemp("three") / "flower") as made:
        for number in range(3):
            made.supernode(number, 3)
        yield made


@pytest.mark.parametrize(
    ("host", "control"),
    [
        ("127.0.0.1", True), ("127.0.0.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False), ("fd00::2", False), ("fe80::1%eth0", False), ("::ffff:10.0.0.7", False),
        ("", False), ("localhost", False), ("0.0.0.0", False),
    ],
)  # fmt: skip
def test_control_is_for_loopback_addresses(host: str, control: bool) -> None:
    for path in (CONTROL, "/v1/runtime/acquire-task", "/docs", "", "/v1/fleet", "//v1/fleet/x", "/v1/Fleet/x"):
        assert allowed(host, path) == control, path
    known = host not in ("", "localhost")
    assert allowed(host, FLEET) == known, "without an address nothing is allowed"


@pytest.mark.parametrize(("kind", "said"), [("http", [403, None]), ("websocket", []), ("lifespan", ["passed"])])
def test_guard_answers_what_it_does_not_pass_on(kind: str, said: list[Any]) -> None:
    import asyncio

    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append("passed")

    async def send(message: Any) -> None:
        seen.append(message.get("status"))

    async def receive() -> Any:
        return {}

    asyncio.run(guard(app)({"type": kind, "client": ("10.0.0.7", 4), "path": CONTROL}, receive, send))
    assert seen == said


def own_address() -> str:
    """An address of this machine that is not loopback; requests to it come from it too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


@pytest.mark.slow
def test_only_its_own_machine_controls_the_superlink(three: Deployment) -> None:
    """Over TLS: from another address one can neither register keys nor submit code; only SuperNodes are served."""

    def status(host: str, path: str) -> int:
        return httpx.post(f"https://{host}:{three.port}{path}", verify=False, trust_env=False, content=b"").status_code

    assert status("127.0.0.1", "/v1/control/list-runs") not in (401, 403)
    if not (there := own_address()) or there.startswith("127."):
        pytest.skip("this machine has no other address")
    control = ("start-run", "stop-run", "register-node", "unregister-node", "list-runs", "list-nodes", "stream-logs")
    for path in (*(f"/v1/control/{name}" for name in control), "/v1/runtime/acquire-task", "/docs", "/openapi.json"):
        assert status(there, path) == 403, path
    assert httpx.get(f"https://{there}:{three.port}/openapi.json", verify=False, trust_env=False).status_code == 403
    assert status(there, "/v1/fleet/pull-messages") == status("127.0.0.1", "/v1/fleet/pull-messages") != 403


@pytest.mark.slow
def test_database_is_for_its_user_only(three: Deployment) -> None:
    """Although the SuperLink was started with umask 022."""
    found = list(three.folder.glob("link.db*"))
    assert found
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.slow
def test_restarted_node_keeps_its_id_and_must_keep_its_client(three: Deployment, tmp_path: Path) -> None:
    """A key keeps its node id through restarts, so a client id and sample counts are bound to the key."""
    before = {
        node["node-id"] for node in json.loads(three.flwr("supernode", "list", "here", "--format", "json"))["nodes"]
    }
    run = three.run(settings="warmup_epochs=1", train__rounds=2, flower__clients=3, folder=str(tmp_path / "run"))
    assert three.wait(run, 240) == "finished:completed"
    point = json.loads(max((tmp_path / "run" / "checkpoints").glob("*.json")).read_text())
    bound = {entry["client"]["id"]: entry for entry in point["clients"]["bound"]}
    assert {str(entry["node"]) for entry in bound.values()} <= {str(node) for node in before}
    three.kill("node2")
    three.log_from_here("node2")
    three.supernode(2, 4)  # the same key, a smaller share of the data
    wait_for(lambda: "SuperNode ID" in three.log("node2"), 150, "the SuperNode")
    run = three.run(settings="warmup_epochs=1", train__rounds=3, flower__clients=3, flower__wait=20.0, resume=True,
                    folder=str(tmp_path / "run"))  # fmt: skip
    assert three.wait(run, 240) == "finished:completed"
    assert [record.cohort for record in Results.read(tmp_path / "run").rounds][-2:] == [(0, 1, 2), (0, 1)]
