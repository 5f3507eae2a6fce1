"""Finds the run of a Slurm job, its state, and how often it was restarted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError
from kempner.cluster.slurm.job import JobState, parse_job
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.events.attempt import AttemptStarted
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RUN_LINE, RunDirectory


@dataclass(frozen=True)
class Restarts:
    """How often a job was put back into the queue, by each that counts; None where it is silent.

    `launch` is what SLURM_RESTART_COUNT said to the last launch, `controller` the field Restarts of
    `scontrol show job`, `accounting` the records of `sacct -D` but the first.
    """

    launch: int | None
    controller: int | None
    accounting: int | None

    def agree(self, waiting: bool) -> bool:
        """Whether none contradicts another. A launch of a job that is `waiting` again came before
        its last restart."""
        launch = self.launch if self.launch is None else self.launch + waiting
        return len({launch, self.controller, self.accounting} - {None}) < 2

    def __str__(self) -> str:
        shown = ["-" if n is None else str(n) for n in (self.launch, self.controller)]
        records = "-" if self.accounting is None else str(self.accounting)
        return f"the last launch {shown[0]}, scontrol {shown[1]}, sacct -D {records}"


@dataclass(frozen=True)
class JobStatus:
    """A job at a glance. `state` and `nodes` are Slurm's words."""

    job: str
    state: str
    nodes: str
    restarts: Restarts

    def rows(self) -> dict[str, str]:
        """What to show, under which name."""
        agree = self.restarts.agree(waiting=self.state == "PENDING")
        counts = str(self.restarts)
        return {
            "job": f"{self.job} {self.state} {self.nodes}".rstrip(),
            "restarts": counts if agree else f"{counts}: THEY DISAGREE",
        }


def find_run(job: str, runs: Path) -> RunDirectory:
    """The run of a job: one below `runs` whose ledger knows the job, or what its output names.

    Raises `UsageError` if there is neither.
    """
    for ledger in sorted(runs.glob("*/ledger.jsonl")):
        run = RunDirectory(ledger.parent)
        if _last_launch(job, RunHistory.read(ledger)) is not None:
            return run
    try:
        output = Path(scontrol.output_file(job))
        lines = output.read_text(errors="replace").splitlines()
    except (SlurmError, OSError) as error:
        raise UsageError(
            f"no run below {runs} belongs to job {job}, and its output cannot be read ({error}); "
            "give <run.dir>/<run.name>"
        ) from error
    named = [line.removeprefix(RUN_LINE) for line in lines if line.startswith(RUN_LINE)]
    if not named:
        raise UsageError(f"job {job} has not started a run yet: {output} names none")
    return RunDirectory(Path(named[-1]))


def read_job(job: str, history: RunHistory) -> JobStatus:
    """Ask Slurm, which forgets a job minutes after its end, and its accounting, which does not."""
    now, records = _controller(job), _accounting(job)
    if now is not None:
        state, nodes = now.state, now.nodes.held
    else:
        state, nodes = records[-1] if records else "unknown to Slurm", ""
    counts = Restarts(
        launch=_last_launch(job, history),
        controller=None if now is None else now.restarts,
        accounting=len(records) - 1 if records else None,
    )
    return JobStatus(job, state, nodes, counts)


def _controller(job: str) -> JobState | None:
    """None if it has forgotten the job, or cannot be asked from here."""
    try:
        return parse_job(scontrol.show_job(job))
    except (SlurmError, ValueError):
        return None


def _accounting(job: str) -> list[str]:
    """Nothing where no accounts are kept."""
    try:
        return scontrol.launches(job)
    except SlurmError:
        return []


def _last_launch(job: str, history: RunHistory) -> int | None:
    """The restart count that the job's last launch began with; None if it launched nothing."""
    counts = [event.restarts for event in history.events(AttemptStarted) if event.job == job]
    return counts[-1] if counts else None
