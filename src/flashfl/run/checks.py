"""What is checked before a run starts: that its method is complete, fits the model, and is private if it must be."""

from __future__ import annotations

from ..core.errors import ConfigError, warn
from ..core.method import Method
from ..core.parts import check_dataclass, check_fields
from ..data.task import Task
from .config import TrainConfig, plan_of


def check_method(method: object) -> None:
    if not isinstance(method, Method):
        raise ConfigError(f"method = {method!r}: expected a method with its settings, such as fl.SPDST(density=0.05)")
    kind = type(method)
    check_dataclass(method)
    for name in ("init", "aggregate"):
        if getattr(kind, name) is getattr(Method, name):
            raise ConfigError(f"{kind.__name__} has no {name}: every method needs init(plan) and aggregate(s, sums)")
    check_fields(method)


def check_sparse(method: Method, task: Task) -> None:
    """Refuse a sparse method for a model without prunable weights.

    Warn if the model's weights are mostly dense, unless it is meant so.
    """
    if not hasattr(method, "density"):
        return
    layout = task.layout
    if not layout.prunable:
        trained = ", ".join(layer.name for layer in layout.of_kind("dense"))
        raise ConfigError(
            f"{method.name} is a sparse method, but the model has no prunable weights. Its trained parameters are: "
            f"{trained or 'none'}. Name some of them in the task's `prunable`, or use the method 'dense'."
        )
    if 2 * layout.prunable_size >= layout.size or method.density == 1 or task.own_rule:
        return
    largest = sorted(layout.of_kind("dense"), key=lambda layer: -layer.size)[:3]
    warn(
        f"only {layout.prunable_size / layout.size:.0%} of the model's values are prunable, so little is saved. The "
        f"largest others are {', '.join(f'{x.name} ({x.size})' for x in largest)}. To prune them too, set `prunable` "
        "of the task."
    )


def check_private(method: Method, task: Task, config: TrainConfig) -> None:
    """Refuse a private run whose clients' masks would differ, or whose clients would have to evaluate the model."""
    if not config.private:
        return
    if not method.common:
        raise ConfigError(
            "private runs (`secure` or `dp_*`) need one mask for all clients, but clients of "
            f"{method.name or type(method).__name__} have different masks. If only one client had a weight, the sum "
            "would show its value. Use dense, pdst or spdst, or switch `secure` and `dp_*` off. If all clients of a "
            "custom method have the same frozen mask, set `common = True` in its class."
        )
    if task.test is None:
        raise ConfigError(
            "private runs need test samples on the server, because evaluations by clients reveal something about their "
            "data. Give the task `test`, or set secure = false, dp_epsilon = 0 and dp_noise = 0."
        )
    if (config.dp_epsilon or config.dp_noise) and any(not phase.counts for phase in method.phases):
        # A first phase that asks clients for layer counts is refused.
        start = method.init(plan_of(config, task, max(config.per_round, len(task.train)), method=method))
        if any(method.work(start, client).report == "counts" for client in task.clients[:1]):
            raise ConfigError(
                f"{method.name}: under differential privacy, clients cannot measure how dense each layer should be, "
                "because noise cannot hide their layer counts. Set warmup_clients = 0, or use pdst with allocation = "
                "'erk'."
            )
