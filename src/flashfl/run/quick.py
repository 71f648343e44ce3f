"""`--quick`: any experiment, shrunk to a smoke run of about a minute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import RunConfig, make_config

# Two steps of eight samples for each of four clients, and as many samples to judge on as to train on: what the largest
# models (ResNet18 on 64x64 pixels, BERT-base) do in about a minute on two cores.
_CLIENTS, _PER_ROUND, _ROUNDS, _STEPS, _BATCH = 4, 2, 2, 2, 8
_SAMPLES = _CLIENTS * _STEPS * _BATCH


def quick(data: Mapping[str, Any], overrides: Mapping[str, str]) -> RunConfig:
    """The configuration `make_config` would give, shrunk. What the command line says of a setting still holds."""
    return make_config(data, {**_shrunk(make_config(data, overrides), overrides), **overrides})


def _shrunk(config: RunConfig, asked: Mapping[str, str]) -> dict[str, str]:
    """The settings to change; the model, and how clients differ, stay those of the full experiment."""
    task, train, method = config.task, config.train, config.method
    at_once = train.per_round if {"per_round", "train.per_round"} & set(asked) else min(_PER_ROUND, train.per_round)
    wanted = max(_CLIENTS, at_once)
    clients = min(wanted, task.clients or wanted)  # 0 clients are everyone there is
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
    if hasattr(method, "warmup_clients") and hasattr(method, "warmup_epochs"):  # it has a first stage
        small["method.warmup_clients"] = min(_PER_ROUND, method.warmup_clients)
        small["method.warmup_epochs"] = 1
    return {name: str(value) for name, value in small.items()}
