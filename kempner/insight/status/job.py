"""Finds the run of a Slurm job, its state, and how often it was restarted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SHORTLY, SlurmError, SlurmRefusedError
from kempner.cluster.slurm.job import (
    FINAL,
    QUEUED,
    JobState,
    how_to_release,
    is_held,
    parse_job,
    parse_time,
)
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.events import AttemptStarted, Resubmitted
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RUN_LINE, RunDirectory


@dataclass(frozen=True)
class Restarts:
    """How often a job was requeued, by three sources; None if unknown: `launch` is
    SLURM_RESTART_COUNT at the last launch, `controller` the field Restarts of `scontrol show job`,
    `accounting` the number of records of `sacct -D` minus one."""

    launch: int | None = None
    controller: int | None = None
    accounting: int | None = None

    def agree(self, waiting: bool) -> bool:
        """Whether the sources agree. If the job is `waiting` again, its last launch came before its
        last restart."""
        launch = self.launch if self.launch is None else self.launch + waiting
        return len({launch, self.controller, self.accounting} - {None}) < 2

    def __str__(self) -> str:
        counts = (self.launch, self.controller, self.accounting)
        launch, controller, records = ("-" if n is None else n for n in counts)
        return f"the last launch {launch}, scontrol {controller}, sacct -D {records}"


NO_ANSWER, FORGOTTEN = "Slurm does not answer", "unknown to Slurm"  # in place of a job's state


@dataclass(frozen=True)
class JobStatus:
    """The state of a job. `state`, `nodes` and `reason` are Slurm's words; times are seconds since
    the epoch by the controller's clock, None if not set: `begins_at` is the expected start of a
    waiting job, `ends_at` the end of a running one."""

    job: str
    state: str
    nodes: str = ""
    restarts: Restarts = Restarts()
    reason: str = ""
    begins_at: float | None = None
    ends_at: float | None = None
    preempted: bool = False

    @property
    def waits(self) -> bool:
        return self.state in QUEUED

    @property
    def runs(self) -> bool:
        return not (self.waits or self.over) and self.known and self.state != "COMPLETING"

    @property
    def over(self) -> bool:
        """Whether the job has ended; sacct adds a user to CANCELLED."""
        return self.state == FORGOTTEN or self.state.partition(" ")[0] in FINAL

    @property
    def held(self) -> bool:
        return is_held(self.state, self.reason)

    @property
    def known(self) -> bool:
        return self.state != NO_ANSWER

    @property
    def agrees(self) -> bool:
        return self.restarts.agree(waiting=self.waits)

    @property
    def why_waiting(self) -> str:
        """What a queued job waits for: Slurm's reason, with an explanation."""
        if self.held:
            return how_to_release(self.job, self.state, self.reason)
        words = _REASONS.get(self.reason, "")
        reason = f"{self.reason}: {words}" if words else self.reason
        return reason or self.state.lower()


_REASONS = {
    "BeginTime": "not before the time that it may start again",
    "Resources": "its nodes are not free yet",
    "Priority": "other jobs are first",
    "Dependency": "another job has to end first",
    "PartitionDown": "the partition is down",
    "ReqNodeNotAvail": "a node that it needs is not available",
}
"""Slurm's reasons for a pending job: "JOB REASON CODES" in squeue(1)."""


def find_run(
    job: str, runs: Sequence[RunDirectory], within: float = SHORTLY
) -> RunDirectory | None:
    """The run of a job: the one of `runs` whose ledger names the job, or the one that the job's
    output names. Slurm is asked again for `within` seconds while it does not answer. None if the
    job has not begun its run yet. Raises `UsageError` if there is none."""
    for run in runs:
        if knows_job(run, job):
            return run
    named: list[str] = []
    yet_to_begin, output = False, ""
    try:
        state = parse_job(scontrol.show_job(job, within))
        yet_to_begin = state.running or state.queued
        output = scontrol.output_file(job)
        lines = Path(output).read_text(errors="replace").splitlines()
        named = [line.removeprefix(RUN_LINE) for line in lines if line.startswith(RUN_LINE)]
    except (SlurmError, OSError, ValueError) as error:
        if yet_to_begin:
            return None
        where = ", ".join(sorted({str(run.path.parent) for run in runs})) or "runs"
        raise UsageError(
            f"no run below {where} belongs to job {job}, and its output cannot be read ({error}); "
            "give <run.dir>/<run.name>"
        ) from error
    if not named and yet_to_begin:
        return None
    if not named:
        raise UsageError(f"job {job} has not started a run yet: {output} names none")
    return RunDirectory(Path(named[-1]))


def knows_job(run: RunDirectory, job: str) -> bool:
    """Whether a run's ledger names this job, as one that ran it or was submitted to resume it.
    Searches the bytes from the end."""
    try:
        with run.ledger.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            return content.rfind(f'job": "{job}"'.encode()) >= 0
    except (OSError, ValueError):  # it is empty
        return False


def job_of(history: RunHistory) -> str | None:
    """The job that runs a run, or will resume it; None outside of Slurm."""
    job = None
    for event in history.events(AttemptStarted, Resubmitted):
        job = event.as_job if isinstance(event, Resubmitted) else event.job
    return job


def read_job(
    job: str, history: RunHistory, accounting: bool = True, within: float = SHORTLY
) -> JobStatus:
    """Ask Slurm's controller, which forgets a job minutes after its end, and its accounting.

    The controller serves the whole cluster: it is asked once, and again only for `within` seconds
    while it does not answer. Without `accounting`, the accounting is asked only about a job that
    the controller has forgotten.
    """
    now, begins, forgotten = _controller(job, within)
    records: list[str] = []
    if accounting or forgotten:
        with suppress(SlurmError):  # no accounting
            records = scontrol.launches(job)
    launches = [event.restarts for event in history.events(AttemptStarted) if event.job == job]
    counts = Restarts(
        launch=launches[-1] if launches else None,
        controller=None if now is None else now.restarts,
        accounting=len(records) - 1 if records else None,
    )
    if now is None:
        unknown = FORGOTTEN if forgotten else NO_ANSWER
        return JobStatus(job, records[-1] if records else unknown, restarts=counts)
    return JobStatus(
        job,
        now.state,
        now.nodes.held,
        counts,
        now.reason,
        begins if now.queued else None,
        now.times.end if now.running else None,
        now.running and now.times.preempt is not None,
    )


def _controller(job: str, within: float) -> tuple[JobState | None, float | None, bool]:
    """The job and its StartTime, or None, and whether the controller has forgotten it."""
    try:
        fields = scontrol.show_job(job, within)
        return parse_job(fields), parse_time(fields.get("StartTime", "")), False
    except SlurmRefusedError:
        return None, None, True
    except (SlurmError, ValueError):  # no answer here, or not now
        return None, None, False


ASK_EVERY = 10.0
"""Seconds between two questions to Slurm's controller, which serves the whole cluster."""


class JobWatch:
    """Asks Slurm about a run's job, now and then. With `wait`, `look` waits for the answer, and
    asks again for `within` seconds; otherwise a controller that is away holds nothing up."""

    def __init__(
        self, job: str | None, *, accounting: bool = False, within: float = 0.0, wait: bool
    ) -> None:
        self.named, self._accounting, self._within, self._wait = job, accounting, within, wait
        self._due_at = 0.0
        self._found: JobStatus | None = None
        self._asking: threading.Thread | None = None

    def look(self, history: RunHistory) -> JobStatus | None:
        """Slurm's last answer, at most about `ASK_EVERY` seconds old; None outside of Slurm, or
        before the first."""
        job = self.named or job_of(history)
        if job is None:
            return None
        if self._found is not None and self._found.job != job:
            self._found, self._due_at = None, 0.0
        if time.monotonic() >= self._due_at and (not self._asking or not self._asking.is_alive()):
            self._due_at = time.monotonic() + ASK_EVERY
            ask = partial(self._ask, job, history)
            if self._wait:
                ask()
            else:
                self._asking = threading.Thread(target=ask, name="job", daemon=True)
                self._asking.start()
        return self._found

    def _ask(self, job: str, history: RunHistory) -> None:
        self._found = read_job(job, history, self._accounting, self._within)
