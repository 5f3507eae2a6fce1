"""A launch of a job as its keeper, supervisor, watchdog, ranks and Slurm see it, explored in every
order in which their steps, their deaths and their messages can come.

The decisions are the real ones. What is assumed of Slurm was seen on the tests' cluster: it takes
back a job that runs, or is at its time limit and not killed yet, and one that was cancelled and
still completes, which brings it back to life; it refuses one that is pending; it starts a job again
once all of its processes are gone, or were cut off with their node. Between a look at a job and the
request that follows directly no person cancels it: Slurm has no request that would exclude that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kempner.cluster.slurm.job import JobState, parse_job
from kempner.cluster.slurm.scontrol import RequeueDecision, decide_orphan_requeue, was_requeued
from kempner.run.process.exit_codes import ExitCode
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import decide_requeue
from kempner.supervisor.watchdog.board import SupervisorStage
from kempner.supervisor.watchdog.watch import Act, Sight, decide_for_supervisor, next_act

MARGIN = 15.0
LEFT = {"far": 1000.0, "margin": 12.0, "last": 4.0, "over": -1.0}
LATER = {"far": "margin", "margin": "last", "last": "over"}

KILLED, FAILED, DONE = 9, 1 << 8, 0
"""Statuses of wait(2)."""

_FIELDS = {
    "runs": ("RUNNING", "None", "0"),
    "queued": ("PENDING", "BeginTime", "1"),
    "again": ("RUNNING", "None", "1"),
    "cancelled": ("COMPLETING", "None", "0"),
    "timeout": ("COMPLETING", "TimeLimit", "0"),
    "bereft": ("COMPLETING", "JobLaunchFailure", "0"),
    "over": ("COMPLETED", "None", "0"),
}
JOBS = {
    name: parse_job(
        {"JobId": "7", "JobState": state, "Reason": why, "Restarts": times, "Requeue": "1"}
    )
    for name, (state, why, times) in _FIELDS.items()
}


@dataclass(frozen=True)
class Rules:
    """What the participants go by; a planted mistake replaces one."""

    act: Callable[[Sight], Act] = next_act
    decide: Callable[[Sight, int, JobState], RequeueDecision] = decide_for_supervisor
    looks_directly: bool = True
    checks_after: bool = True
    unknown_is_gone: bool = False
    keeper_waits: bool = True
    keeper_starts_again: bool = True
    keeper_wakes: bool = True
    settles_completion: bool = True
    settles_after_requeue: bool = True
    ranks_look: bool = True


class World(NamedTuple):
    """`*_at` is how far a requester is: "" before it, then "looked", "asked", "done".

    `status` is the supervisor's once its keeper has seen it; `broke` is the promise that is broken.
    """

    job: str = "runs"
    clock: str = "far"
    keeper: str = "alive"
    supervisor: str = "alive"
    watchdog: str = "alive"
    ranks: str = "none"
    stage: SupervisorStage = SupervisorStage.STARTING
    status: int | None = None
    ended: int | None = None
    wants: str = ""
    heard: bool | None = None
    asked: bool = False
    watchdog_at: str = ""
    supervisor_at: str = ""
    rank_at: str = ""
    faults: int = 2
    losses: int = 1
    events: int = 1
    broke: str = ""


def explore(rules: Rules, start: World | None = None) -> tuple[int, dict[str, list[str]]]:
    """How many states there are, and for each promise that is broken the shortest way to it."""
    first = start or World()
    seen: dict[World, tuple[World, str] | None] = {first: None}
    waiting, broken = deque([first]), dict[str, list[str]]()
    while waiting:
        world = waiting.popleft()
        follow = [] if world.broke else list(steps(world, rules))
        broke = world.broke or ("" if follow else _stranded(world))
        if broke and broke not in broken:
            broken[broke] = _way(seen, world)
        for name, after in follow:
            if after not in seen:
                seen[after] = (world, name)
                waiting.append(after)
    return len(seen), broken


def _way(seen: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    way: list[str] = []
    while (before := seen[world]) is not None:
        world, name = before
        way.append(name)
    return way[::-1]


def _stranded(world: World) -> str:
    """Where nothing moves any more: whether the run should go on, and does not."""
    if world.job in ("queued", "again", "cancelled") or world.wants in ("complete", "give up"):
        return ""
    if world.ended == FAILED and world.stage is SupervisorStage.STARTING:
        return ""  # it has refused to start
    return "stranded"


Steps = Iterator[tuple[str, World]]


def steps(world: World, rules: Rules) -> Steps:
    """All that can happen next."""
    moves = [*_keeper(world, rules), *_supervisor(world, rules), *_watchdog(world, rules)]
    moves += _ranks(world, rules)
    yield from moves
    yield from _slurm(world, bool(moves))
    yield from _faults(world)


def _keeper(world: World, rules: Rules) -> Steps:
    if world.keeper != "alive":
        return
    if world.status is None and world.ended is not None:
        yield "keeper sees the end", world._replace(status=world.ended)
    if world.watchdog == "stopped" and rules.keeper_wakes:
        yield "keeper wakes the watchdog", world._replace(watchdog="alive")
    idle = world.stage is not SupervisorStage.SETTLED and world.watchdog_at != "done"
    if world.watchdog == "dead" and idle and rules.keeper_starts_again:
        again = world._replace(watchdog="alive", watchdog_at="", heard=None, asked=False)
        yield "keeper starts a watchdog", again
    if world.status is None or world.job != "runs":
        return
    rests = rules.act(_sight(world)) is Act.REST or world.watchdog_at == "done"
    if rests or world.stage is SupervisorStage.SETTLED or not rules.keeper_waits:
        yield "keeper leaves", world._replace(keeper="left", job="over", watchdog="gone")


def _sight(world: World) -> Sight:
    stage, status, left = world.stage, world.status, LEFT[world.clock]
    return Sight(stage, status, left, MARGIN, 0, True, world.heard, 0.0, world.asked)


def _supervisor(world: World, rules: Rules) -> Steps:
    if world.supervisor != "alive":
        return
    if world.stage is SupervisorStage.STARTING:
        if world.job == "runs":
            yield "ranks start", world._replace(stage=SupervisorStage.FOLLOWS, ranks="train")
            yield "supervisor refuses", world._replace(supervisor="gone", ended=FAILED)
        return
    if world.ranks == "train" and world.clock != "far" and not world.wants:
        yield "deadline", world._replace(ranks="save", wants="requeue")
    if world.wants in ("complete", "give up") and world.ranks == "gone":
        settled = SupervisorStage.SETTLED if rules.settles_completion else world.stage
        if world.stage is not settled:
            yield "supervisor settles", world._replace(stage=settled)
        else:
            yield "supervisor leaves", world._replace(supervisor="gone", ended=DONE)
    if world.wants == "requeue" and world.ranks == "gone":
        yield from _supervisor_requeues(world, rules)


def _supervisor_requeues(world: World, rules: Rules) -> Steps:
    if not rules.settles_after_requeue and world.stage is not SupervisorStage.SETTLED:
        world = world._replace(stage=SupervisorStage.SETTLED)
    end = Decision(ExitCode.STOPPED, "stopped")
    decide = lambda job: decide_requeue(end, JOBS["runs"], job, True, 0)  # noqa: E731
    for name, after in _request(world, "supervisor_at", decide, True):
        done = after.supervisor_at == "done"
        yield name, after._replace(stage=SupervisorStage.SETTLED) if done else after
    if world.supervisor_at == "done":
        yield "supervisor leaves", world._replace(supervisor="gone", ended=FAILED)


def _watchdog(world: World, rules: Rules) -> Steps:
    if world.watchdog != "alive" or world.watchdog_at == "done":
        return
    if world.watchdog_at:
        yield from _watchdog_requeues(world, rules)
        return
    match rules.act(_sight(world)):
        case Act.ASK_FOR_RANKS:
            there = world.ranks in ("train", "save", "stuck")
            if world.heard is not there:
                yield "watchdog hears of ranks", world._replace(heard=there)
            if world.heard is None and rules.unknown_is_gone:
                yield "watchdog hears nothing", world._replace(heard=False)
        case Act.STOP_RANKS:
            stops = {"ranks": "save"} if world.ranks == "train" else {}
            yield "watchdog stops the ranks", world._replace(asked=True, **stops)
        case Act.REQUEUE:
            yield from _watchdog_requeues(world, rules)


def _watchdog_requeues(world: World, rules: Rules) -> Steps:
    decide = lambda job: rules.decide(_sight(world), 0, job)  # noqa: E731
    if rules.looks_directly:
        yield from _request(world, "watchdog_at", decide, rules.checks_after)
    elif not world.watchdog_at:  # by what it saw when the launch began
        yield "watchdog decides", world._replace(watchdog_at="early")
    else:
        yield from _ask(world, "watchdog_at", rules.checks_after)


def _ranks(world: World, rules: Rules) -> Steps:
    if world.ranks == "train" and world.supervisor == "alive" and not world.wants:
        yield "ranks complete", world._replace(ranks="gone", wants="complete")
        yield "ranks fail for good", world._replace(ranks="gone", wants="give up")
    if world.ranks == "save":
        orphaned = world.supervisor == "dead" or world.job == "bereft"
        if not orphaned or world.rank_at == "done":
            wants = world.wants or ("requeue" if world.supervisor == "alive" else "")
            yield "ranks leave", world._replace(ranks="gone", wants=wants)
        else:
            look = lambda job: decide_orphan_requeue(job, 0, False)  # noqa: E731
            always = lambda job: RequeueDecision(True, "")  # noqa: E731
            yield from _request(world, "rank_at", look if rules.ranks_look else always, True)


def _request(
    world: World, who: str, decide: Callable[[JobState], RequeueDecision], checks: bool
) -> Steps:
    """The next step of one who looks, decides, asks, and looks again, as `put_back` does."""
    if getattr(world, who) != "looked":
        job = JOBS[world.job]
        back = getattr(world, who) == "asked" and was_requeued(JOBS["runs"], job)
        goes = not back and decide(job).requeue
        yield f"{who}: looks", world._replace(**{who: "looked" if goes else "done"})
    else:
        yield from _ask(world, who, checks)


def _ask(world: World, who: str, checks: bool) -> Steps:
    after = world._replace(**{who: "asked" if checks else "done"})
    yield f"{who}: asks", _taken_back(after)
    if world.losses:
        lost = after._replace(losses=world.losses - 1)
        yield f"{who}: asks, the answer is lost", _taken_back(lost)
        yield f"{who}: asks, the request is lost", lost


def _taken_back(world: World) -> World:
    """Slurm gets a request to put the job back."""
    if world.job == "again":
        return world._replace(broke="requeued twice")
    if world.job in ("cancelled", "over"):
        return world._replace(broke="revived")
    if world.job not in ("runs", "bereft", "timeout"):
        return world  # refused
    if world.stage is SupervisorStage.SETTLED and world.wants in ("complete", "give up"):
        return world._replace(broke="revived")
    if world.wants == "complete" and world.supervisor == "gone":
        return world._replace(broke="revived")
    if world.ended == FAILED and world.stage is SupervisorStage.STARTING:
        return world._replace(broke="revived")
    in_need = LEFT[world.clock] <= 0.4 * MARGIN
    if world.ranks in ("train", "save") and world.rank_at != "looked" and not in_need:
        at_work = world.rank_at != "asked"
        return world._replace(job="queued", broke="steps lost" if at_work else "")
    return world._replace(job="queued")


def _slurm(world: World, busy: bool) -> Steps:
    """A process that can do something does it within seconds: only then time goes on to its end."""
    if world.job == "runs" and world.clock in LATER and not (busy and world.clock != "far"):
        yield "time", world._replace(clock=LATER[world.clock])
    if world.job == "runs" and world.clock == "over" and not busy:
        yield "time limit", world._replace(job="timeout")
    if world.job == "queued":
        yield "starts again", _all_killed(world._replace(job="again"))
    if world.job in ("bereft", "timeout") and not busy:
        yield "killed", _all_killed(world._replace(job="over"))


def _all_killed(world: World) -> World:
    ranks = "none" if world.ranks == "none" else "gone"
    return world._replace(keeper="gone", supervisor="gone", watchdog="gone", ranks=ranks)


def _faults(world: World) -> Steps:
    looked = "looked" in (world.watchdog_at, world.supervisor_at, world.rank_at)
    if world.events and world.job == "runs" and not looked:
        supervisor = "dead" if world.supervisor == "dead" else "gone"
        yield "scancel", world._replace(job="cancelled", supervisor=supervisor, events=0)
        cut = world._replace(job="again", events=0, ranks="gone")
        yield "the node is cut off, Slurm starts the job elsewhere", cut
    if not world.faults or world.job != "runs":
        return
    less = world._replace(faults=world.faults - 1)
    if world.supervisor in ("alive", "hung"):
        yield "supervisor killed", less._replace(supervisor="dead", ended=KILLED)
    if world.supervisor == "alive":
        yield "supervisor hangs", less._replace(supervisor="hung")
        if world.stage is SupervisorStage.FOLLOWS:
            yield "supervisor crashes", less._replace(supervisor="dead", ended=FAILED)
    if world.watchdog == "alive":
        yield "watchdog killed", less._replace(watchdog="dead")
        yield "watchdog stopped", less._replace(watchdog="stopped")
    if world.ranks in ("train", "save"):
        yield "ranks are stuck", less._replace(ranks="stuck")
        if world.keeper == "alive":
            ended = less._replace(supervisor="dead", watchdog="gone", keeper="gone", ranks="save")
            yield "keeper killed", ended._replace(job="bereft")
