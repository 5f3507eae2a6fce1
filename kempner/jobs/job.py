"""`Job`, a submitted run as a Python object, and the folders `submissions/<n>/` of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError
from kempner.insight.status.activity import Activity, ActivityNote
from kempner.insight.status.job import JobStatus, JobWatch
from kempner.insight.status.runs import RunFollower
from kempner.insight.status.summary import Status
from kempner.insight.triage.first_failure import triage_logs, triage_run
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import RunError, UsageError, cannot_read
from kempner.run.process.whereabouts import start_ticks
from kempner.run.record.events import Resubmitted
from kempner.run.record.lease import Holder
from kempner.run.record.run_dir import RunDirectory

_RECORD = "submitted.json"


@dataclass(frozen=True)
class Submission:
    """The `number`th submission of a run, made after `attempts` attempts: a Slurm `job`, or the
    process `pid` that began at `started` (clock ticks) on `machine`, as in `Holder`."""

    number: int
    attempts: int
    job: str = ""
    machine: str = ""
    pid: int = 0
    started: int = 0

    @classmethod
    def of_process(cls, number: int, attempts: int, pid: int) -> Self:
        """The submission of a process that was just started here."""
        return cls(number, attempts, "", Holder.here(0.0).machine, pid, start_ticks(pid) or 0)

    def process_lives(self) -> bool | None:
        if self.job or self.machine != Holder.here(0.0).machine:
            return None
        return bool(self.started) and start_ticks(self.pid) == self.started

    def write(self, run: RunDirectory) -> None:
        content = json.dumps(asdict(self)).encode()
        replace_durable(folder_of(run, self.number) / _RECORD, content, unique="new")


def folder_of(run: RunDirectory, number: int) -> Path:
    return run.submissions / str(number)


def log_of(run: RunDirectory, number: int) -> Path:
    """The output of a submission's supervisor and first rank."""
    return folder_of(run, number) / "log.out"


def cancelled_mark(run: RunDirectory, number: int) -> Path:
    """Exists if the submission was cancelled by `Job.cancel`."""
    return folder_of(run, number) / "cancelled"


def reserve(run: RunDirectory) -> int:
    """Reserve a new submission number, with its folder. Raises `OSError`."""
    run.submissions.mkdir(parents=True, exist_ok=True)
    number = max(_numbers(run), default=0) + 1
    while True:
        try:
            folder_of(run, number).mkdir()
        except FileExistsError:
            number += 1
            continue
        return number


def last_submission(run: RunDirectory) -> Submission | None:
    for number in sorted(_numbers(run), reverse=True):
        try:
            return Submission(**json.loads((folder_of(run, number) / _RECORD).read_bytes()))
        except (FileNotFoundError, TypeError, ValueError):
            continue  # this submission failed
    return None


def _numbers(run: RunDirectory) -> list[int]:
    try:
        return [int(path.name) for path in run.submissions.iterdir() if path.name.isdecimal()]
    except FileNotFoundError:
        return []


CHILDREN: dict[int, subprocess.Popen[bytes]] = {}
"""Supervisors that this process started, by process id, to reap them when they end."""

_OWN_EVERY, _SLURM_EVERY = 0.2, 5.0
"""Seconds between two looks of `Job.wait`."""


class Job:
    """A submitted run, from this or another Python session.

    Args:
        run_dir: `<run.dir>/<run.name>`.

    Raises:
        UsageError: if there is no such run.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run = RunDirectory(Path(run_dir).expanduser().absolute())
        self._submission = last_submission(self._run)
        if self._submission is None and not self._run.ledger.is_file():
            raise UsageError(f"{run_dir} is not a run: give <run.dir>/<run.name>, or submit it")
        self._follow("" if self._submission is None else self._submission.job)

    def __repr__(self) -> str:
        return f"Job({str(self.run_dir)!r}, job_id={self.job_id!r})"

    @property
    def run_dir(self) -> Path:
        """The run's directory, with checkpoints, metrics and the ledger."""
        return self._run.path

    @property
    def job_id(self) -> str:
        """Slurm's job id, or the supervisor's process id; empty if it was not submitted."""
        if self._job or self._submission is None:
            return self._job
        return str(self._submission.pid)

    @property
    def log(self) -> Path | None:
        """The output of the supervisor and of rank 0; None if the run was not submitted."""
        return None if self._submission is None else log_of(self._run, self._submission.number)

    @property
    def state(self) -> Activity:
        """What the run does now: a string such as "queued", "training", "stopped", "completed".

        Raises `RunError` if it cannot be read now.
        """
        return self._look()[1].activity

    @property
    def reason(self) -> str:
        """Why the run is in this state, in a few words; empty if unknown."""
        return self._look()[1].reason

    @property
    def failure(self) -> str:
        """The failure in a sentence: the reason, and the first exception. Empty unless the run has
        failed or was given up. Raises `RunError` if it cannot be read now."""
        doing = self._look()[1]
        if doing.activity not in (Activity.FAILED, Activity.GIVEN_UP):
            return ""
        try:
            return describe_failure(doing.reason, self._raised(doing.reason))
        except OSError as error:
            raise cannot_read(error.filename or self.run_dir, error) from error

    @property
    def step(self) -> int:
        """The last logged step, or for a program of your own the last reported or committed one; 0
        before the first."""
        status = self.status()
        if status.progress.step is not None:
            return status.progress.step
        saved = 0 if status.facts.checkpoint is None else status.facts.checkpoint.step
        return max(saved, min((place.step for place in status.facts.live.ranks), default=0))

    def status(self) -> Status:
        """All that `kempner status` shows."""
        return self._look()[0]

    def done(self) -> bool:
        """Whether nothing more happens unless the run is submitted again. A Slurm job that waits to
        resume is not done, nor is one that is held before its run is over."""
        status, doing, works = self._look()
        if status.job is not None and status.job.held and doing.activity.is_over:
            return True
        if works is None and not self._job:
            return not (doing.activity.is_live or doing.activity is Activity.QUEUED)
        return works is False

    def wait(self, timeout: float | None = None, *, check: bool = False) -> Activity:
        """Wait until it is done, at most `timeout` seconds; returns its state.

        Raises:
            TimeoutError: it is not done yet, and continues.
            RunError: it cannot be read now. With `check`, also if it has failed or was given up:
                its `failure`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = _SLURM_EVERY if self._job else _OWN_EVERY
        warned = False
        while not self.done():
            if not warned and (why := self._held):
                warned = True
                logger().warning(f"{self.run_dir} waits: {why}")
            left = pause if end is None else end - time.monotonic()
            if left <= 0:
                state_now = describe_unfinished(self.state, self._held)
                raise TimeoutError(f"{self.run_dir} is not done after {timeout:g} s: {state_now}")
            time.sleep(min(pause, left))
        if check and (failure := self.failure):
            raise RunError(f"{self.run_dir} has failed: {failure}")
        return self.state

    def cancel(self) -> None:
        """Stop the run after the current step with a checkpoint, without a requeue.

        Returns at once; `wait` waits for the end. A Slurm job has Slurm's KillWait (30 s by
        default) for that. Does nothing if it is done.

        Raises:
            RunError: Slurm does not answer, or it was not submitted from this machine.
        """
        if self.done():
            return
        if self._submission is None:
            raise UsageError(f"{self.run_dir} was not submitted: stop it where it was started")
        mark = cancelled_mark(self._run, self._submission.number)
        if self._job:
            try:
                scontrol.cancel(self._job)
            except SlurmError as error:
                raise RunError(f"job {self._job} is not cancelled: {error}") from error
        elif self._submission.process_lives() is None:
            raise UsageError(f"{self.run_dir} was submitted on another machine: cancel it there")
        else:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self._submission.pid, signal.SIGTERM)
        mark.touch()

    @property
    def _held(self) -> str:
        """Why Slurm holds its job; empty if it does not."""
        job = self.status().job
        return job.why_waiting if job is not None and job.held else ""

    def _raised(self, reason: str) -> str:
        """The first exception, or the supervisor's last line; empty if unknown. The ledger may know
        no more of it than `reason`."""
        found = triage_run(self._run).first_error.raised if self._run.ledger.is_file() else ""
        if found not in reason or self.log is None or not self.log.is_file():
            return found
        lines = self.log.read_text(errors="replace").split("\n")
        return triage_logs([self.log]).first_error.raised or next(filter(None, reversed(lines)), "")

    def _follow(self, job: str) -> None:
        self._job = job
        watch = JobWatch(job or None, wait=True)
        self._follower = RunFollower(self._run, watch, patient=True)

    def _look(self) -> tuple[Status, ActivityNote, bool | None]:
        """Its status, its activity, and whether a process works on it, or a job will."""
        works = self._process_lives()  # first: then all that it did before its end is written
        status = self._follower.read()
        if not self._job:
            return status, self._doing(status, works), works
        for event in status.facts.history.events(Resubmitted):
            if event.job == self._job:
                self._follow(event.as_job)
                return self._look()
        works = job_goes_on(status.job)
        return status, self._doing(status, works), works

    def _doing(self, status: Status, works: bool | None) -> ActivityNote:
        submission = self._submission
        if submission is None:
            return status.doing
        began = status.attempt is not None and status.attempt.number > submission.attempts
        cancelled = cancelled_mark(self._run, submission.number).exists()
        return decide(status.doing, works, began, cancelled)

    def _process_lives(self) -> bool | None:
        submission: Submission | None = self._submission
        if submission is None:
            return None
        if (child := CHILDREN.get(submission.pid)) is not None and child.poll() is not None:
            del CHILDREN[submission.pid]
        return submission.process_lives()


def describe_failure(reason: str, raised: str) -> str:
    """The reason of the run's state, and the exception if it says more."""
    raised = raised.removeprefix("kempner: ")
    if raised in reason:
        return reason
    return f"{reason.removesuffix('; its log says why')}: {raised}"


def describe_unfinished(state: Activity, held: str) -> str:
    """What a run does that is not done when `Job.wait` times out."""
    if held or state.is_live or state is Activity.QUEUED:
        return held or state
    return f"{state}, and its supervisor is about to end"


def job_goes_on(job: JobStatus | None) -> bool | None:
    if job is None or not job.known:
        return None
    return not job.over


def decide(found: ActivityNote, works: bool | None, began: bool, cancelled: bool) -> ActivityNote:
    """The activity of a submitted run. Until this submission `began` an attempt, `found` is about
    an earlier one."""
    if began or found.activity.is_live or found.activity is Activity.QUEUED:
        return found
    if works:
        return ActivityNote(Activity.STARTING, "the supervisor begins")
    if works is False and not found.activity.is_over:
        if cancelled:
            return ActivityNote(Activity.STOPPED, "cancelled before it began")
        return ActivityNote(Activity.FAILED, "it ended before an attempt began; its log says why")
    return found
