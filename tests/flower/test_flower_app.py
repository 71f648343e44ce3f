"""The configured app, the worker process and the SuperNode."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from flower_support import federation, train
from flwr.app import Context, Message, RecordDict
from flwr.common.config import flatten_dict

import flashfl as fl
from flashfl.core.errors import ConfigError
from flashfl.engine.client import Reply
from flashfl.engine.encoding import Encoding
from flashfl.engine.memory import ClientMemory
from flashfl.engine.store import MaskStore
from flashfl.flower import FlashStrategy, records, worker
from flashfl.flower.app import read_config, server_main, task_of
from flashfl.flower.host import find
from flashfl.flower.supernode import instead
from flashfl.flower.testing import InProcessGrid
from flashfl.methods import NST
from flashfl.run.budget import within_budget
from flashfl.run.config import TrainConfig, plan_of
from tests.conftest import make_task
from tests.test_every_method import small

APP = Path(__file__).parent.parent.parent / "apps" / "flower"


def app_config(**changes: Any) -> dict[str, Any]:
    """The app's own run config, as Flower gives it."""
    flat = flatten_dict(tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
    assert set(changes) <= set(flat)
    return {**flat, **changes}


def test_default_settings_of_the_app_are_valid() -> None:
    config = read_config(app_config())
    assert config.run.method == fl.SPDST(density=0.05)
    assert config.run.train.checkpoint_every == 1
    assert config.folder == Path("runs/flower-digits-spdst-seed0")
    assert not config.resume


def test_changing_the_method_keeps_the_settings_it_has() -> None:
    assert read_config(app_config(**{"method.name": "dense"})).run.method == fl.Dense()
    assert read_config(app_config(settings="method=jmwst r_int=3")).run.method == fl.JMWST(density=0.05, r_int=3)


def test_config_file_replaces_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[task]\ndataset = "digits"\nclients = 7\n[train]\nrounds = 9\n[method]\nname = "nst"\n')
    config = read_config(app_config(config=str(path), settings="rounds=11"))
    assert (config.run.task.clients, config.run.train.rounds, config.run.method.name) == (7, 11, "nst")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"settings": "rounds"}, "must have the form name=value"),
        ({"settings": "rouns=3"}, "rounds"),
        ({"train.trim": 0.5}, "below 0.5"),
        ({"flower.timeout": 0.0}, "above 0"),
        ({"config": "nowhere.toml"}, "nowhere.toml"),
    ],
)
def test_wrong_settings_raise_with_the_reason(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_config(app_config(**changes))
    with pytest.raises(ConfigError, match="unknown setting of the app"):
        read_config({"colour": "blue"})


def context_of(number: int, **run: Any) -> Context:
    config = {"partition-id": number, "num-partitions": 3}
    return Context(1, 1, config, RecordDict(), app_config(**run))


def test_nodes_of_one_process_share_the_data() -> None:
    task = task_of(context_of(0))
    assert task is task_of(context_of(1))
    assert len(task.clients) == 3


def test_strategy_replaces_a_run_only_if_asked(tmp_path: Path) -> None:
    task, config = make_task("norm"), TrainConfig(rounds=1, per_round=2, batch=8)
    made = {"folder": tmp_path, "quiet": True}
    FlashStrategy(small("pdst"), task, config, **made).start(federation(task))
    with pytest.raises(ConfigError, match="already holds a run: continue it with resume=True, replace it"):
        FlashStrategy(small("pdst"), task, config, **made).start(federation(task))
    FlashStrategy(small("pdst"), task, config, overwrite=True, **made).start(federation(task))


def test_budget_fits_the_rounds_that_start_names(tmp_path: Path) -> None:
    """So a run that is extended keeps its density."""
    method = fl.SPDST(warmup_clients=2)
    task, config, found = make_task("norm"), TrainConfig(rounds=50, per_round=2, batch=8, budget=1000), []
    for rounds in (1, 3):
        strategy = FlashStrategy(method, task, config, folder=tmp_path, quiet=True, resume=rounds > 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strategy.start(federation(task), num_rounds=rounds)
        assert isinstance(strategy.method, fl.SPDST)
        found.append(strategy.method.density)
    assert found[0] == found[1] < within_budget(method, task, config)[0].density  # type: ignore[attr-defined]


def test_configured_server_trains_and_does_not_overwrite(tmp_path: Path) -> None:
    from flashfl.flower import client_app
    from flashfl.run.export import export_run

    run = {"folder": str(tmp_path / "run"), "train.rounds": 1, "settings": "warmup_clients=0 max_steps=2"}
    grid = InProcessGrid({}, run_config=app_config(**run))
    for number in range(3):
        grid.join(50 + number, client_app(task_of), {"partition-id": number, "num-partitions": 3})
    server_main(grid, context_of(0, **run))
    assert (tmp_path / "run" / "results.jsonl").exists()
    assert export_run(tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="already holds a run"):
        server_main(grid, context_of(0, **run))


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process for a worker to depend on, and a folder of its own for the socket."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "gettempdir", lambda: folder)
        monkeypatch.setattr(os, "getppid", lambda: process.pid)
        yield process
        process.kill()
        process.wait()
        while worker._started:
            worker._started.pop().wait(20)
        end = time.monotonic() + 10
        while list(Path(folder).glob("*/*.sock")) and time.monotonic() < end:
            time.sleep(0.1)
        assert not list(Path(folder).glob("*/*.sock")), "a worker ends with the process it depends on"


def asking(kind: str, content: RecordDict | None = None) -> Message:
    return Message(content or RecordDict(), 1, kind)


@pytest.mark.parametrize("kind", ["file", "link", "open"])
def test_worker_is_not_used_where_others_could_enter_its_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = tmp_path / f"flashfl-{os.getuid()}"
    if kind == "file":
        place.touch()
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o755)
    assert worker._folder() is None


def test_worker_gives_the_same_answers_as_the_host(parent: subprocess.Popen[bytes]) -> None:
    InProcessGrid({})  # gives this process the identity that messages need
    here, there, name = context_of(1), context_of(1), "flashfl.flower.app:task_of"
    task = task_of(here)
    host = find(task_of, here)
    assert worker.ask(name, asking("query"), there) == host.serve(asking("query"), here)
    server = Encoding(ClientMemory(MaskStore(task.layout, {})))
    method = NST(density=0.1)
    state = method.init(plan_of(TrainConfig(per_round=1), task, len(task.clients)))
    client = task.clients[1]
    [(_, order)] = method.orders(state, [client])
    train = asking("train", records.blob("order", server.encode(server.message(client, order)).data))
    for _ in range(2):  # the second time, the client remembers the first
        answer = worker.ask(name, train, there)
        assert answer is not None
        assert "update" in answer
        assert answer == host.serve(train, here)
        assert there.state == here.state
        assert "flashfl.masks" in there.state
    lost = worker.ask(name, asking("query"), context_of(9))
    assert lost is not None
    assert "partition-id = 9" in str(records.failure(lost))
    wrong = Context(1, 1, {"partition-id": 1}, RecordDict(), {"colour": "blue"})
    with pytest.raises(RuntimeError, match=r"the worker process of this node failed: .*colour"):
        worker.ask(name, asking("query"), wrong)


def test_worker_refuses_a_socket_folder_others_can_enter(
    parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.gettempdir()) / f"flashfl-{os.getuid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    assert worker.ask("flashfl.flower.app:task_of", asking("query"), context_of(1)) is None


def test_supernode_only_shortens_sleeps() -> None:
    clock = instead(time, sleep=lambda seconds: time.sleep(min(seconds, 0.01)))
    began = time.monotonic()
    clock.sleep(3)
    assert time.monotonic() - began < 2.9
    assert clock.monotonic is time.monotonic


def test_modules_that_the_supernode_patches_exist() -> None:
    """The names in Flower's modules that our SuperNode replaces."""
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.supernode import start_client_internal
    from flwr.supernode.fleet_http_client import FleetHttpClient

    assert start_client_internal.time is time
    assert start_client_internal.subprocess is subprocess
    assert subprocess_executor.subprocess is subprocess
    assert callable(FleetHttpClient.ActivateNode)


def test_importing_a_client_app_does_not_import_torch() -> None:
    code = (
        "import sys; from flashfl.flower import client_app; import flashfl.flower.worker; "
        "client_app('flashfl.flower.app:task_of'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lost_mask_does_not_end_the_steps_of_a_private_round() -> None:
    """These steps hand on what the client remembers as it is."""
    context = context_of(1)
    remembered = [((2, 0, 0), "0" * 16, None, None)]
    host = find(task_of, context)
    said = host.train(context, b"", lambda *_: Reply(b"share", remembered), "answer")  # type: ignore[arg-type]
    assert records.read_blob(said, "answer") == ("answer", b"share")


def test_client_with_damaged_memory_is_sent_what_it_held() -> None:
    """Somebody has changed the context's state."""
    task = make_task("norm")
    whole = train(small("nst"), task, federation(task))
    grid = federation(task)

    def damage(state: Any, line: Any) -> None:
        for context in grid.contexts.values():
            if "flashfl.rounds" in context.state:
                context.state["flashfl.rounds"]["rounds"] = "[[1, 2"

    assert train(small("nst"), task, grid, watch=damage).checksum == whole.checksum
