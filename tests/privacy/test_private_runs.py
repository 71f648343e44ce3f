"""Private runs on the engines: real messages between processes, dropouts at every step, refusals, budgets, resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="pip install 'flashfl[privacy]'")
pytest.importorskip("dp_accounting", reason="pip install 'flashfl[privacy]'")

import flashfl as fl
from flashfl.core.errors import CheckpointError, ConfigError, FlashError, RunStopped
from flashfl.core.exchange import Client, Local
from flashfl.core.method import Method
from flashfl.core.state import State
from flashfl.engine import cpu, party, private_counting
from flashfl.engine.gpu import GPUEngine
from flashfl.engine.party import PrivateSide
from flashfl.engine.private import PrivateRound
from flashfl.privacy import server
from flashfl.privacy.accounting import epsilon_known
from flashfl.privacy.messages import STEPS
from flashfl.privacy.server import Gatherer
from flashfl.privacy.vector import Packing
from flashfl.run.config import TrainConfig
from tests.conftest import make_task

SETTINGS = {"per_round": 10, "rounds": 2, "epochs": 1, "eval_every": 1, "device": "cpu", "workers": 1, "batch": 8}


@pytest.fixture(scope="module")
def task() -> fl.Task:
    """Ten small clients with BatchNorm."""
    return make_task("norm", clients=10)


@pytest.fixture(scope="module")
def digits() -> fl.Task:
    return fl.tasks.digits(clients=10)


def simulated(task: fl.Task, method: Method | None = None, **settings: object) -> fl.Run:
    method = method or fl.SPDST(density=0.3, warmup_clients=4, warmup_epochs=1)
    return fl.simulate(method, task, progress=False, watch=lambda state, record: None, **{**SETTINGS, **settings})


def plain_engine(monkeypatch: pytest.MonkeyPatch, dropped: int = 0) -> None:
    """The fixed-point sum without cryptography: every client's vector travels as it is."""
    original = PrivateRound.__init__

    def made(self: PrivateRound, vault: object, *rest: object) -> None:
        original(self, vault, *rest)  # type: ignore[arg-type]
        self.privacy = replace(self.privacy, secure=False)
        self._round = Gatherer(self.terms, 0)

    monkeypatch.setattr(PrivateRound, "__init__", made)
    answer = PrivateSide._answer

    def trusting(self: PrivateSide, *rest: object) -> object:
        self.secure = False
        return answer(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PrivateSide, "_answer", trusting)


def test_secure_model_equals_plain_fixed_point_sum_bit_for_bit(task: fl.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    secure = simulated(task, secure=True, workers=2)
    plain_engine(monkeypatch)
    plain = simulated(task, secure=True)
    assert secure.checksum == plain.checksum
    assert [r.loss for r in secure.history] == [r.loss for r in plain.history]
    assert [r.privacy for r in secure.history] == [r.privacy for r in plain.history]


def test_secure_run_is_close_to_the_usual_one(task: fl.Task) -> None:
    secure, usual = simulated(task, secure=True), simulated(task)
    assert torch.allclose(secure.weights.vector, usual.weights.vector, atol=1e-4)
    assert secure.weights.mask.equal(usual.weights.mask)  # so the first phase's layer counts are exact
    assert secure.history[-1].loss == pytest.approx(usual.history[-1].loss, rel=1e-3)


@pytest.mark.parametrize("step", range(5), ids=lambda step: STEPS[step].replace(" ", "-"))
def test_clients_killed_at_each_step_leave_the_fixed_point_sum_of_the_rest(
    task: fl.Task, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Three of ten clients stop answering; up to the masked input they do not count, after it they do."""
    killed = {2, 5, 8}
    monkeypatch.setattr(cpu, "drops", lambda s, client, share: s.phase.counts and client in killed)
    monkeypatch.setattr(cpu, "dropout_step", lambda s, client: step)
    secure = simulated(task, secure=True, dropout=0.1)
    assert {r.attempt for r in secure.history} == {0}
    assert set(secure.history[-1].failures) == (killed if step <= 2 else set())
    plain_engine(monkeypatch)
    monkeypatch.setattr(cpu, "dropout_step", lambda s, client: 2 if step <= 2 else 9)
    assert simulated(task, secure=True, dropout=0.1).checksum == secure.checksum


@pytest.mark.parametrize("step", range(1, 5), ids=lambda step: STEPS[step].replace(" ", "-"))
def test_round_with_too_few_survivors_is_repeated_and_opens_nothing(
    task: fl.Task, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    opened: list[object] = []
    original = PrivateRound._opened

    def watched(self: PrivateRound) -> object:
        found = original(self)
        opened.append(found[1])
        return found

    monkeypatch.setattr(PrivateRound, "_opened", watched)
    monkeypatch.setattr(cpu, "drops", lambda s, client, share: s.phase.counts and s.attempt == 0 and client < 4)
    monkeypatch.setattr(cpu, "dropout_step", lambda s, client: step)
    run = simulated(task, fl.PDST(density=0.3), secure=True, dropout=0.1, rounds=1)
    [record] = run.history
    assert opened == [[], list(range(10))]
    assert record.attempt == 1
    assert record.round == (0 if step < 2 else 1)  # inputs were given to round 0: clients give no other to it
    assert "TooFew" in record.missed[9]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (fl.PDST(density=0.3), r"round 1 failed 3 times: 0 of 10 clients .* min_replies = 1"),
        (fl.SPDST(density=0.3, warmup_clients=4), r"a round of the phase 'sensitivity' failed 3 times: 0 of 4 clients"),
    ],
)
def test_run_stops_if_every_attempt_has_too_few_survivors(
    task: fl.Task, monkeypatch: pytest.MonkeyPatch, method: Method, said: str
) -> None:
    """Each attempt has a number of its own, which no user counts."""
    monkeypatch.setattr(cpu, "drops", lambda s, client, share: client < 9)
    monkeypatch.setattr(cpu, "dropout_step", lambda s, client: 2)
    with pytest.raises(RunStopped, match=said):
        simulated(task, method, secure=True, dropout=0.1)


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("method", [fl.Dense(), fl.PDST(density=0.1), fl.JMWST(adapt=fl.PruneRegrow(rate=0.0))])
def test_methods_with_a_common_mask_run_privately(task: fl.Task, method: Method, secure: bool) -> None:
    more = {"secure": True} if secure else {"dp_noise": 0.5, "warmup_clients": 0}
    if more.pop("warmup_clients", None) is not None and isinstance(method, fl.JMWST):
        method = replace(method, warmup_clients=0)
    assert simulated(task, method, rounds=1, **more).history[-1].privacy is not None


@pytest.mark.parametrize("method", [fl.NST(), fl.JMWST(), fl.HeteroSPDST(), fl.HeteroJMWST()], ids=lambda m: m.name)
@pytest.mark.parametrize("setting", [{"secure": True}, {"dp_noise": 1.0}], ids=["secure", "dp"])
def test_methods_whose_masks_differ_are_refused_before_the_first_round(
    task: fl.Task, method: Method, setting: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=r"clients of .* have different masks.*Use dense, pdst or spdst"):
        simulated(task, method, **setting)


@dataclass(frozen=True)
class Secretive(fl.PDST):
    """Says that masks are common, and lets one client move its mask."""

    name = "secretive"

    @property
    def common(self) -> bool:
        return True

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, adapt=fl.PruneRegrow() if client.id == 3 else None)


def test_method_that_declares_a_common_mask_and_lies_is_refused(task: fl.Task) -> None:
    with pytest.raises(ConfigError, match="order of client 3 does not fit a private round"):
        simulated(task, Secretive(density=0.1), secure=True)


@pytest.mark.parametrize("setting", [{"values": "int8"}, {"values_down": "fp16"}, {"clip": 2.0}, {"trim": 0.1}])
def test_settings_that_need_single_updates_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="encode updates in their own way"):
        TrainConfig(secure=True, **setting)  # type: ignore[arg-type]


def test_run_without_test_samples_on_the_server_is_refused() -> None:
    task = make_task("norm", clients=10)
    task.test = None
    with pytest.raises(ConfigError, match="test samples on the server"):
        simulated(task, secure=True)


def test_first_phase_is_refused_under_differential_privacy(task: fl.Task) -> None:
    with pytest.raises(ConfigError, match="warmup_clients = 0"):
        simulated(task, dp_noise=1.0)


# What the server sees.


def test_clients_forget_the_secrets_of_a_finished_round(task: fl.Task, tmp_path: Path) -> None:
    simulated(task, fl.PDST(density=0.3), secure=True, rounds=1, folder=tmp_path / "run")
    kept = [path.read_bytes() for path in (tmp_path / "run" / "private" / "clients").glob("*/party")]
    assert kept == [b""] * 10


def test_server_never_sees_sample_counts_or_plain_values(digits: fl.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    original = PrivateRound.received

    def received(self: PrivateRound, client: int, data: bytes, notes: str | None = None) -> None:
        seen.append(data)
        original(self, client, data, notes)

    monkeypatch.setattr(PrivateRound, "received", received)
    run = simulated(digits, fl.PDST(density=0.3), secure=True, rounds=1)
    masked = [np.frombuffer(data[21:], np.uint8) for data in seen if len(data) > 10_000]
    assert len(masked) == 10
    counts = np.bincount(np.concatenate(masked), minlength=256)
    expected = counts.sum() / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * np.sqrt(2 * 255)
    assert run.history[0].privacy is not None
    assert run.privacy is None  # nothing bounds epsilon without noise


def test_clamped_values_are_reported(digits: fl.Task) -> None:
    run = simulated(digits, secure=True, rounds=1, **{"ranges": {"samples": 16}})
    spent = run.history[-1].privacy
    assert spent is not None
    assert spent.clamped == 10  # every client has more than 16 samples


def test_static_batchnorm_gathers_its_statistics_securely(task: fl.Task) -> None:
    secure, usual = simulated(task, secure=True, static_bn=True), simulated(task, static_bn=True)
    assert torch.allclose(secure.weights.statistics, usual.weights.statistics, atol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"dp_noise": 1.0}], ids=["plain", "noise"])
def test_sum_that_honest_clients_cannot_reach_is_not_used(
    task: fl.Task, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PrivateSide._words

    def lying(self: PrivateSide, *rest: object) -> np.ndarray:
        words = original(self, *rest)  # type: ignore[arg-type]
        if self.client == 3 and settings:
            return np.random.default_rng(1).integers(0, 1 << 32, len(words), np.uint32)
        if self.client == 3:
            words[-2] = np.uint32(1 << 30)  # the number of samples
        return words

    monkeypatch.setattr(PrivateSide, "_words", lying)
    with pytest.raises(RunStopped, match=r"which 10 correct clients cannot have"):
        simulated(task, fl.PDST(density=0.3), secure=True, rounds=1, retries=0, **settings)


# Differential privacy.


def test_epsilon_is_recorded_each_round_and_the_run_ends_when_the_budget_is_spent(task: fl.Task) -> None:
    budget = epsilon_known(4.0, 3, 1e-5) + 0.01
    method = fl.SPDST(density=0.3, warmup_clients=0)
    run = simulated(task, method, rounds=9, dp_noise=4.0, dp_epsilon=budget, secure=True)
    assert [r.privacy.known for r in run.history if r.privacy] == [epsilon_known(4.0, i, 1e-5) for i in (1, 2, 3)]
    assert run.stopped == f"spent its privacy budget of epsilon {budget:g}"
    assert run.history[-1].score is not None
    assert "epsilon" in repr(run)


@pytest.mark.parametrize("secure", [True, False])
def test_noise_too_little_for_one_round_is_refused_before_it(task: fl.Task, secure: bool, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dp_noise = 0\.3 is too little: one round would spend more than .* = 8\."):
        simulated(task, fl.PDST(density=0.3), dp_epsilon=8.0, dp_noise=0.3, secure=secure, folder=tmp_path / "run")
    assert not (tmp_path / "run" / "private" / "spent.json").exists()


def test_noise_for_an_epsilon_lasts_for_the_rounds_that_were_planned(task: fl.Task) -> None:
    run = simulated(task, fl.PDST(density=0.3), rounds=3, dp_epsilon=20.0, secure=True)
    assert run.stopped is None
    spent = run.privacy
    assert spent is not None
    assert 19.5 < spent.known <= 20.0


@pytest.mark.filterwarnings("ignore:secure = true is only simulated")
@pytest.mark.parametrize("engine", ["cpu", "gpu"])
@pytest.mark.parametrize("secure", [True, False])
def test_noise_of_runs_with_one_seed_differs(
    task: fl.Task, secure: bool, engine: str, as_gpu: Callable[[], None]
) -> None:
    if engine == "gpu":
        as_gpu()
    more = {"rounds": 1, "dp_noise": 1.0, "secure": secure, "seed": 7}
    first, second = (simulated(task, fl.PDST(density=0.3), **more) for _ in range(2))
    assert first.history[0].cohort == second.history[0].cohort
    far = (first.weights.packed() - second.weights.packed()).abs() > 0
    assert far.float().mean() > 0.99


@pytest.mark.parametrize("secure", [True, False])
def test_records_of_a_run_with_noise_have_no_loss_and_no_clamped_values(task: fl.Task, secure: bool) -> None:
    run = simulated(task, fl.PDST(density=0.3), rounds=1, dp_noise=1.0, secure=secure, **{"ranges": {"samples": 1}})
    [record] = run.history
    assert np.isnan(record.loss)
    assert record.privacy is not None
    assert record.privacy.clamped == 0


@pytest.mark.parametrize("secure", [True, False])
def test_epsilon_survives_kill_and_resume_and_repeated_rounds_spend_too(
    task: fl.Task, tmp_path: Path, secure: bool
) -> None:
    method, more = fl.PDST(density=0.3), {"dp_noise": 4.0, "secure": secure, "rounds": 3, "folder": tmp_path / "run"}
    original, spoilt = PrivateRound.close, [0]

    def close(self: PrivateRound) -> object:
        if self.tag[1] == 1 and not spoilt[0]:
            spoilt[0] = 1
            raise KeyboardInterrupt  # after clients were asked, before anything came of it
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateRound, "close", close)
        with pytest.warns(RuntimeWarning, match="interrupted"):
            simulated(task, method, **more)
    found = json.loads((tmp_path / "run" / "private" / "spent.json").read_text())
    assert found["draws"] == [[10, 10, False, 2]]
    run = simulated(task, method, resume=True, **more)
    # Under secure aggregation clients refuse to open round 1 a second time, so one more attempt is spent.
    spent = (1, 4, 5) if secure else (1, 3, 4)
    assert [r.privacy.known for r in run.history if r.privacy] == [epsilon_known(4.0, i, 1e-5) for i in spent]


def crash_after_opening(round: int, task: fl.Task, method: Method, **settings: object) -> None:
    """A run that stops when the sum of this round is open, and no checkpoint knows it."""
    original = PrivateRound.close

    def close(self: PrivateRound) -> object:
        outcome = original(self)
        if self.tag[1] == round:
            raise KeyboardInterrupt
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateRound, "close", close)
        with pytest.warns(RuntimeWarning, match="interrupted"):
            simulated(task, method, **settings)


def test_sum_opened_before_a_crash_is_used_and_not_opened_again(task: fl.Task, tmp_path: Path) -> None:
    method, more = fl.PDST(density=0.3), {"secure": True, "rounds": 2, "folder": tmp_path / "run"}
    crash_after_opening(1, task, method, **more)
    run = simulated(task, method, resume=True, **more)
    assert run.history[-1].bytes.up == 0
    assert run.checksum == simulated(task, method, **{**more, "folder": None}).checksum


@pytest.mark.parametrize("settings", [{"secure": True}, {"dp_noise": 0.5}])
def test_sum_opened_before_a_crash_keeps_its_scale_if_fewer_clients_are_present_now(
    task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    monkeypatch.setattr(server, "discrete_gaussian", lambda deviation, count: np.zeros(count, np.int64))
    method, more = fl.PDST(density=0.3), {"rounds": 1, "folder": tmp_path / "run", **settings}
    crash_after_opening(0, task, method, **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fl.PDST, "cohort", lambda self, s, present: tuple(present[:4]))
        run = simulated(task, method, resume=True, **more)
    assert run.checksum == simulated(task, method, **{**more, "folder": None}).checksum


@pytest.mark.parametrize(
    "change", [lambda data: data[:9], lambda data: data.replace(b" 10,", b"  0,"), lambda data: b""]
)
def test_damaged_sum_of_an_interrupted_round_is_named(
    task: fl.Task, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    method, more = fl.PDST(density=0.3), {"secure": True, "rounds": 1, "folder": tmp_path / "run"}
    crash_after_opening(0, task, method, **more)
    path = tmp_path / "run" / "private" / "opened"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match="opened is damaged"):
        simulated(task, method, resume=True, **more)


@pytest.mark.parametrize("settings", [{"secure": True}, {"dp_noise": 0.5}])
@pytest.mark.parametrize("crash", [False, True])
def test_round_with_fewer_replies_than_min_replies_is_asked_for_again(
    task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], crash: bool
) -> None:
    """The sum that was opened is not used again. Clients of secure rounds are asked under a new number at once."""
    monkeypatch.setattr(cpu, "drops", lambda s, client, share: s.attempt == 0 and client < 3)
    monkeypatch.setattr(cpu, "dropout_step", lambda s, client: 2)
    more = {"rounds": 1, "min_replies": 9, "dropout": 0.1, "folder": tmp_path / "run", **settings}
    if crash:
        crash_after_opening(0, task, fl.PDST(density=0.3), **more)
    [record] = simulated(task, fl.PDST(density=0.3), resume=crash, **more).history
    assert (record.attempt, record.round, record.failures) == (1, 1 if "secure" in settings else 0, {})


def test_run_interrupted_after_a_repeated_secure_round_resumes(
    task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated round has a number of its own, so rounds have larger numbers than there are records."""
    monkeypatch.setattr(cpu, "drops", lambda s, client, share: s.attempt == 0 and s.counted == 0 and client < 3)
    monkeypatch.setattr(cpu, "dropout_step", lambda s, client: 2)
    method = fl.PDST(density=0.3)
    more = {"rounds": 2, "min_replies": 9, "dropout": 0.1, "secure": True, "folder": tmp_path / "run"}
    crash_after_opening(2, task, method, **more)
    run = simulated(task, method, resume=True, **more)
    assert [record.round for record in run.history] == [1, 2]
    assert run.checksum == simulated(task, method, **{**more, "folder": None}).checksum


def first_gathering_fails(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Let the first gathering of statistics fail after clients gave their inputs; the list then holds its tag."""
    original, failed = PrivateRound._opened, list[tuple[int, int, int]]()

    def opened(self: PrivateRound) -> object:
        if self.packing.local.report == "statistics" and not failed:
            failed.append(self.tag)
            self._why = "clients left"
            return np.zeros(0, np.uint32), []
        return original(self)

    monkeypatch.setattr(PrivateRound, "_opened", opened)
    return failed


def test_gathering_of_statistics_that_fails_is_asked_for_under_a_new_number(
    task: fl.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client gives one input to each round number: asked again under the old one, all would refuse."""
    failed = first_gathering_fails(monkeypatch)
    secure, usual = simulated(task, secure=True, static_bn=True), simulated(task, static_bn=True)
    assert failed
    assert torch.allclose(secure.weights.statistics, usual.weights.statistics, atol=1e-3)


@pytest.mark.parametrize("repeated", [False, True])
def test_secure_run_that_gathered_statistics_is_extended(
    task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: bool
) -> None:
    """Its next round has a number of its own: clients refuse to give a second input under that of the gathering."""
    if repeated:
        first_gathering_fails(monkeypatch)
    more = {"secure": True, "static_bn": True, "folder": tmp_path / "run", "retries": 1}
    simulated(task, fl.PDST(density=0.3), rounds=1, **more)
    with pytest.warns(RuntimeWarning, match="rounds changed from 1 to 2"):
        run = simulated(task, fl.PDST(density=0.3), rounds=2, resume=True, **more)
    assert (run.history[-1].missed, run.history[-1].attempt) == ({}, 0)


def test_resume_without_the_record_of_spent_privacy_is_refused(task: fl.Task, tmp_path: Path) -> None:
    more = {"dp_noise": 4.0, "rounds": 2, "folder": tmp_path / "run"}
    crash_after_opening(1, task, fl.PDST(density=0.3), **more)
    (tmp_path / "run" / "private" / "opened").unlink()
    (tmp_path / "run" / "private" / "spent.json").unlink()
    with pytest.raises(CheckpointError, match=r"spent\.json is missing, or older than the run .it has 0 of 1 rounds"):
        simulated(task, fl.PDST(density=0.3), resume=True, **more)


def test_budget_of_a_finished_run_is_not_spent_again_by_resume(task: fl.Task, tmp_path: Path) -> None:
    budget = epsilon_known(4.0, 2, 1e-5) + 0.01
    more = {"secure": True, "rounds": 5, "folder": tmp_path / "run", "dp_noise": 4.0, "dp_epsilon": budget}
    first = simulated(task, fl.PDST(density=0.3), **more)
    again = simulated(task, fl.PDST(density=0.3), resume=True, **more)
    assert (len(first.history), len(again.history)) == (2, 2)
    assert again.stopped == first.stopped


# Without cryptography.


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def switch() -> None:
        monkeypatch.setattr(
            "flashfl.run.simulate.make_engine", lambda task, config, folder: GPUEngine(task, config, "cpu", folder)
        )

    return switch


@pytest.mark.filterwarnings("ignore:secure = true is only simulated")
@pytest.mark.parametrize("settings", [{"secure": True}, {"secure": True, "dropout": 0.1}])
def test_gpu_engine_counts_the_same_bytes_and_the_same_model(
    task: fl.Task, settings: dict[str, object], as_gpu: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cpu, private_counting):
        monkeypatch.setattr(module, "drops", lambda s, client, share: client in (1, 4, 7))
        monkeypatch.setattr(module, "dropout_step", lambda s, client: {1: 1, 4: 2, 7: 3}[client])
    method = fl.SPDST(density=0.3, warmup_clients=10, warmup_epochs=1)
    real = simulated(task, method, **settings)
    as_gpu()
    counted = simulated(task, method, **settings)
    assert [r.bytes for r in counted.history] == [r.bytes for r in real.history]
    assert torch.allclose(counted.weights.vector, real.weights.vector, atol=1e-5)
    assert [set(r.failures) for r in counted.history] == [set(r.failures) for r in real.history]


@pytest.mark.filterwarnings("ignore:secure = true is only simulated")
@pytest.mark.parametrize(
    "settings",
    [{"secure": True}, {"secure": True, "dp_noise": 1.0, "dp_clip": 0.02}, {"dp_noise": 1.0, "dp_clip": 0.02}],
    ids=["secure", "secure-dp", "dp"],
)
def test_gpu_engine_adds_up_the_same_whole_numbers_of_the_same_clipped_changes(
    task: fl.Task, settings: dict[str, object], as_gpu: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise, the sum that is decoded is the same in every number, up to the last bits of training."""
    found: list[tuple[torch.Tensor, list[float]]] = []
    decode = Packing.decode

    def watched(self: Packing, total: torch.Tensor, start: object, clients: int) -> object:
        found.append((total.clone(), [section.scale for section in self.sections]))
        return decode(self, total, start, clients)  # type: ignore[arg-type]

    def silence(deviation: int, count: int) -> np.ndarray:
        return np.zeros(count, np.int64)

    monkeypatch.setattr(Packing, "decode", watched)
    monkeypatch.setattr(party, "discrete_gaussian", silence)
    monkeypatch.setattr(server, "discrete_gaussian", silence)
    monkeypatch.setattr(private_counting.PrivateCounting, "_noise", lambda self, cohort, counted: 0)
    method = fl.PDST(density=0.3)
    real = simulated(task, method, rounds=1, **settings)
    as_gpu()
    counted = simulated(task, method, rounds=1, **settings)
    assert [r.bytes for r in counted.history] == [r.bytes for r in real.history]
    (total, scales), (other, same) = found
    assert scales == same
    assert int((total - other).abs().max()) <= max(2, int(1e-6 * scales[0] * SETTINGS["batch"] * 10))
    if "dp_clip" in settings:
        assert float(total.double().norm()) / scales[0] <= 10 * 0.02 + 1e-3


@pytest.mark.filterwarnings("ignore:secure = true is only simulated")
@pytest.mark.parametrize("secure", [True, False])
def test_gpu_engine_adds_noise_of_the_same_size(digits: fl.Task, secure: bool, as_gpu: Callable[[], None]) -> None:
    found = []
    more = {"rounds": 1, "dp_noise": 2.0, "dp_clip": 1e-3, "secure": secure, "lr": 1e-6, "lr_end": 1e-6, "max_steps": 1}
    method = fl.PDST(density=0.3)
    for engine in ("cpu", "gpu"):
        if engine == "gpu":
            as_gpu()
        run = simulated(digits, method, **more)
        start = fl.simulate(method, digits, progress=False, **{**SETTINGS, "rounds": 1, "lr": 0.0, "max_steps": 1})
        found.append((run.weights.packed() - start.weights.packed())[: run.weights.mask.active].std().item())
        assert run.history[0].bytes.up > 0
    shares = 10 / 6 if secure else 1  # ten shares, each for six honest survivors
    for deviation in found:
        assert deviation == pytest.approx(2e-3 * shares**0.5 / 10, rel=0.1)


def test_gpu_engine_says_that_it_does_not_encrypt(task: fl.Task, as_gpu: Callable[[], None]) -> None:
    as_gpu()
    with pytest.warns(RuntimeWarning, match="nothing is encrypted"):
        simulated(task, fl.PDST(density=0.3), secure=True, rounds=1)


# A client on its own.


def test_client_that_refuses_says_why_by_name(task: fl.Task, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrivateSide._answer

    def tampered(self: PrivateSide, data: object, request: bytes, memory: object) -> object:
        if request[0] == 3 and self.client == 2:  # the survivors: also listed as dropped
            request = request[:-2] + b"\xff\x03"
        return original(self, data, request, memory)  # type: ignore[arg-type]

    monkeypatch.setattr(PrivateSide, "_answer", tampered)
    whys: dict[int, str] = {}
    failed = PrivateRound.failed

    def noted(self: PrivateRound, client: int, why: str) -> None:
        whys[client] = why
        failed(self, client, why)

    monkeypatch.setattr(PrivateRound, "failed", noted)
    run = simulated(task, fl.PDST(density=0.3), secure=True, rounds=1)
    assert whys[2].startswith("AsksForBoth: the server lists client")
    assert run.history[0].failures == {}


def test_errors_of_private_rounds_are_for_users() -> None:
    from flashfl.privacy import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert all(issubclass(kind, FlashError) for kind in kinds)
