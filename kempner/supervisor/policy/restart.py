"""What follows a failure: whether the ranks start again, from which step in memory, and whether the
job goes back into the queue. Pure functions, with reasons."""

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
"""Failures that a restart can help with; the other codes need a person, or are no failure."""

PAUSES = (0.0, 20.0, 60.0)
"""Seconds before the first, the second and later restarts in a row after a loss of nodes or of the
network, which may be back by then."""

FAILURES = (
    *HEALED_BY_A_RESTART,
    ExitCode.STORAGE_UNAVAILABLE,
    ExitCode.BAD_DATA,
    ExitCode.CHECKPOINT_FAILED,
    ExitCode.DIVERGED,
)
"""The ends after which the ranks are restarted, or kempner gives up. A wrong command line is not
one: nothing was trained, and the user corrects it and starts again."""


@dataclass(frozen=True)
class Failure:
    """An attempt that failed, because of one rank. `step` is the one that it was in, or had done
    where it was in none, `committed` the last that was saved (None: none yet), `raised` what that
    rank raised, if it said so, `code` what the attempt came to. `node_lost` says that a node or the
    network is at fault: that has a budget of its own. `unstarted` is the exit status of a program
    that ended within seconds, before it had said a word."""

    step: int
    committed: int | None
    raised: str = ""
    node_lost: bool = False
    code: int = ExitCode.CRASHED
    unstarted: int | None = None

    def is_like(self, other: Failure) -> bool:
        """Whether it is the same step that fails the same way, or the same start."""
        if self.unstarted is not None and self.unstarted == other.unstarted:
            return self.raised == other.raised
        return bool(self.raised) and (self.step, self.raised) == (other.step, other.raised)


@dataclass(frozen=True)
class RestartDecision:
    """Whether to start again, and why or why not, for a person to read.

    `last` says that it is the last time, unless something new is saved; `pause` is how many seconds
    to wait before."""

    again: bool
    reason: str
    last: bool = False
    pause: float = 0.0


def decide_restart(
    decision: Decision, failure: Failure, earlier: Sequence[Failure], budget: int
) -> RestartDecision:
    """What to do about an attempt that ended with `decision`.

    `earlier` are the failures before it, oldest first, `budget` how many restarts in a row may pass
    without a new commit, after failures of the program and after losses of nodes each."""
    if decision.code not in HEALED_BY_A_RESTART:
        return RestartDecision(False, decision.reason)
    if decision.final:
        return RestartDecision(
            False, f"{decision.reason}, which program.fail_codes names: a restart would not help"
        )
    here = f"at step {failure.step}" if failure.step else "before the first step"
    alike = [other for other in earlier if other.node_lost is failure.node_lost]
    fruitless = list(takewhile(lambda f: f.committed == failure.committed, reversed(alike)))
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


def as_it_worked_before(decision: Decision, worked: bool) -> Decision:
    """What an attempt came to, in a run that has `worked` before: that is never misconfigured.

    What its ranks refuse to start with must be the fault of a node or the network, and may pass."""
    if decision.code is not ExitCode.USAGE or not worked:
        return decision
    return replace(decision, code=ExitCode.CRASHED, environment=True)


def failures(history: RunHistory) -> list[Failure]:
    """The failures since the run was last given up, or a program that does not report got further
    than ever; without those of storage."""
    found: list[Failure] = []
    for event in history.events(AttemptFailed, RunGivenUp, ProgramAdvanced):
        if not isinstance(event, AttemptFailed):
            found.clear()  # a person has looked, and starts again; or it got further than before
        elif event.code != ExitCode.STORAGE_UNAVAILABLE:
            how = event.raised, event.node_lost, event.code, event.unstarted
            found.append(Failure(event.step, event.committed, *how))
    return found


def prevents_restart(failure: Failure, earlier: Sequence[Failure], worked: bool) -> bool:
    """Whether `GAVE_UP` is to keep a run from another start.

    It keeps nodes from being used by a run that has trained and cannot go on. Where no step was
    made, or the data does not fit, the user corrects the command and starts again. `worked` says
    that a program of whose steps nothing is known has run for long."""
    if failure.code == ExitCode.BAD_DATA and failure.step == 0:
        return False
    made_a_step = failure.committed is not None or any(f.step > 1 for f in (*earlier, failure))
    return made_a_step or worked


FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
"""Seconds from the first failure to the restart, and the most: each pause is twice as long."""


@dataclass(frozen=True)
class StorageOutage:
    """Attempts in a row that ended because of storage: how many, and `since` when, on the monotonic
    clock of the supervisor that has seen them: the time of day may be set meanwhile."""

    attempts: int
    since: float


def find_outage(
    history: RunHistory, committed: int | None, before: StorageOutage | None, now: float
) -> StorageOutage:
    """The failures that have just ended an attempt, and those before it.

    `committed` is the last step that was saved: whatever was saved in between ends an outage.
    `before` is what this process has found after the failure before."""

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
    """Whether to start the ranks again, and after how many seconds.

    Each attempt has been patient itself; this is about storage that lasts until the ranks leave,
    and fails again."""
    lasted = now - outage.since
    if lasted >= patience:
        return RestartDecision(
            False,
            f"{decision.reason}. {outage.attempts} attempts in {lasted:.0f} s found it no better",
        )
    pause = min(FIRST_PAUSE * 2.0 ** max(0, outage.attempts - 1), LONGEST_PAUSE)
    return RestartDecision(True, f"{decision.reason}; restarting in {pause:.0f} s", pause=pause)


WORTH_IT = (
    ExitCode.STOPPED,
    ExitCode.CRASHED,
    ExitCode.PEERS_LOST,
    ExitCode.HUNG,
    ExitCode.STORAGE_UNAVAILABLE,
    ExitCode.CHECKPOINT_FAILED,
)
"""Ends of an attempt after which the state of its last steps is as good as any other."""


WAIT_AT_LEAST = 20.0
"""Seconds that a salvage gets in any case: storage that hiccups is back by then, as a rule."""


@dataclass(frozen=True)
class SalvageDecision:
    """The step to salvage, None for none; and why."""

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
    """Seconds for which a salvage may hold up the restart: as long as what it saves took to make,
    since the last commit or the begin of the attempt; `patience` at most.

    `now` in seconds since the epoch."""
    begun = history.entries(AttemptStarted, CheckpointCommitted)
    since = max((e.time for e in begun if e.attempt == attempt), default=now)
    return min(patience, max(WAIT_AT_LEAST, now - since))


def why_not_kept(wanted: bool, history: RunHistory, since: float) -> str | None:
    """Why steps are not kept in memory, although that is `wanted`; None if they are, or were not.

    Their memory counts for the job: once the kernel has killed a process for want of it since a
    time (seconds since the epoch), there is more room without them."""
    ended = [e.event for e in history.entries(AttemptEnded) if e.time >= since]
    if wanted and any(OUT_OF_MEMORY in event.reason for event in ended):
        return "the kernel has killed a process for want of memory, and without them there is more"
    return None


def in_vain(history: RunHistory, attempt: int, reached: int) -> int | None:
    """The salvaged step from which an attempt has gone on without making another; None if not so.

    `reached` is the step that it was in when it failed."""
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
    """Whether these are the parts of all ranks, made by the same plan, and what they share is the
    same."""
    first = next(iter(held.values()))
    alike = {(each.world, each.plan, each.shared, each.since) for each in held.values()}
    return len(alike) == 1 and held.keys() == set(range(first.world))


MAX_REQUEUES_WITHOUT_PROGRESS = 3
"""Times in a row that a job is put back into the queue without a new step."""

RESUMES_ELSEWHERE = (ExitCode.STOPPED, ExitCode.STORAGE_UNAVAILABLE)
"""Ends after which the run goes on when the job comes back, later and perhaps on other nodes."""


SLURM_SILENT = "Slurm does not respond: submit the same command again to continue"

_WHAT_BECOMES_OF_IT = {
    JobEvent.REQUEUE: "Slurm requeues the job itself: it continues from its checkpoint",
    JobEvent.CANCEL: "the job was cancelled: submit it again to continue",
    JobEvent.TIME_LIMIT_REACHED: "the job's time is over: submit it again to continue",
}


def _refusal(first: JobState | None, job: JobState, fruitless: int) -> str:
    """Why not to requeue a job as it is now; empty if nothing speaks against it."""
    if not job.running:
        unclear = f"the job is {job.state}: if Slurm does not requeue it, submit it again"
        # Without an earlier look a requeue that Slurm has begun looks like a cancel.
        known = first is not None or job.state != "COMPLETING"
        told = _WHAT_BECOMES_OF_IT.get(classify(first or job, job), unclear) if known else unclear
        return why_held(job) or told
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
    """Whether to put the job back into the queue; `first` is the job as it was at the beginning,
    `job` as it is, None if Slurm did not say in time.

    Only a job that still runs: asked to requeue one that was cancelled, Slurm brings it back to
    life. `fruitless` counts the times in a row that it came back and made no step; for a preemption
    it is never too often. `scarce` says that there are not enough nodes besides the bad ones: a job
    that excluded them could never start, and Slurm would hold it for good."""
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
    """Why Slurm does not start a job again, and what to do; empty if it does."""
    if not job.held:
        return ""
    told = how_to_release(job.id, job.state, job.reason)
    return f"Slurm holds the job: {told}; then it continues from its checkpoint"


def killed_starts(history: RunHistory, job: str) -> int:
    """How many launches of `job`, the last ones in a row, were killed as they started."""
    last = (entry.event for entry in reversed(history.entries(Requeued, AttemptStarted)))
    killed = lambda e: isinstance(e, Requeued) and e.starting and e.job == job  # noqa: E731
    return sum(1 for _ in takewhile(killed, last))


def requeues_without_progress(history: RunHistory, job: str, step: int | None) -> int:
    """How many of the last requeues of `job`, in a row, found the run at `step`, where it is.

    A job that was submitted again by its supervisor is the same job. Requeues of any other job do
    not count: a user has submitted that one. Nor does a preemption, which the run cannot prevent,
    or a kill as the supervisor started (`killed_starts`).
    Of a program that does not say what it saves, only those count after which it made no progress
    (`policy.program`)."""
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
