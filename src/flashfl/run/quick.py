"""`--quick` shrinks any experiment to a smoke test of about a minute; `--central` gives all data to one client."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.errors import ConfigError
from .config import RunConfig, make_config

# Two steps of eight samples for each of four clients, and as many samples to evaluate: the largest models (ResNet18 on
# 64x64 pixels, BERT-base) take about a minute on two cores.
_CLIENTS, _PER_ROUND, _ROUNDS, _STEPS, _BATCH = 4, 2, 2, 2, 8
_SAMPLES = _CLIENTS * _STEPS * _BATCH


def quick(data: Mapping[str, object], overrides: Mapping[str, str]) -> RunConfig:
    """The configuration `make_config` would give, shrunk. Settings on the command line still hold."""
    return make_config(data, {**_shrunk(make_config(data, overrides), overrides), **overrides})


def _shrunk(config: RunConfig, asked: Mapping[str, str]) -> dict[str, str]:
    """The settings to change. The model, and how clients differ, stay those of the full experiment."""
    task, train, method = config.task, config.train, config.method
    at_once = train.per_round if {"per_round", "train.per_round"} & set(asked) else min(_PER_ROUND, train.per_round)
    wanted = max(_CLIENTS, at_once)
    clients = min(wanted, task.clients or wanted)  # 0 means all clients
    small = {
        "task.clients": clients,
        "task.limit": min(_SAMPLES, task.limit or _SAMPLES),
        "train.rounds": min(_ROUNDS, train.rounds),
        "train.per_round": min(at_once, clients),
        "train.epochs": 1,
        "train.batch": min(_BATCH, train.batch),
        "train.max_steps": min(_STEPS, train.max_steps or _STEPS),
        "train.eval_every": 1,
    }
    if hasattr(method, "warmup_clients") and hasattr(method, "warmup_epochs"):
        small["method.warmup_clients"] = min(_PER_ROUND, method.warmup_clients)
        small["method.warmup_epochs"] = 1
    return {name: str(value) for name, value in small.items()}


def central(overrides: Mapping[str, str]) -> dict[str, str]:
    """The settings with one client that holds all data."""
    alone = {"clients": "1", "per_round": "1", "partition": "iid"}
    if taken := sorted({name.rpartition(".")[2] for name in overrides} & alone.keys()):
        raise ConfigError(f"--central sets {', '.join(taken)} itself, as one client holds all data: remove the setting")
    return {**overrides, **alone}
