"""One configuration for the command line, a TOML file, a checkpoint and a record of what was run."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from ..core.errors import ConfigError, check_range, unknown
from ..core.exchange import Local
from ..core.method import Method
from ..core.parts import build
from ..core.precision import Form, Precision, Rest, Rounding
from ..core.rng import fold
from ..core.state import Plan, ServerStep
from ..data.task import Task
from ..data.tasks import TaskConfig
from ..measure.flops import weight_flops
from ..methods import METHODS
from ..privacy.policy import Policy
from ..privacy.settings import check_settings
from ..privacy.vector import Ranges
from ..wire import Feedback
from .options import flag_of, parse, walk
from .track import check_names

# Settings that say where and how a run is carried out, and not what it is.
OUTSIDE = ("device", "workers", "checkpoint_every", "track", "data_root", "verify")
_ALLOWED = {  # the interval that settings lie in
    "[1, inf)": ("rounds", "per_round", "eval_every", "min_replies"),
    "[0, inf)": ("budget", "max_bytes", "checkpoint_every", "retries", "clip"),
    "[1, 1024]": ("threads",),  # more than any machine can use
    "[0, 1024]": ("workers", "lanes"),
    "[0, 1)": ("dropout", "average"),
    "[0, 0.5)": ("trim",),  # or no values would be left
}
_TABLES = ("task", "train", "method")

Settings = dict[str, Any]  # by name, as plain values: numbers, texts, lists, and tables of a part's settings
Tables = dict[str, Settings]  # by table


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run: its length, the training of clients, and how it is computed."""

    rounds: int = 60  # training rounds, not counting a first phase
    per_round: int = 5  # clients that train in a round
    epochs: int = 1  # passes of a client over its samples in a round
    batch: int = 16  # samples in a step
    lr: float = 0.1  # learning rate of SGD in the first round
    lr_end: float = 0.001  # the learning rate decays exponentially from lr to this
    momentum: float = 0.0  # momentum of SGD
    weight_decay: float = 0.0  # weight decay of SGD
    prox: float = 0.0  # FedProx: how strongly clients are pulled towards the server's model
    lr_last: float = 1.0  # in each round, the learning rate falls linearly to this share of its first value
    max_steps: int = 0  # at most this many batches an epoch; 0: all
    server: ServerStep = field(default_factory=ServerStep)  # the server's step (FedAvgM, FedAdam)
    static_bn: bool = False  # gather BatchNorm statistics only once, at the end
    seed: int = 0  # random seed of the run
    eval_every: int = 5  # rounds between evaluations
    dropout: float = 0.0  # simulated failures: the share of clients that fail in each round
    min_replies: int = 1  # repeat a round that has fewer valid replies than this
    retries: int = 2  # how often a round may be repeated
    budget: int = 0  # bytes that a client may send in a round, and receive, such as 2.3MB; 0: no limit
    max_bytes: int = 0  # end the run after this many bytes, up and down together; 0: no limit
    average: float = 0.0  # report a running average of the server's model, such as 0.98; 0: none
    values: Form = "fp32"  # number format of weights in messages
    values_up: Literal["", Form] = ""  # number format in uploads; empty: as `values`
    values_down: Literal["", Form] = ""  # number format in downloads; empty: as `values`
    rest: Rest = "fp32"  # number format of BatchNorm statistics; with int8 and int4 also of biases and other vectors
    rounding: Rounding = "unbiased"  # unbiased: round values up or down at random; nearest: to the nearest
    feedback: bool = False  # with `rounding` nearest: clients add the rounding error of an update to their next one
    upload: Literal["weights", "changes"] = "weights"  # clients send their weights, or the changes of the weights
    robust: Literal["auto", "on", "off"] = "auto"  # limit the influence of each client; auto: on Flower only
    clip: float = 0.0  # shorten changes to this many times the median; 0: no limit, with `robust` 2
    trim: float = 0.0  # for each weight, leave out this share of the lowest and of the highest values; 0: none
    secure: bool = False  # secure aggregation: the server learns only sums of updates (docs/privacy.md)
    dp_epsilon: float = 0.0  # differential privacy: the run ends when this epsilon is spent; 0: no limit
    dp_delta: float = 1e-5  # delta of (epsilon, delta) differential privacy
    dp_clip: float = 1.0  # differential privacy: shorten each client's change to this length
    dp_sampling: Literal["fixed", "poisson"] = "fixed"  # fixed: per_round clients; poisson: per_round on average
    dp_noise: float = 0.0  # noise on the sum, as a multiple of dp_clip; 0: as much as dp_epsilon needs
    ranges: Ranges = field(default_factory=Ranges)  # private rounds: the largest values that clients report
    policy: Policy = field(default_factory=Policy)  # secure aggregation: what clients insist on
    device: str = "auto"  # cpu or cuda; auto: cuda if there is one
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"  # number format on a GPU; auto: bf16. A CPU uses fp32
    lanes: int = 0  # clients that train at once on a GPU; 0: flashfl chooses, up to 16
    crew: Literal["auto", "lanes", "batched"] = "auto"  # on a GPU: one client at a time in each lane, or all at once
    compile: bool = False  # on a GPU: use torch.compile for lanes; compiling takes a minute
    deterministic: bool = False  # on a GPU: bit-identical results in every run, a little slower
    workers: int = 0  # processes that train clients; 0: one per core
    threads: int = 1  # threads of each process; another number may change the last bits of results
    sparse_compute: bool = True  # on a CPU: compute only active weights, if that is faster
    checkpoint_every: int = 25  # rounds between checkpoints, or 20 s; 0: only at the end and when interrupted
    track: str = ""  # also log to tensorboard, mlflow or wandb; several are separated by commas

    def __post_init__(self) -> None:
        for allowed, names in _ALLOWED.items():
            check_range(allowed, **{name: getattr(self, name) for name in names})
        check_settings(self)
        coding = ("values", "values_up", "values_down", "rest", "upload", "clip", "trim")
        wrong = [name for name in coding if self.private and getattr(self, name) != getattr(TrainConfig, name)]
        if wrong:
            given, usual = (", ".join(f"{n} = {getattr(of, n)!r}" for n in wrong) for of in (self, TrainConfig))
            other = ". To limit changes, set dp_clip" if "clip" in wrong else ""
            raise ConfigError(
                f"{given}: not possible with `secure` or `dp_*`, which encode updates in their own way. "
                f"Use {usual}{other}"
            )
        if self.feedback and (self.up.rounding != "nearest" or self.up.values == "fp32"):
            raise ConfigError(
                f"feedback = true with values_up = {self.up.values!r} and rounding = {self.rounding!r}: feedback needs "
                "rounding = 'nearest' and values_up with fewer bits than fp32, such as 'int4'. Set both, or set "
                "feedback = false."
            )
        check_names(self.track)
        self.local()

    @property
    def private(self) -> bool:
        """Whether clients' reports are protected: by secure aggregation, differential privacy, or both."""
        return self.secure or self.dp_epsilon > 0 or self.dp_noise > 0

    def local(self) -> Local:
        """The clients' training recipe."""
        names = ("epochs", "batch", "lr", "momentum", "weight_decay", "prox", "lr_last", "max_steps")
        plain = self.up == self.down == Precision(self.values)  # then updates travel as orders do
        upload = None if plain else self.up
        parts = (Feedback(self.up),) if self.feedback else ()
        named = {name: getattr(self, name) for name in names}
        return Local(statistics=not self.static_bn, upload=upload, parts=parts, **named)

    @property
    def down(self) -> Precision:
        """How the values of orders travel."""
        return Precision(self.values_down or self.values, self.rest, self.rounding)

    @property
    def up(self) -> Precision:
        """How the values of updates travel."""
        return Precision(self.values_up or self.values, self.rest, self.rounding, self.upload == "changes")


def plan_of(
    train: TrainConfig, task: Task, clients: int, device: torch.device | str = "cpu", method: Method | None = None
) -> Plan:
    """The plan these settings make for a task's model and so many clients."""
    key = fold(train.seed, "run")
    return Plan(
        task.layout, task.draw, key, train.rounds, clients, train.per_round, train.local(), train.lr_end, device,
        weight_flops(task) if method is not None and method.counts_flops else (), train.server, train.average,
        train.dp_sampling == "poisson",
    )  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run."""

    task: TaskConfig = field(default_factory=TaskConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    method: Method = field(default_factory=lambda: METHODS["spdst"]())

    def to_json(self) -> Tables:
        """Every setting by table, defaults included: a record should not change when a default does."""
        method = {"name": self.method.name, **asdict(self.method)}
        tables: Tables = json.loads(json.dumps({**asdict(self), "method": method}))
        return tables


def make_train(values: Mapping[str, object]) -> TrainConfig:
    """Training settings from their values."""
    if "optimizer" in values:
        raise ConfigError(
            f"optimizer = {values['optimizer']!r}: there is no such setting. Clients train with SGD: set `lr`, "
            "`momentum` and `weight_decay`. The server can use Adam (FedAdam): from Python server={'adam': 0.99, "
            "'momentum': 0.9, 'lr': 0.01}, on the command line --server.adam 0.99 --server.momentum 0.9 --server.lr "
            "0.01."
        )
    return build(TrainConfig, values, "train")


def known_method(name: object) -> type[Method]:
    """The registered method of this name."""
    if not isinstance(name, str) or name not in METHODS:
        raise ConfigError(f"{unknown('method', str(name), METHODS)} (register a custom one with --load FILE.py)")
    if METHODS[name].name != name:  # by which records and checkpoints know it
        raise ConfigError(
            f"the method registered as {name!r} has the name {METHODS[name].name!r}: both must be equal. Write name: "
            f"ClassVar[str] = '{name}' in its class."
        )
    return METHODS[name]


def load_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def make_config(data: Mapping[str, object], overrides: Mapping[str, str] = MappingProxyType({})) -> RunConfig:
    """A configuration from a file's or a record's tables and the command line's `name -> text`, which wins."""
    tables: Tables = {table: {} for table in _TABLES}
    for table, given in data.items():
        if table not in tables:
            raise unknown("table", table, _TABLES)
        if not isinstance(given, Mapping):
            raise ConfigError(f"{table} = {given!r}: expected a table [{table}] of settings")
        tables[table] = copy.deepcopy(dict(given))
    if "method" in overrides:
        _switch_method(tables, overrides["method"])
    kind = known_method(tables["method"].pop("name", "spdst"))
    tables["train"] = {**kind.recipe, **tables["train"]}
    homes = _homes(kind)
    for option, text in overrides.items():
        if option == "method":
            continue
        if option not in homes:
            raise _unknown_option(option, kind, homes)
        path, hint = homes[option]
        _put(tables, path, parse(text, hint, option))
    return RunConfig(
        build(TaskConfig, tables["task"], "task"),
        make_train(tables["train"]),
        build(kind, tables["method"], kind.name),
    )


def _unknown_option(option: str, kind: type[Method], homes: Mapping[str, Home]) -> ConfigError:
    method, flag = kind.name, flag_of(option)
    if inner := _inside(option, homes):
        path, _ = homes[inner[0]]
        listing = f"methods {method}" if path[0] == "method" else "settings"
        return ConfigError(
            f"{flag} is a group of settings, such as {flag_of(inner[0])}. `flashfl {listing}` explains them."
        )
    if option == "density" and "densities" in homes:
        return ConfigError(f"{method} takes --densities instead of {flag}, such as --densities 0.1,0.15,0.2")
    if option in vars(kind).get("__annotations__", {}):
        return ConfigError(
            f"unknown option {option!r}: `flashfl methods {method}` lists the settings of {method}. If the method is "
            "your own, put @dataclass(frozen=True) above its class: its settings are not found without it."
        )
    if having := [name for name, cls in METHODS.items() if _inside(option, _homes(cls))]:
        return ConfigError(f"unknown option {option!r}: {method} has no such setting; {', '.join(having)} have it")
    return unknown("option", option, [*homes, "method"])


def _inside(option: str, homes: Mapping[str, Home]) -> list[str]:
    """The option itself, or the options of the group of this name."""
    return [name for name in homes if name == option or name.startswith(f"{option}.")]


def _switch_method(tables: Tables, name: str) -> None:
    """Another method keeps what the file said of the settings it knows too, save those it works out itself."""
    known = {f.name for f in fields(known_method(name)) if not f.metadata.get("derived")}
    tables["method"] = {"name": name} | {k: v for k, v in tables["method"].items() if k in known}


Home = tuple[tuple[str, ...], object]  # a setting's path, which begins with its table, and its type


def _homes(method: type[Method]) -> dict[str, Home]:
    """Every option a user can set: `density`, or in full `method.density`; parts of parts as `adapt.growth`."""
    # There is no optimizer to choose. `make_train` says so, and what to set instead.
    homes: dict[str, Home] = dict.fromkeys(("optimizer", "train.optimizer"), (("train", "optimizer"), str))
    for table, cls in (("method", method), ("train", TrainConfig), ("task", TaskConfig)):
        for path, hint, _ in walk(cls, (table,)):
            homes[".".join(path)] = homes[".".join(path[1:])] = path, hint
    return homes


def _put(table: Settings, path: Sequence[str], value: object) -> None:
    for name in path[:-1]:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{name} = {inner!r}: expected a table of settings")
        table = inner
    table[path[-1]] = value
