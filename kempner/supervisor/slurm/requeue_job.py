"""Requeues the Slurm job after the ranks have exited, or submits its batch script again where users
may not requeue; else reports why not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError, submission_environment
from kempner.cluster.slurm.directives import read_pairs, regroup
from kempner.cluster.slurm.job import JobState, restart_count
from kempner.cluster.slurm.scontrol import PutBack, RequeueDecision, RequeueOutcome, put_back
from kempner.run.control.launch_env import SUPERVISED
from kempner.run.output.logs import logger
from kempner.run.record.events import JobHandedBack, LedgerEvent, NotRequeued, Requeued, Resubmitted
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import (
    RESUMES_ELSEWHERE,
    SLURM_SILENT,
    decide_requeue,
    requeues_without_progress,
    why_held,
)
from kempner.supervisor.slurm.job_monitor import JobMonitor
from kempner.supervisor.slurm.job_nodes import (
    Exclusion,
    candidates,
    choose_excluded,
    excluded_by_user,
    expanded,
)
from kempner.supervisor.watchdog.board import WatchdogVerdict, board


def same_again(
    submit_line: str,
    arguments: Sequence[str],
    script: Path,
    without: Sequence[str] = (),
    shown: str = "",
) -> list[str]:
    """The sbatch command that submits `script` with the options of `submit_line`, excluding the
    nodes `without`.

    Slurm stores the submit line without its quotes. So what follows the script in it must be the
    `arguments` that reached kempner, and the script's path and option values that may contain
    spaces must agree with `shown`, the output of `scontrol show job`. Raises `ValueError` with a
    sentence if they do not, or for a job array."""
    handed_on = f" {' '.join(arguments)}"
    words = submit_line.removesuffix(handed_on).split(" ")
    if not submit_line.endswith(handed_on) or len(words) < 2:
        raise ValueError(f"`{submit_line}` does not pass its arguments to kempner unchanged")
    if any(word.partition("=")[0] in ("-a", "--array") for word in words):
        raise ValueError(f"`{submit_line}` would submit all elements of the array again")
    path = Path(words[-1])
    if not re.search(rf" Command=(?:\S*/)?{re.escape(path.name)}(?: |$)", shown):
        raise ValueError(
            f"`{submit_line}`: its script does not pass all of its arguments to kempner, or its "
            "path has spaces"
        )
    options = regroup(words[1:-1])
    for name, field, end in _WITH_SPACES:
        values = [value for option, value in read_pairs(options) if option == name]
        if values and not re.search(rf" {field}={re.escape(values[-1])} +{end}", f"{shown} "):
            raise ValueError(f"`{submit_line}`: where --{name} ends cannot be seen without quotes")
    excluded = [f"--exclude={','.join(without)}"] if without else []
    return [words[0], *options, *excluded, str(script), *arguments]


_WITH_SPACES = (
    ("job-name", "JobName", r"(?:SLUID|UserId)="),
    ("comment", "Comment", r"(?:[A-Z][\w:/]*=|$)"),
)
"""Options whose values may contain spaces: the field in which `scontrol show job` prints each, and
what follows it there."""


def resubmit(job: str, arguments: Sequence[str], folder: Path, without: Sequence[str]) -> str:
    """Submit the job's script again with the same resources and arguments, excluding the nodes
    `without`; the new job id.

    Keeps the script in the attempt's `folder`, so that an attempt does this at most once. Raises
    `SlurmError` or `ValueError` with a sentence."""
    script = folder / "batch.sh"
    if script.exists():
        raise ValueError(f"{script} was already submitted")
    shown = scontrol.show_whole_job(job)
    command = same_again(scontrol.submit_line(job), arguments, script, without, shown)
    scontrol.write_script(job, script)
    # Without this job's variables, which the new job would take for its own (a restart count, say).
    environ = submission_environment(os.environ)
    environ.pop(SUPERVISED, None)
    return scontrol.submit(command, environ)


PARTITION_WITHIN = 60.0
"""Seconds for which to ask which nodes the job could have instead of bad ones."""

NODES_WITHIN, NODES_TRIES = 60.0, 3
"""Seconds for each try, and tries, to set the nodes of a job that is already requeued. Slurm may
end this process meanwhile."""


def requeue_or_explain(
    job: JobMonitor,
    at_first: JobState | None,
    attempt: int,
    decision: Decision,
    run: RunDirectory,
    ledger: Ledger,
    history: RunHistory,
    suspect: Collection[str] = (),
    since_left: Callable[[], float] | None = None,
) -> None:
    """Requeue the job after an attempt, without the `suspect` nodes if there are enough others, or
    report why not. Requeues before it reports: Slurm leaves this process only seconds. `at_first`
    is the job's state when the attempt began, None if unknown; `since_left` gives the seconds since
    the last rank left."""
    job.close()
    step, bad = history.last_step, decision.bad_nodes  # what is read now may hang
    if decision.code not in RESUMES_ELSEWHERE and not bad:
        _restore_size(job, job.state(within=0.0))
        return
    exclusion = _exclusion(job, bad, suspect, history)
    scarce = bool(bad) and job.batch and not set(bad) <= set(exclusion.without)
    after = job.node_timeout() if scarce else 0.0
    fruitless = requeues_without_progress(history, job.id, step)
    if decision.scheduler and step is not None:
        fruitless = 0  # it has worked, and is not at fault
    decide = partial(decide_requeue, decision, at_first, fruitless=fruitless, scarce=scarce)
    end = _try(job, lambda state: decide(state, job.batch))
    record = partial(ledger.record, attempt=attempt)
    board().settle()
    if end.outcome is RequeueOutcome.DONE:
        _record_requeue(job, end, exclusion, after, step, record, since_left)
        return
    if not _was_requeued(history, attempt):  # else a rank did so, which took this process for dead
        record(NotRequeued(step, end.reason))
    if end.outcome is RequeueOutcome.REFUSED:
        logger().error(f"{end.reason}; {_go_on(job, run, ledger, attempt, exclusion)}")
        return
    logger().warning(end.reason)
    _restore_size(job, end.state)


def _record_requeue(
    job: JobMonitor,
    end: PutBack,
    exclusion: Exclusion,
    after: float,
    step: int | None,
    record: Callable[[LedgerEvent], None],
    since_left: Callable[[], float] | None,
) -> None:
    """Record that the job is requeued, and have it ask for its full number of nodes without the
    excluded ones."""
    asked = job.ask_for_all(end.state, exclusion, after, within=0.0)
    preempted = end.asked is not None and end.asked.times.preempt is not None
    facts, without = job_facts(job), exclusion.without
    if board().verdict is not WatchdogVerdict.REQUEUED:  # else the watchdog records it
        record(Requeued(step, *facts, reason=end.reason, preempted=preempted, without=without))
    if since_left is not None:
        record(JobHandedBack(round(since_left(), 1)))
    logger().warning(end.reason)
    for _ in range(NODES_TRIES):
        if asked:
            break
        asked = job.ask_for_all(end.state, exclusion, after, NODES_WITHIN)
    seen = end.state
    state = seen if seen is not None and seen.queued else job.state(within=0.0)
    if state is not None and (why := why_held(state)):  # recorded, since hooks run on it
        record(NotRequeued(step, why))
        logger().error(why)


STOPPED_FOR_GOOD = "stopped by kempner stop, and so not requeued: start it again to continue"


def end_without_requeue(job: JobMonitor, ledger: Ledger, history: RunHistory, attempt: int) -> None:
    """Let a job end after an attempt, because of `kempner stop`."""
    job.close()
    ledger.record(NotRequeued(history.last_step, STOPPED_FOR_GOOD), attempt)
    logger().warning(STOPPED_FOR_GOOD)


def _try(job: JobMonitor, decide: Callable[[JobState | None], RequeueDecision]) -> PutBack:
    """Requeue the job, retrying as long as that is useful; an interactive allocation is left
    alone."""
    if not job.batch:
        return PutBack(RequeueOutcome.LEFT, decide(None).reason)
    end = put_back(job.id, decide, job.try_until(), job.note_silence)
    if end.outcome is RequeueOutcome.SILENT:
        return replace(end, reason=f"{SLURM_SILENT} ({end.reason})")
    return end


def _restore_size(job: JobMonitor, state: JobState | None) -> None:
    """Have a job that Slurm itself requeues ask for its first number of nodes: some may have been
    given back."""
    if state is not None and state.restarts > restart_count(os.environ):
        job.ask_for_all(state)


def _was_requeued(history: RunHistory, attempt: int) -> bool:
    return any(entry.attempt == attempt for entry in history.refresh().entries(Requeued))


def _exclusion(
    job: JobMonitor, bad: Sequence[str], suspect: Collection[str], history: RunHistory
) -> Exclusion:
    """The nodes to exclude from the requeued job."""
    state = job.state(PARTITION_WITHIN if bad else 0.0) if job.batch else None
    if state is None:
        return Exclusion((), ())
    own = excluded_by_user(expanded(state.nodes.excluded), history, job.id)
    if not (bad or suspect):
        return Exclusion((), own)
    without = choose_excluded(bad, suspect, candidates(state, own), job.needed(state))
    return Exclusion(without, own)


def _go_on(
    job: JobMonitor, run: RunDirectory, ledger: Ledger, attempt: int, exclusion: Exclusion
) -> str:
    """Submit a job that Slurm did not requeue again, if configured; a clause for the log that says
    what happened or what to type."""
    if job.arguments is not None:
        # The submit line has the user's own exclusions already.
        without = exclusion.nodes if exclusion.without else []
        try:
            new = resubmit(job.id, job.arguments, run.attempt(attempt), without)
        except (SlurmError, ValueError) as error:
            return f"slurm.resubmit failed: {error}; submit the same command again to continue"
        ledger.record(Resubmitted(job.id, as_job=new), attempt)
        return f"the run continues as job {new}"
    return "submit the same command again to continue, or set slurm.resubmit=true"


def job_facts(job: JobMonitor) -> tuple[str, int, str | None]:
    """The job's id, restart count and node list, as the ledger records them."""
    return job.id, restart_count(os.environ), os.environ.get("SLURM_JOB_NODELIST")
