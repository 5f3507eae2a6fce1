"""kempner with one decision gone wrong: each is a line that an engineer could have written.

A mutant is planted by exchanging one function, or one of its lines, while a context is open.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

from kempner.checkpoint.format import names
from kempner.checkpoint.store import commit, retention, selection
from kempner.cluster.slurm import allocation, job, scontrol
from kempner.run.record import attempts
from kempner.supervisor.launchers.agents import last_resort
from kempner.supervisor.monitors import hangs
from kempner.supervisor.policy import outcome, restart, stop
from kempner.supervisor.watchdog import watch
from kempner.training import anomalies, final_save
from simulated import batch, daemon
from simulated.checks.oracle import Invariant
from simulated.faults import Kind


@dataclass(frozen=True)
class Mutant:
    """In `owner`'s function `name` the text `old` has become `new`; `caught_by` some of these.

    `users` are modules that have imported the function by its name.
    """

    what: str
    owner: Any
    name: str
    old: str
    new: str
    caught_by: frozenset[Invariant]
    users: tuple[ModuleType, ...] = ()
    kinds: tuple[Kind, ...] = ()
    """Faults that bring it to light; any do where there are none."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """While it is open, kempner has this bug."""
        wrong = rewrite(self.owner, self.name, self.old, self.new)
        with patch.object(self.owner, self.name, wrong):
            if not self.users:
                yield
                return
            user, *_ = self.users
            with patch.object(user, self.name, wrong):
                yield


def rewrite(owner: Any, name: str, old: str, new: str) -> Any:
    """The function or property `name` of `owner` with another text in one place.

    Raises `ValueError` unless `old` stands there once.
    """
    original = inspect.getattr_static(owner, name)
    function: Callable[..., Any] = original.fget if isinstance(original, property) else original
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise ValueError(f"`{old}` is not there once in {name}")
    lines = source.replace(old, new).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("def "))
    found: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + "\n".join(lines[first:]), name, "exec")
    exec(code, function.__globals__, found)
    return property(found[name]) if isinstance(original, property) else found[name]


def _mutant(
    what: str,
    owner: Any,
    name: str,
    old: str,
    new: str,
    *caught_by: Invariant,
    users: tuple[ModuleType, ...] = (),
    kinds: tuple[Kind, ...] = (),
) -> Mutant:
    return Mutant(what, owner, name, old, new, frozenset(caught_by), users, kinds)


LOST, WRITERS, REVIVED = Invariant.LOST, Invariant.WRITERS, Invariant.REVIVED
ENDLESS, UNFINISHED = Invariant.ENDLESS, Invariant.UNFINISHED

MUTANTS = (
    _mutant("a job is requeued whatever its state", restart, "_refusal",
            "if not job.may_go_back:", "if False:", REVIVED),
    _mutant("a job at its time limit is given up", job.JobState, "may_go_back",
            'self.reason == "TimeLimit"', "False", UNFINISHED, kinds=(Kind.LIMIT,)),
    _mutant("a failure during a stop ends the job", restart, "failed_as_it_stopped",
            "code=ExitCode.STOPPED", "code=decision.code", UNFINISHED,
            kinds=(Kind.CRASH, Kind.WARNING, Kind.TOLD)),
    _mutant("agents leave the job to others", last_resort, "decide_last_resort",
            "ending and job.running", "True", UNFINISHED,
            kinds=(Kind.KEEPER_KILLED, Kind.BATCH_HOST_LOST, Kind.KILL)),
    _mutant("a job that completes counts as running", job.JobState, "running",
            '{"COMPLETING", "STAGE_OUT"', '{"STAGE_OUT"', REVIVED),
    _mutant("orphaned ranks requeue without a look at the state", scontrol,
            "decide_orphan_requeue", "not (job.may_go_back or script_died)", "False", REVIVED,
            kinds=(Kind.BATCH_HOST_LOST, Kind.ORPHANS, Kind.CANCEL)),
    _mutant("orphaned ranks never requeue", scontrol, "decide_orphan_requeue",
            "return RequeueDecision(True,", "return RequeueDecision(False,", UNFINISHED,
            kinds=(Kind.BATCH_HOST_LOST,)),
    _mutant("a stop is no reason to requeue", restart, "decide_requeue",
            "decision.code not in RESUMES_ELSEWHERE", "decision.code != ExitCode.COMPLETED",
            UNFINISHED),
    _mutant("the budget never counts", restart, "decide_restart",
            "len(fruitless) >= budget", "len(fruitless) > 10 * budget", ENDLESS),
    _mutant("the budget is spent one too early", restart, "decide_restart",
            "len(fruitless) >= budget", "len(fruitless) + 1 >= budget", UNFINISHED),
    _mutant("the budget is spent one too late", restart, "decide_restart",
            "len(fruitless) >= budget", "len(fruitless) > budget", ENDLESS),
    _mutant("progress does not refill the budget", restart, "decide_restart",
            "f.committed == failure.committed", "True", UNFINISHED),
    _mutant("only the last failure is remembered", restart, "failures",
            "return found", "return found[-1:]", ENDLESS),
    _mutant("two kills at one step are taken for a bug", restart.Failure, "is_like",
            "bool(self.raised) and ", "", UNFINISHED),
    _mutant("a lost rank is not started again", restart, "decide_restart",
            "if decision.code not in HEALED_BY_A_RESTART:", "if decision.culprit is not None:",
            UNFINISHED),
    _mutant("requeues in vain are not counted", restart, "_refusal",
            "fruitless >= MAX_REQUEUES_WITHOUT_PROGRESS", "fruitless < 0", ENDLESS),
    _mutant("requeues that helped are counted", restart, "requeues_without_progress",
            "before == step", "before != step", UNFINISHED, ENDLESS),
    _mutant("preemptions are counted", restart, "requeues_without_progress",
            " and not event.preempted", "", UNFINISHED, kinds=(Kind.PREEMPT,)),
    _mutant("the end of the job is noticed when it is there", stop, "decide_stop",
            "left <= lead", "left < 0", UNFINISHED),
    _mutant("the lead leaves out the saves", stop, "stop_lead",
            "2 * longest_gap + 2 * save + SLACK", "2 * longest_gap + SLACK",
            UNFINISHED),
    _mutant("the lead is never limited", stop, "stop_lead",
            "min(lead, LARGEST_SHARE * limit)", "max(lead, 2 * limit)", UNFINISHED),
    _mutant("one rank that is done is enough", outcome, "decide_outcome",
            "if all(e.code == ExitCode.COMPLETED for e in exits):",
            "if any(e.status in (ExitCode.COMPLETED, ExitCode.STOPPED) for e in exits):",
            UNFINISHED),
    _mutant("a hang is never seen", hangs.HangDetector, "check",
            "if still <= limit:", "if True:", UNFINISHED, kinds=(Kind.HANG,)),
    _mutant("every pause is a hang", hangs.HangDetector, "patience",
            "patience(section.hang_timeout_min, ceiling, long)",
            "patience(0.0, ceiling, long and 0.01 * long)", UNFINISHED, ENDLESS),
    _mutant("a lost node stays in the allocation", allocation, "without",
            "nodes = (*left, *spare[:missing])", "nodes = allocation.nodes", UNFINISHED, ENDLESS,
            users=(daemon,)),
    _mutant("the fence is not looked at", attempts.Fence, "check",
            "if current != self.attempt:", "if current is None:", WRITERS),
    _mutant("an older attempt passes the fence", attempts.Fence, "check",
            "if current != self.attempt:",
            "if current and current.number < self.attempt.number:", WRITERS),
    _mutant("only the first of two checks of the fence", commit, "catch_up",
            "fence.check()", "pass", WRITERS),
    _mutant("an attempt does not become the live one", attempts, "_begin",
            "replace_durable(run.attempts / CURRENT, content.encode(), unique=attempt.nonce)",
            "run.attempts / CURRENT", UNFINISHED),
    _mutant("a resume takes the highest step", selection, "newest",
            "step = choose(committed, folder.latest())", "step = max(committed, default=None)",
            LOST, UNFINISHED, kinds=(Kind.SPIKES, Kind.KILL, Kind.TORN)),
    _mutant("a damaged checkpoint is not set aside", names.CheckpointFolder, "set_aside",
            "rename(self.step(step), target, arrived=target.exists)", "pass",
            ENDLESS, UNFINISHED),
    _mutant("retention keeps one too few", retention, "expendable",
            "len(branch) - keep.last", "len(branch) - keep.last + 1", LOST),
    _mutant("a rollback costs nothing", anomalies, "plan_rollback",
            "len(in_vain) >= budget", "len(in_vain) > 10 * budget", ENDLESS,
            kinds=(Kind.NAN, Kind.SPIKES)),
    _mutant("the last steps need no save", final_save, "decide_final_save",
            "if lost == 0:", "if lost < 100:", UNFINISHED),
    _mutant("the watchdog waits for a supervisor that is stuck", watch, "next_act",
            "if sight.left <= last_moment(sight.margin):", "if sight.left < -1e9:", UNFINISHED,
            users=(batch,), kinds=(Kind.SUPERVISOR_STUCK, Kind.STUCK_BEFORE_REQUEUE)),
    _mutant("the watchdog does not see that the ranks are gone", watch, "next_act",
            "if sight.ranks is False:", "if False:", UNFINISHED,
            users=(batch,), kinds=(Kind.SUPERVISOR_KILLED,)),
    _mutant("the watchdog puts back a job that was cancelled", watch, "decide_for_supervisor",
            "if not job.may_go_back:", "if False:", REVIVED,
            kinds=(Kind.SUPERVISOR_KILLED, Kind.SUPERVISOR_STUCK, Kind.CANCEL)),
    _mutant("a save is begun that cannot fit", final_save, "_save_or_pause",
            "if usual <= time:", "if usual >= time:", UNFINISHED),
)  # fmt: skip
