"""What the supervisor knows of its job when Slurm answers late, wrongly or not at all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from patience import scaled

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError, SlurmRefusedError, SlurmSilentError
from kempner.cluster.slurm.job import JobState, JobTimes, job_fields, parse_job
from kempner.cluster.slurm.scontrol import ClusterSettings
from kempner.run.process import threads
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events import Requeued
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger, read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.monitors.base import RunTimes
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.slurm import job_monitor
from kempner.supervisor.slurm.job_monitor import LATE, WITHOUT_END, JobMonitor, JobSeen, JobView
from kempner.supervisor.slurm.requeue_job import requeue_or_explain

DATA = Path(__file__).parents[2] / "cluster" / "slurm_data" / "jobs.json"
RUNNING = parse_job(job_fields(json.loads(DATA.read_text())["running"]))
SILENT = SlurmSilentError("no answer")
STOPPED = Decision(ExitCode.STOPPED, "stopped")

Ends = Callable[[float | None], JobState]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Makes a job that ends in `seconds` by the clock of a controller, 1000 s ahead of us."""
    ahead = time.time() + 1000.0 - time.monotonic()
    settings = ClusterSettings(kill_wait=45.0, node_timeout=90.0, ahead=ahead)
    monkeypatch.setattr(scontrol, "cluster_settings", lambda within: settings)

    def job(seconds: float | None) -> JobState:
        end = None if seconds is None else time.monotonic() + ahead + seconds
        state = replace(RUNNING, times=JobTimes(end=end))
        monkeypatch.setattr(scontrol, "job_state", lambda job, within=0.0: state)
        return state

    return job


def seen(monitor: JobMonitor, enough: Callable[[JobSeen], bool] = lambda told: True) -> JobSeen:
    posted: SimpleQueue[JobSeen] = SimpleQueue()
    monitor.watch(posted.put)
    try:
        while not enough(told := posted.get(timeout=scaled(20))):
            monitor.look()
        return told
    finally:
        monitor.close()


def test_the_time_left_is_by_the_controllers_clock(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(600.0)
    partition = {"PreemptMode": "REQUEUE", "GraceTime": "20"}
    monkeypatch.setattr(scontrol, "show_partition", lambda name, within: partition)
    monitor = JobMonitor("7", batch=True)
    told = seen(monitor, lambda told: told.grace is not None)
    assert (told.kill_wait, told.grace) == (45.0, 20.0)
    assert told.seconds_left == pytest.approx(600.0, abs=20.0)
    assert monitor.try_until() - time.monotonic() == pytest.approx(600.0 + LATE, abs=20.0)


@pytest.mark.parametrize(
    ("version", "warned"),
    [*((version, False) for version in ("", *scontrol.TRIED)), ("25.11", True), ("27.02", True)],
)
def test_a_version_that_was_never_tried_is_told_once_and_holds_up_nothing(
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
    warned: bool,
) -> None:
    ends(600.0)
    settings = replace(scontrol.cluster_settings(0.0), series=version)
    monkeypatch.setattr(scontrol, "cluster_settings", lambda within: settings)
    monkeypatch.setattr(job_monitor, "SETTINGS_EVERY", 0.0)
    monitor = JobMonitor("7", batch=True)
    for _ in range(3):
        monitor.node_timeout()
    told = [line for line in capsys.readouterr().err.splitlines() if "was tried with" in line]
    assert [version in line for line in told] == ([True] if warned else [])


def test_a_job_without_an_end_is_tried_for_an_hour(ends: Ends) -> None:
    ends(None)
    monitor = JobMonitor("7", batch=True)
    assert seen(monitor).seconds_left is None
    assert monitor.try_until() - time.monotonic() == pytest.approx(WITHOUT_END, abs=20.0)


@pytest.mark.parametrize(
    "failure",
    [SILENT, OSError(12, "Cannot allocate memory"), KeyError("JobId"), ValueError("a date")],
)
def test_the_thread_outlives_whatever_goes_wrong(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    state, failures = ends(600.0), [failure, failure]

    def unsteady(job: str, within: float = 0.0) -> JobState:
        if failures:
            raise failures.pop()
        return state

    monkeypatch.setattr(scontrol, "job_state", unsteady)
    monkeypatch.setattr(threads, "PAUSE", 0.01)
    monkeypatch.setattr(job_monitor, "next_pause", lambda failures: 0.01)
    assert seen(JobMonitor("7", batch=True)).state == state
    assert not failures


class Controller:
    """Takes what is asked, and keeps what was; `refusal` is what it says to a requeue."""

    def __init__(self, job: JobState, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job, self.orders = job, list[str]()
        self.refusal: SlurmError | None = None
        monkeypatch.setattr(scontrol, "job_state", lambda job, within=0.0: self.job)
        monkeypatch.setattr(scontrol, "requeue", self.requeue)

    def requeue(self, job: str) -> None:
        self.orders.append(f"requeue {job}")
        if self.refusal is not None:
            raise self.refusal
        self.job = replace(self.job, state="COMPLETING", restarts=self.job.restarts + 1)


@pytest.fixture
def controller(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Controller:
    return Controller(ends(600.0), monkeypatch)


def part(tmp_path: Path, batch: bool = True) -> tuple[list[str], list[str]]:
    """End attempt 4; which events the ledger has then, and their reasons."""
    run = RunDirectory(tmp_path)
    history, job = RunHistory.read(run.ledger), JobMonitor("7", batch)
    requeue_or_explain(job, RUNNING, 4, STOPPED, run, Ledger(run.ledger), history)
    lines = list(read_lines(run.ledger))
    return [line["event"] for line in lines], [line.get("reason", "") for line in lines]


def test_one_event_tells_what_became_of_the_job(controller: Controller, tmp_path: Path) -> None:
    assert part(tmp_path)[0] == ["requeued"]
    assert controller.orders == ["requeue 7"]


def test_a_refusal_is_told_as_one(controller: Controller, tmp_path: Path) -> None:
    controller.refusal = SlurmRefusedError("scontrol requeue 7", "Access/permission denied")
    names, reasons = part(tmp_path)
    assert names == ["not_requeued"]
    assert "Access/permission denied" in reasons[0]


def test_the_ledger_does_not_contradict_a_rank_that_requeued_the_job(
    controller: Controller, tmp_path: Path
) -> None:
    """It took this process for dead, and asked first."""
    ledger = Ledger(RunDirectory(tmp_path).ledger)
    ledger.record(Requeued(step=5, job="7", by_rank=1), attempt=4)
    controller.job = replace(controller.job, state="COMPLETING", restarts=1)
    assert part(tmp_path)[0] == ["requeued"]
    assert controller.orders == []


def test_nobody_asks_for_an_allocation_of_somebody_else(
    controller: Controller, tmp_path: Path
) -> None:
    names, reasons = part(tmp_path, batch=False)
    assert (names, controller.orders) == (["not_requeued"], [])
    assert "this is an interactive allocation" in reasons[0]


@pytest.mark.parametrize(("left", "too_late"), [(600.0, False), (10.0, False), (8.0, True)])
def test_nothing_is_waited_for_in_the_last_of_the_margin(left: float, too_late: bool) -> None:
    """Of 15 seconds, six tenths: a salvage, the lease, the ledger. Slurm requeues a job that it
    preempts by itself."""
    view, times = JobView(JobMonitor("7", batch=True)), RunTimes()
    assert not view.too_late_to_wait(times)
    job = replace(RUNNING, times=JobTimes(end=1.0))
    view.take_in(JobSeen(job, left, 30.0), times.now())
    assert view.too_late_to_wait(times) is too_late
    preempted = replace(RUNNING, times=JobTimes(end=1.0, preempt=1.0))
    view.take_in(JobSeen(preempted, left, 30.0), times.now())
    assert not view.too_late_to_wait(times)
