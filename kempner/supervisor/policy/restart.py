"""Pure functions for what follows a failure: whether the ranks restart, which step in memory is
salvaged, and whether the job is requeued."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kempner.checkpoint.slots.pour import Offer
from kempner.cluster.slurm.job import JobEvent, JobState, classify, how_to_release
from kempner.cluster.slurm.scontrol import RequeueDecision
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    CorruptionFound,
    NotRequeued,
    ProgramAdvanced,
    Requeued,
    Resubmitted,
    Resumed,
    RunGivenUp,
    SalvageDismissed,
    StepSalvaged,
)
from kempner.run.record.history import Entry, RunHistory
from kempner.supervisor.policy.outcome import OUT_OF_MEMORY, Decision
from kempner.supervisor.policy.stop import PREEMPTED

HEALED_BY_A_RESTART = (ExitCode.CRASHED, ExitCode.PEERS_LOST, ExitCode.HUNG)
"""Failures that a restart can help with; the other codes need the user, or are no failures."""

GO_ON_LATER = (*HEALED_BY_A_RESTART, ExitCode.CHECKPOINT_FAILED)
"""Failures during a stop that need not come again once the job is back."""

PAUSES = (0.0, 20.0, 60.0)
"""Seconds before the first, second and later restarts in a row after a loss of nodes or network,
which may be back by then."""

FAILURES = (
    *HEALED_BY_A_RESTART,
    ExitCode.STORAGE_UNAVAILABLE,
    ExitCode.BAD_DATA,
    ExitCode.CHECKPOINT_FAILED,
    ExitCode.DIVERGED,
)
"""The outcomes after which kempner restarts the ranks or gives up. A wrong command line is not one:
nothing was trained, and the user corrects it."""


@dataclass(frozen=True)
class Failure:
    """A failed attempt. `step` is the step in which the first failed rank was, or the last one it
    had done; `committed` the last that was saved (None: none yet); `raised` the error that the rank
    reported; `code` the attempt's outcome. `node_lost`: a node or the network is at fault, which
    has its own restart budget. `unstarted` is the exit status of a program that ended within
    seconds, without a report."""

    step: int
    committed: int | None
    raised: str = ""
    node_lost: bool = False
    code: int = ExitCode.CRASHED
    unstarted: int | None = None

    def is_like(self, other: Failure) -> bool:
        """Whether both failed in the same step or at the start, in the same way."""
        if self.unstarted is not None and self.unstarted == other.unstarted:
            return self.raised == other.raised
        return bool(self.raised) and (self.step, self.raised) == (other.step, other.raised)


@dataclass(frozen=True)
class RestartDecision:
    """Whether to start again, with a reason for the user. `last`: no other restart follows unless
    something new is saved; `pause` are the seconds to wait before."""

    again: bool
    reason: str
    last: bool = False
    pause: float = 0.0


def decide_restart(
    decision: Decision, failure: Failure, earlier: Sequence[Failure], budget: int
) -> RestartDecision:
    """Whether to restart after an attempt that ended with `decision`.

    `earlier` are the failures before it, oldest first. `budget` is the number of restarts in a row
    without a new commit, counted separately for failures of the program and losses of nodes."""
    if decision.code not in HEALED_BY_A_RESTART:
        return RestartDecision(False, decision.reason)
    if decision.final:
        return RestartDecision(
            False, f"{decision.reason}, which program.fail_codes names: a restart would not help"
        )
    here = f"at step {failure.step}" if failure.step else "before the first step"
    in_a_row = takewhile(lambda f: f.committed == failure.committed, reversed(earlier))
    fruitless = [other for other in in_a_row if other.node_lost is failure.node_lost]
    if any(failure.is_like(other) for other in fruitless):
        return RestartDecision(
            False,
            f"{decision.reason}. It fails {here} every time: a restart would not help",
        )
    if len(fruitless) >= budget:
        attempts = f"{len(fruitless) + 1} attempts" if fruitless else "The attempt"
        return RestartDecision(False, f"{decision.reason}. {attempts} saved nothing new: giving up")
    start = "from the beginning" if failure.committed is None else f"from step {failure.committed}"
    last = len(fruitless) + 1 >= budget
    pause = PAUSES[min(len(fruitless), len(PAUSES) - 1)] if failure.node_lost else 0.0
    return RestartDecision(True, f"{decision.reason} {here}; restarting {start}", last, pause)


def failed_as_it_stopped(decision: Decision, verdict: RestartDecision) -> Decision | None:
    """How a job ends whose ranks were to stop and failed, where it comes back: it goes on then, if
    a restart would have helped here. A save that fails is no proof that the next one will. None
    where the run is given up."""
    if not (verdict.again or decision.code is ExitCode.CHECKPOINT_FAILED):
        return None
    reason = f"{decision.reason} while it stopped; start again to continue"
    return replace(decision, code=ExitCode.STOPPED, reason=reason)


def blame_environment(decision: Decision, worked: bool) -> Decision:
    """The outcome of an attempt whose ranks exited with a usage error, although the run has
    `worked` before: its configuration is fine, so a node or the network must be at fault."""
    if decision.code is not ExitCode.USAGE or not worked:
        return decision
    return replace(decision, code=ExitCode.CRASHED, environment=True)


def failures(history: RunHistory) -> list[Failure]:
    """The failures, except those of storage, since the run was last given up, or since a program
    that does not report last made progress."""
    found: list[Failure] = []
    for event in history.events(AttemptFailed, RunGivenUp, ProgramAdvanced):
        if not isinstance(event, AttemptFailed):
            found.clear()  # the user has started it again, or it made progress
        elif event.code != ExitCode.STORAGE_UNAVAILABLE:
            how = event.raised, event.node_lost, event.code, event.unstarted
            found.append(Failure(event.step, event.committed, *how))
    return found


def prevents_restart(failure: Failure, earlier: Sequence[Failure], worked: bool) -> bool:
    """Whether to write `GAVE_UP`, which prevents another start.

    It keeps a run that has trained and cannot go on from using nodes. If no step was made, or the
    data does not fit, the user corrects the command and starts again. `worked`: a program that
    reports no steps has run for long."""
    if failure.code == ExitCode.BAD_DATA and failure.step == 0:
        return False
    made_a_step = failure.committed is not None or any(f.step > 1 for f in (*earlier, failure))
    return made_a_step or worked


FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
"""Seconds before the first restart, and the most; each pause is twice as long as the one before."""


@dataclass(frozen=True)
class StorageOutage:
    """The number of attempts in a row that failed because of storage, and `since` when
    (`time.monotonic` of this supervisor)."""

    attempts: int
    since: float


def find_outage(
    history: RunHistory, committed: int | None, before: StorageOutage | None, now: float
) -> StorageOutage:
    """The outage to which the latest storage failure belongs. `committed` is the last step that was
    saved; a commit ends an outage. `before` is the result after the failure before."""

    def belongs(entry: Entry[AttemptFailed | RunGivenUp]) -> bool:
        event = entry.event
        storage = isinstance(event, AttemptFailed) and event.code == ExitCode.STORAGE_UNAVAILABLE
        return storage and event.committed == committed  # type: ignore[union-attr]

    entries = reversed(history.entries(AttemptFailed, RunGivenUp))
    attempts = sum(1 for _ in takewhile(belongs, entries))
    goes_on = before is not None and attempts > before.attempts
    return StorageOutage(attempts, before.since if before is not None and goes_on else now)


def decide_storage_restart(
    decision: Decision, outage: StorageOutage, now: float, patience: float
) -> RestartDecision:
    """Whether to restart after a storage failure, and after how many seconds. The ranks themselves
    have already retried for `patience` seconds; this is about storage that fails in attempt after
    attempt."""
    lasted = now - outage.since
    if lasted >= patience:
        return RestartDecision(
            False,
            f"{decision.reason}. {outage.attempts} attempts in {lasted:.0f} s found it no better",
        )
    pause = min(FIRST_PAUSE * 2.0 ** max(0, outage.attempts - 1), LONGEST_PAUSE)
    return RestartDecision(True, f"{decision.reason}; restarting in {pause:.0f} s", pause=pause)


SALVAGEABLE = (
    ExitCode.STOPPED,
    ExitCode.CRASHED,
    ExitCode.PEERS_LOST,
    ExitCode.HUNG,
    ExitCode.STORAGE_UNAVAILABLE,
    ExitCode.CHECKPOINT_FAILED,
)
"""Outcomes of an attempt after which its last steps may be salvaged."""


def is_salvageable(code: ExitCode, history: RunHistory, attempt: int) -> bool:
    """Whether the last steps of an attempt that ended with `code` are as good as any: not if silent
    corruption was found in it."""
    corrupted = history.entries(CorruptionFound)
    return code in SALVAGEABLE and not (corrupted and corrupted[-1].attempt == attempt)


SHORTEST_SALVAGE = 20.0
"""The least seconds for a salvage: a short failure of storage is usually over by then."""


@dataclass(frozen=True)
class SalvageDecision:
    """The step to salvage, or None, and why."""

    step: int | None
    reason: str


def decide_salvage(
    offers: Iterable[Offer], committed: int | None, dismissed: Collection[int]
) -> SalvageDecision:
    """The newest step that all ranks of the attempt hold, if it is newer than the last commit.

    `dismissed` are steps that were salvaged before and did not help."""
    by_step: dict[int, dict[int, Offer]] = defaultdict(dict)
    for offer in offers:
        by_step[offer.step][offer.rank] = offer
    if not by_step:
        return SalvageDecision(None, "no step is held in memory")
    whole = [step for step, held in by_step.items() if _is_whole(held)]
    if not whole:
        return SalvageDecision(None, "the memory of some ranks is lost")
    step = max(whole)
    if committed is not None and step <= committed:
        return SalvageDecision(None, "nothing newer than the last checkpoint is held in memory")
    if step in dismissed:
        return SalvageDecision(None, f"step {step} was salvaged before, and did not help")
    return SalvageDecision(step, "all ranks hold it")


def salvage_patience(history: RunHistory, attempt: int, now: float, patience: float) -> float:
    """Seconds for which a salvage may delay the restart: as long as its steps took to compute,
    since the last commit or the start of the attempt, and at most `patience`. `now` is in seconds
    since the epoch."""
    begun = history.entries(AttemptStarted, CheckpointCommitted)
    since = max((e.time for e in begun if e.attempt == attempt), default=now)
    return min(patience, max(SHORTEST_SALVAGE, now - since))


def why_not_kept(wanted: bool, history: RunHistory, since: float) -> str | None:
    """Why steps are not kept in memory although that is `wanted`; None if there is no reason. Their
    memory counts as the job's, so they are not kept once the kernel has killed a process for lack
    of memory `since` a time (seconds since the epoch)."""
    ended = [e.event for e in history.entries(AttemptEnded) if e.time >= since]
    if wanted and any(OUT_OF_MEMORY in event.reason for event in ended):
        return "the kernel has killed a process for want of memory, and without them there is more"
    return None


def useless_salvage(history: RunHistory, attempt: int, reached: int) -> int | None:
    """The salvaged step from which an attempt resumed and failed before it made another step, which
    was `reached`; None if there is none."""
    salvaged = history.entries(StepSalvaged)
    if not salvaged or salvaged[-1].event.step != history.last_step:
        return None
    step = salvaged[-1].event.step
    resumed = [e for e in history.entries(Resumed) if e.attempt == attempt]
    if salvaged[-1].attempt >= attempt or not resumed or resumed[-1].event.step != step:
        return None
    if reached > step + 1:
        return None
    return None if step in dismissed_steps(history) else step


def dismissed_steps(history: RunHistory) -> list[int]:
    return [event.step for event in history.events(SalvageDismissed)]


def _is_whole(held: dict[int, Offer]) -> bool:
    """Whether these are the parts of all ranks, by the same plan and with the same shared state."""
    first = next(iter(held.values()))
    alike = {(each.world, each.plan, each.shared, each.since) for each in held.values()}
    return len(alike) == 1 and held.keys() == set(range(first.world))


MAX_REQUEUES_WITHOUT_PROGRESS = 3
"""The most requeues of a job in a row without a new step."""

RESUMES_ELSEWHERE = (ExitCode.STOPPED, ExitCode.STORAGE_UNAVAILABLE)
"""Outcomes after which the job is requeued, so that the run continues later and perhaps
elsewhere."""


SLURM_SILENT = "Slurm does not respond: submit the same command again to continue"

_JOB_END_SENTENCES = {
    JobEvent.REQUEUE: "Slurm requeues the job itself: it continues from its checkpoint",
    JobEvent.CANCEL: "the job was cancelled: submit it again to continue",
    JobEvent.TIME_LIMIT_REACHED: "the job's time is over: submit it again to continue",
}


def _refusal(first: JobState | None, job: JobState, fruitless: int) -> str:
    """Why the job cannot be requeued in its present state; empty if it can."""
    if not job.may_go_back:
        unclear = f"the job is {job.state}: if Slurm does not requeue it, submit it again"
        # Without an earlier state, a requeue by Slurm cannot be told from a cancellation.
        known = first is not None or job.state != "COMPLETING"
        event = classify(first or job, job)
        return why_held(job) or (_JOB_END_SENTENCES.get(event, unclear) if known else unclear)
    if first is not None and job.restarts != first.restarts:
        return "the job was started again in the meantime: it continues there"
    if fruitless >= MAX_REQUEUES_WITHOUT_PROGRESS and job.times.preempt is None:
        return (
            f"the job came back {fruitless} times without a new step: it is stopped too soon. "
            "Give it a longer --time or a shorter --signal, then submit it again"
        )
    return ""


def decide_requeue(
    decision: Decision,
    first: JobState | None,
    job: JobState | None,
    batch: bool,
    fruitless: int,
    scarce: bool = False,
) -> RequeueDecision:
    """Whether to requeue the job; `first` is its state when the attempt began, `job` its state now,
    None if Slurm did not answer in time.

    Only a running job is requeued: a requeue would revive one that was cancelled. `fruitless` is
    the number of requeues in a row without a new step; it does not count in a preemption. `scarce`:
    there are not enough nodes besides the bad ones, so a job that excludes them could never
    start."""
    if decision.code not in RESUMES_ELSEWHERE and not decision.bad_nodes:
        return RequeueDecision(False, decision.reason)
    if not batch:
        return RequeueDecision(
            False, "this is an interactive allocation: start again in it to continue"
        )
    if job is None:
        return RequeueDecision(False, SLURM_SILENT)
    if refusal := _refusal(first, job, fruitless):
        return RequeueDecision(False, refusal)
    if not job.may_requeue:
        return RequeueDecision(False, "the job was submitted with --no-requeue", refused=True)
    why = f"{PREEMPTED}: " if job.times.preempt is not None else ""
    where, bad = "", ", ".join(decision.bad_nodes)
    if bad and scarce:
        where = f", to wait for {bad} because there are too few other nodes"
    elif bad:
        where = f" without {bad}"
    what = f"requeueing the job{where}; it continues from its checkpoint"
    return RequeueDecision(True, why + what)


def why_held(job: JobState) -> str:
    """Why Slurm holds the job, and what to do; empty if it does not."""
    if not job.held:
        return ""
    release = how_to_release(job.id, job.state, job.reason)
    return f"Slurm holds the job: {release}; then it continues from its checkpoint"


def killed_starts(history: RunHistory, job: str) -> int:
    """The number of the last launches of `job` in a row that were killed as they started."""
    last = (entry.event for entry in reversed(history.entries(Requeued, AttemptStarted)))
    killed = lambda e: isinstance(e, Requeued) and e.starting and e.job == job  # noqa: E731
    return sum(1 for _ in takewhile(killed, last))


def requeues_without_progress(history: RunHistory, job: str, step: int | None) -> int:
    """The number of the last requeues of `job` in a row at which the run was at `step`, as it is
    now.

    A job that its supervisor submitted again counts as the same job. Not counted are requeues of
    other jobs, which the user submitted, preemptions, which the run cannot prevent, and kills as
    the supervisor started (`killed_starts`). For a program that does not report what it saves, only
    those since its last progress count (`policy.outcome.has_advanced`)."""
    chain, steps, submitted = {job}, list[int | None](), False
    kinds = (Requeued, NotRequeued, Resubmitted, ProgramAdvanced)
    for event in reversed(history.events(*kinds)):
        if isinstance(event, ProgramAdvanced):
            break
        if isinstance(event, Resubmitted):
            submitted = event.as_job in chain
            chain |= {event.job} if submitted else set()
        elif isinstance(event, NotRequeued):
            steps += [event.step] if submitted else []
            submitted = False
        elif isinstance(event, Requeued) and event.job in chain and not event.preempted:
            steps += [] if event.starting else [event.step]
    return sum(1 for _ in takewhile(lambda before: before == step, steps))
