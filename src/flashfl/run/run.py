"""A run as its user sees it: the model, the records of its rounds, and where they are kept."""

from __future__ import annotations

import hashlib
import math
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ..core.exchange import Spent, Traffic
from ..core.files import make_folder
from ..core.mask import Weights
from ..core.method import Method
from ..core.record import RoundRecord
from ..core.state import State
from ..data.task import Task
from .config import TrainConfig
from .progress import amount, duration, epsilons
from .results import RESULTS, Results
from .summary import Metric, work_seconds

if TYPE_CHECKING:
    from .export import Format


class Run:
    """A finished or stopped run: its model and the records of its rounds."""

    def __init__(self, method: Method, task: Task, train: TrainConfig, folder: Path | None = None) -> None:
        self.method, self.task, self.train, self.folder = method, task, train, folder
        self.results = Results(folder / RESULTS if folder else None)
        self.shown = Metric(task.metric_name, task.higher_is_better)
        self.state: State | None = None
        self.traffic = Traffic()
        self.rounds = 0  # finished rounds of all phases
        self.stopped: str | None = None  # why the run ended early
        self.kept = True  # whether its last state was written to the folder

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {value}" for name, value in self._summary().items())
        return f"Run({rows})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in self._summary().items())
        return f"<table>{rows}</table>"

    def _summary(self) -> dict[str, str]:
        """What a person wants to see of a run, as text."""
        state = self.state
        found = {"method": self.method.name or type(self.method).__name__, "task": self.task.name}
        if state is not None:
            found |= {"rounds": f"{state.counted}/{state.plan.rounds}", "density": f"{self.weights.mask.density:.4f}"}
            found |= {self.shown.name: self._label(self.metric), "best": self._label(self.best)}
            found |= {} if self.personal is None else {"personal": self._label(self.personal)}
        found |= {"up": amount(self.bytes_up), "down": amount(self.bytes_down), "time": duration(self.seconds)}
        if (spent := self.privacy) is not None:
            found["epsilon"] = epsilons(spent, self.train.secure)
        return found | ({"stopped": self.stopped} if self.stopped else {})

    @property
    def weights(self) -> Weights:
        """The final weights and their mask."""
        assert self.state is not None
        return self.method.view(self.state)

    @property
    def metric(self) -> float:
        """The task's metric after the last evaluated round."""
        return self._scores()[-1] if self._scores() else float("nan")

    @property
    def accuracy(self) -> float:
        """`metric`, if the task's metric is accuracy."""
        if self.shown.name != "accuracy":
            raise AttributeError(f"this task's metric is {self.shown.name}: use run.metric")
        return self.metric

    @property
    def best(self) -> float:
        """The best metric of any evaluated round: the highest, or the lowest if lower values are better."""
        best = max if self.shown.higher_is_better else min
        return best(self._scores(), default=float("nan"))

    @property
    def personal(self) -> float | None:
        """After the last round, the mean metric of the clients' own models; None if the method makes none.

        Test samples of a class count with the client's share of that class.
        """
        found = self.history[-1].metrics.get("personal") if self.history else None
        return None if found is None else found.metric

    @property
    def scored(self) -> str:
        """The last and the best metric as text, such as "accuracy 97.22 % (best 97.50 %)", and the personal one."""
        own = "" if self.personal is None else f", personal {self._label(self.personal)}"
        return f"{self.shown.name} {self._label(self.metric)} (best {self._label(self.best)}){own}"

    def _label(self, value: float) -> str:
        return self.shown.label(value) if self._scores() else "not evaluated"

    def _scores(self) -> list[float]:
        return [record.score.metric for record in self.history if record.score is not None]

    @property
    def seconds(self) -> float:
        """Time spent on finished rounds."""
        return sum(work_seconds(self.history).values())

    @property
    def bytes_up(self) -> int:
        """Bytes of all updates that clients sent, first phase included."""
        return self.traffic.up

    @property
    def bytes_down(self) -> int:
        """Bytes of all orders that the server sent, first phase included."""
        return self.traffic.down

    @property
    def bytes_evaluation(self) -> int:
        """Bytes sent to clients for evaluation only."""
        return sum(record.evaluation_bytes for record in self.history)

    @property
    def bytes_left(self) -> float:
        """Bytes left until `max_bytes`; infinite without this limit."""
        return self.train.max_bytes - self.traffic.total if self.train.max_bytes else math.inf

    @property
    def over_budget(self) -> bool:
        """Whether the run must end: no bytes are left, or its privacy budget is spent."""
        return bool(self.why_over) or self.bytes_left <= 0

    @property
    def privacy(self) -> Spent | None:
        """The privacy spent; None without differential privacy."""
        found = self.history[-1].privacy if self.history else None
        return found if found is not None and found.delta else None

    @property
    def spent(self) -> str:
        """The privacy spent, as text; empty without differential privacy."""
        return f"epsilon {epsilons(found, self.train.secure)}, " if (found := self.privacy) is not None else ""

    @property
    def why_over(self) -> str:
        """A sentence if the privacy budget is spent, else an empty text."""
        spent = self.privacy
        return f"spent its privacy budget of epsilon {self.train.dp_epsilon:g}" if spent and spent.over else ""

    @property
    def history(self) -> list[RoundRecord]:
        """One record per round, as in the results file."""
        return self.results.rounds

    def model(self, view: str = "") -> nn.Module:
        """Your module with the final weights. `view` chooses another model, such as "density 0.1"."""
        assert self.state is not None
        module = self.task.build()
        self.task.layout.write(self.method.view(self.state, view).vector.cpu(), module)
        return module.eval()

    @property
    def checksum(self) -> str:
        """A digest of the final weights and mask. Equal for two runs only if they are bit-identical."""
        digest = hashlib.blake2b(self.weights.mask.packed.tobytes(), digest_size=8)
        digest.update(self.weights.vector.cpu().numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: str | Path) -> Path:
        """Write the results and the final model into a folder."""
        target = Path(folder)
        make_folder(target)
        Results(target / RESULTS, self.results.header, self.results.rounds, self.results.end).rewrite()
        return self.export(target / "model.safetensors")

    def export(self, path: str | Path, format: Format = "safetensors", view: str = "") -> Path:
        """Write the final model to a file. `view` chooses another model.

        format: "safetensors" for `load_state_dict` of the same module, with masks in a second file. "sparse" holds
        active weights only, for `flashfl.native.load_sparse`. "onnx" needs the extra `onnx`.
        """
        from .export import export_model

        assert self.state is not None
        weights = self.method.view(self.state, view)
        return export_model(weights, self.task, Path(path), format, {"method": self.method.name})
