"""A whole Flower app from a configuration: the same tables as `flashfl run`, on real machines.

The app in apps/flower consists of `server_main` and `task_of`.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import Context, UserConfigValue
from flwr.common.config import unflatten_dict
from flwr.serverapp import Grid

from ..core.errors import ConfigError, unknown
from ..core.parts import build
from ..core.rng import fold
from ..data.task import Task
from ..data.tasks import TaskConfig, build_task
from ..run.config import RunConfig, load_toml, make_config
from .attendance import FlowerOptions

_KNOWN = ("config", "settings", "folder", "resume", "task", "train", "method", "flower")


@dataclass(frozen=True)
class AppConfig:
    """What a run of the app must do."""

    run: RunConfig
    options: FlowerOptions
    folder: Path
    resume: bool


def read_config(flat: Mapping[str, UserConfigValue]) -> AppConfig:
    """The settings of a run from a Flower run config, which has its tables flattened to `table.name`.

    `config` names a TOML file that replaces the app's own tables, on the server and on every node. `settings` adds to
    either, as on the command line: "method=jmwst density=0.05 rounds=100".
    """
    tables = unflatten_dict(dict(flat))
    for name in tables:
        if name not in _KNOWN:
            raise unknown("setting of the app", name, _KNOWN)
    options = build(FlowerOptions, tables.get("flower", {}), "flower")
    own = {name: table for name, table in tables.items() if name in ("task", "train", "method")}
    data = load_toml(Path(str(flat["config"]))) if flat.get("config") else own
    if isinstance(table := data.get("train", {}), Mapping):  # a server may be killed, and clients may lie
        data = {**data, "train": {"checkpoint_every": 1, "robust": "on", **table}}
    settings = _settings(str(flat.get("settings", "")))
    name = settings.get("method", data.get("method", {}).get("name", "spdst"))
    run = make_config(data, {**settings, "method": name})
    place = f"runs/flower-{run.task.dataset.replace(':', '-')}-{run.method.name}-seed{run.train.seed}"
    return AppConfig(run, options, Path(str(flat.get("folder") or place)), bool(flat.get("resume", False)))


def _settings(text: str) -> dict[str, str]:
    """`name=value` words as the command line's settings."""
    out = {}
    for word in shlex.split(text):
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            raise ConfigError(f"settings: {word!r} must have the form name=value")
        out[name.replace("-", "_")] = value
    return out


def server_main(grid: Grid, context: Context) -> None:
    """Train as the run config says. Results and checkpoints go to its folder."""
    from .strategy import FlashStrategy

    config = read_config(context.run_config)
    if (config.folder / "results.jsonl").exists() and not config.resume:
        raise ConfigError(
            f"{config.folder} already holds a run: continue it with --run-config 'resume=true', "
            "or choose another folder with --run-config 'folder=\"...\"'"
        )
    task = _task(config.run.task, config.run.train.seed, context.run_id)
    strategy = FlashStrategy(
        config.run.method, task, config.run.train, config.options,
        folder=config.folder, resume=config.resume, header=config.run.to_json(),
    )  # fmt: skip
    strategy.start(grid)
    assert strategy.run is not None
    run = strategy.run
    print(
        f"{config.run.method.name}: {run.scored}, "
        f"density {run.weights.mask.density:.4f}, checksum {run.checksum}; results in {config.folder.resolve()}"
    )


def task_of(context: Context) -> Task:
    """The configured task on a node, whose `num-partitions` says among how many clients the data is split."""
    config, node = read_config(context.run_config).run, context.node_config
    clients, root = node.get("num-partitions", config.task.clients), node.get("data-root", config.task.data_root)
    return _task(replace(config.task, clients=int(clients), data_root=str(root)), config.train.seed, context.run_id)


@functools.lru_cache(1)
def _task(config: TaskConfig, seed: int, run_id: int) -> Task:
    """Shared by all nodes that a process plays; another run reads its data again."""
    return build_task(config, fold(seed, "task"))
