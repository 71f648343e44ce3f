"""What a run is: two with the same identity have the same method, settings, model, clients, data, loss and metric."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass

import torch

from ..core.engine import Population
from ..core.method import Method
from ..data.sources import Arrays, below
from ..data.task import Task
from ..methods import METHODS
from .config import OUTSIDE, Settings, TrainConfig

_DIGESTS = {"layout": "another model", "clients": "other clients", "samples": "other samples"}


def identity_of(
    method: Method, task: Task, config: TrainConfig, clients: Population, tables: Mapping[str, Settings]
) -> Settings:
    """What must be equal for a checkpoint to belong to a run. `tables`: its configuration, if it has one."""
    settings = {k: v for k, v in asdict(config).items() if k not in (*OUTSIDE, "max_bytes")}
    fixed = clients.fixed  # clients that come and go are not part of what a run is
    known = json.dumps([[c.id, c.n, c.density] for c in fixed or ()])
    return {
        "method": described(method),
        "settings": settings,
        "layout": task.layout.hash,
        "clients": hashlib.blake2b(known.encode(), digest_size=8).hexdigest(),
        "task": {k: v for k, v in tables.get("task", {}).items() if k not in OUTSIDE},
        "samples": samples_of(task, floats=False) if fixed is not None else "",
        "loss": getattr(task.loss, "__name__", type(task.loss).__name__),  # an object, as nn.MSELoss(), has no name
        "metric": task.metric_name if task.metric_known else "",
    }


def described(method: Method) -> Settings:
    """A method's name and all its settings as JSON data. A part is described by its class and fields."""

    def plain(value: object) -> object:
        if not is_dataclass(value) or isinstance(value, type):
            return repr(value)
        return {"is": type(value).__name__, **{f.name: getattr(value, f.name) for f in fields(value)}}

    found = json.loads(json.dumps(method, default=plain))
    kind = found.pop("is").lower()
    return {"name": method.name if METHODS.get(method.name) is type(method) else kind, **found}


def samples_of(task: Task, floats: bool) -> str:
    """A digest of the first clients' first and last samples; "" if they do not lie in memory.

    Without floats only whole numbers count (labels, pixels, words): computed floats may differ between machines.
    """
    found: list[bytes] = []
    for source in itertools.islice(task.train, 8):
        data, at = below(source, torch.tensor([0, len(source) - 1]))
        if isinstance(data, Arrays):
            held = [torch.as_tensor(x) for x in (*data.inputs, data.target)]
            whole = [x for x in held if floats or not (x.is_floating_point() or x.is_complex())]
            some = [x[at.to(x.device)].cpu() for x in whole]
            found += [x.contiguous().view(torch.uint8).numpy().tobytes() for x in some]
    return hashlib.blake2b(b"".join(found), digest_size=8).hexdigest() if found else ""


def differences(found: Mapping[str, object], wanted: Mapping[str, object], free: str = "") -> str:
    """Up to three settings of another run that are not as in this one; empty if there are none.

    free: a setting that may differ. Digests say nothing to a person, so they are named only if nothing else differs.
    """
    said, digests = [], []
    for name, theirs, ours in _different(found, wanted):
        if name in _DIGESTS and isinstance(theirs, str):
            digests.append(_DIGESTS[name])
        elif name != free:
            said.append(f"{name}: {_shown(theirs)} there, {_shown(ours)} here")
    said = said or digests
    return "; ".join(said[:3]) + (f"; and {len(said) - 3} more" if len(said) > 3 else "")


def _different(found: Mapping[str, object], wanted: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    for name in {**found, **wanted}:
        theirs, ours = found.get(name), wanted.get(name)
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            yield from _different(theirs, ours)
        elif theirs != ours:
            yield name, theirs, ours


def _shown(value: object) -> str:
    return "(empty)" if value in ("", None) else str(value)[:100]
