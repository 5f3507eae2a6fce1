"""What a supervisor looks after, and with what.

Looks after the nodes without ranks, and those of other jobs: the ranks start again on more nodes
once these are fit, and on fewer when one has to leave."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from kempner.cluster.machine import process_began
from kempner.cluster.slurm.hostlist import node_name
from kempner.config.sections import Config
from kempner.probe.node import ProbeQuestion, ProbeResult, measure
from kempner.run.control.launch_env import LaunchTerms
from kempner.run.control.trackers import open_trackers
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import StopReason
from kempner.run.process.retry import storage_waits
from kempner.run.process.signals import SignalInbox
from kempner.run.process.threads import keep_running, steady_time
from kempner.run.record.attempts import Attempt
from kempner.run.record.events import NodesJoined, NodesLeft, NodesTakenBack
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import Lease
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.attempt import AttemptFollower
from kempner.supervisor.hooks import Hooks, LedgerWithHooks
from kempner.supervisor.launchers.base import CannotRestart, JoinedNode, Program
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.nodes.changes import (
    SETTLED,
    DepartureAction,
    DepartureDecision,
    DepartureSituation,
    GrowSituation,
    IdleNode,
    decide_departure,
    decide_growth,
    last_growth,
    restart_seconds,
    times_lost,
    times_taken_back,
    trusted,
)
from kempner.supervisor.nodes.exclusion import Suspect, read_shared, suspects, withdraw
from kempner.supervisor.policy.restart import StorageOutage
from kempner.supervisor.policy.stop import StopOrder
from kempner.supervisor.preflight import examine
from kempner.supervisor.slurm.job_monitor import JobMonitor
from kempner.supervisor.watchdog.board import board

_OF_A_RANK = StopReason.SIGNAL, StopReason.PEER_STOPPED

LEAVES_IN = 3.0
"""Seconds before a node has to have left by which its ranks must have."""

LOOKS = 4
"""Times that a node is asked within the seconds for which it must be well."""

OFTEN, SELDOM = 1.0, 30.0
"""Fewest and most seconds between two questions."""

YOUNG = 3 * SETTLED
"""Seconds for which a node is new."""


@dataclass(frozen=True)
class Sighting:
    """The nodes that were well `at` a time (`time.monotonic`, seconds), and those that no check
    can clear; the seconds that a restart takes, as far as the ledger tells by now."""

    at: float
    well: frozenset[str]
    barred: frozenset[str]
    restart_takes: float


class IdleNodesWatch:
    """Looks at idle nodes again and again, from a thread, until it is ended; `latest` is what was
    seen. At those that are new it looks at once, and again soon."""

    def __init__(
        self,
        idle: Callable[[], Sequence[str]],
        look: Callable[[Sequence[str]], Sighting],
        every: float,
    ) -> None:
        self._idle, self._look, self._every, self.done = idle, look, every, threading.Event()
        self.latest: Sighting | None = None
        self._first_seen = dict.fromkeys(idle(), time.monotonic())
        keep_running("idle nodes", self._work, self.done.wait)

    def _work(self) -> None:
        looked_at = time.monotonic()
        while not self.done.wait(OFTEN):
            now, nodes = time.monotonic(), self._idle()
            new = [node for node in nodes if node not in self._first_seen]
            self._first_seen |= dict.fromkeys(new, now)
            young = any(now - self._first_seen[node] < YOUNG for node in nodes)
            if nodes and (new or now - looked_at >= (SETTLED if young else self._every)):
                self.latest, looked_at = self._look(nodes), now


class Growth:
    """The nodes without ranks, from attempt to attempt: since when they are well, and whether the
    ranks are to stop for them; those that have joined, and whether they have to leave. For ranks
    that say where they are, and commit when asked to stop."""

    def __init__(
        self,
        launcher: Launcher,
        run: RunDirectory,
        config: Config,
        ours: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._launcher, self._run, self._config, self._clock = launcher, run, config, clock
        self._on = ours and config.supervise.grow
        self.watched: IdleNodesWatch | None = None
        self._judged: Sighting | None = None
        self._well_since: dict[str, float] = {}
        self._returns: dict[str, int] = {}
        self._joined: dict[str, str] = {}
        self._attempt: int | None = None
        self._last_growth: float | None = None
        self._began = steady_time()

    def watch(self, attempt: Attempt, history: RunHistory) -> None:
        self._judged, self._attempt = None, attempt.number
        if not self._on:
            return
        self._returns = times_taken_back(history) | times_lost(history)
        self._last_growth = last_growth(history, self._began)
        own = suspects(history, steady_time(), self._config.resilience.suspect_for)
        wait = self._config.supervise.grow_after
        look = partial(self._look, attempt, own, history)
        every = min(SELDOM, max(OFTEN, wait / LOOKS))
        self.watched = IdleNodesWatch(lambda: self._launcher.nodes.idle.nodes, look, every)

    def end_watch(self) -> None:
        """Look no more: the attempt is over. A question that is under way is not waited for."""
        if self.watched is not None:
            self.watched.done.set()
        self.watched = None

    def consider(self, follower: AttemptFollower) -> None:
        """Ask the ranks to stop if it is time to start them again on other nodes."""
        if self._joined and follower.trains:
            for node, how in self._departing().items():
                until = max(0.0, (how.seconds_left or 0.0) - LEAVES_IN)
                until = min(self._config.supervise.stop_grace, until)
                sentence = f"{node}{how.of_job} has to leave the run: {how.reason}"
                follower.ask_to_stop(StopOrder(StopReason.NODE_LEAVES, sentence, until))
        seen = None if self.watched is None else self.watched.latest
        if seen is None or seen is self._judged:
            return
        self._judged = seen
        self._well_since = {n: self._well_since.get(n, seen.at) for n in seen.well}
        left, nodes = follower.job.seconds_to_train(follower.times), self._launcher.nodes
        since = None if self._last_growth is None else steady_time() - self._last_growth
        decision = decide_growth(
            GrowSituation(
                used=len(nodes.allocation.nodes),
                missing=nodes.idle.missing,
                idle=self._idle_nodes(),
                training=follower.trains,
                since_growth=since,
                restart_takes=seen.restart_takes,
                left=left,
                wait=self._config.supervise.grow_after,
            )
        )
        if decision.nodes:
            within = self._config.supervise.stop_grace
            within = within if left is None else min(within, left)
            follower.ask_to_stop(StopOrder(StopReason.GROW, decision.reason, within))

    def take_back(self, ledger: Ledger, attempt: Attempt) -> None:
        """Before a start: nodes that have been well for long enough are suspect no more."""
        if not self._on or not (idle := self._launcher.nodes.idle).missing:
            return
        able = trusted(self._idle_nodes(), self._config.supervise.grow_after)
        nodes = tuple(node.name for node in able if not node.joined)[: idle.missing]
        if not nodes:
            return
        reason = f"well for {self._config.supervise.grow_after:.0f} s or more"
        ledger.record(NodesTakenBack(nodes, reason), attempt.number)
        logger().warning(f"{', '.join(nodes)} taken back: {reason}")
        for node in nodes:
            del self._well_since[node]
        folder = self._config.resilience.suspects_dir
        try:
            if folder is not None:
                withdraw(Path(folder), nodes, self._names)
        except OSError as error:
            logger().warning(f"resilience.suspects_dir={folder} cannot be used: {error.strerror}")

    def note_changes(self, ledger: Ledger, attempt: Attempt) -> None:
        """Before a start, when its nodes are chosen: tell of those of other jobs that have ranks
        now, or none any more. It belongs to the attempt before, if this supervisor had one."""
        number = attempt.number if self._attempt is None else self._attempt
        used, joined = self._launcher.nodes.allocation.nodes, self._launcher.nodes.joined
        now = {node: joined[node].job for node in used if node in joined}
        gone = [node for node in self._joined if node not in now]
        if new := [node for node in now if node not in self._joined]:
            ledger.record(NodesJoined(tuple(new), tuple(now[n] for n in new)), number)
            logger().warning(f"on nodes of other jobs, too: {', '.join(new)}")
        for lost in (False, True):
            nodes = tuple(n for n in gone if (joined[n].leaves_by is None) is lost)
            if nodes:
                reason = "gone without a word" if lost else joined[nodes[0]].reason
                ledger.record(NodesLeft(nodes, reason, lost), number)
                logger().warning(f"without {', '.join(nodes)} from now on: {reason}")
        self._joined = now

    def explains(self, reason: StopReason) -> bool:
        """Whether ranks that stopped for a signal were signalled by the end of a job that had
        joined: Slurm signals all that it ends."""
        return reason in _OF_A_RANK and bool(self._departing())

    @property
    def _names(self) -> set[str]:
        """What this run is called among those that share their suspects."""
        return {self._run.path.name, self._config.run.name or ""}

    def _departing(self) -> dict[str, JoinedNode]:
        joined = self._launcher.nodes.joined
        return {n: joined[n] for n in self._joined if joined[n].leaves_by is not None}

    def _idle_nodes(self) -> tuple[IdleNode, ...]:
        now, barred = time.monotonic(), self._judged.barred if self._judged else frozenset()
        joined = self._launcher.nodes.joined
        return tuple(
            IdleNode(
                node,
                now - self._well_since[node] if node in self._well_since else None,
                self._returns.get(node, 0),
                node in barred,
                node in joined,
                joined[node].seconds_left if node in joined else None,
            )
            for node in self._launcher.nodes.idle.nodes
        )

    def _look(
        self, attempt: Attempt, own: dict[str, Suspect], history: RunHistory, idle: Sequence[str]
    ) -> Sighting:
        """Ask the nodes, and this one to compare them with."""
        here = node_name(os.environ)

        def ask(question: ProbeQuestion) -> list[ProbeResult]:
            others = self._launcher.ask_idle(question)
            mine = measure(replace(question, site_check=None))
            return [mine, *(answer for answer in others if answer.node != here)]

        nodes = [here, *(node for node in idle if node != here)]
        size, run, config = self._launcher.nodes.allocation.size, self._run, self._config
        found = examine(nodes, ask, size, attempt, run, config, self._clock)
        barred = {node for node, suspect in own.items() if suspect.failed}
        if (folder := self._config.resilience.suspects_dir) is not None:
            theirs = read_shared(Path(folder), steady_time())
            barred |= {n for n, s in theirs.items() if s.run not in self._names}
        well = found.answered - found.unfit.keys()
        takes = restart_seconds(history)  # the start of this attempt included
        return Sighting(time.monotonic(), well & set(idle), frozenset(barred), takes)


class Departures:
    """The job's own nodes that Slurm is about to take away, or that the site mends soon: the ranks
    move off them at a vote, to others of the job, or with the job by way of the queue."""

    def __init__(self, launcher: Launcher, job: JobMonitor | None, ledger: Ledger, grace: float):
        self._launcher, self._job, self._ledger, self._grace = launcher, job, ledger, grace
        self._told = ""
        self.left: frozenset[str] = frozenset()
        """Those without which the run has gone on, though they did respond."""

    def consider(self, follower: AttemptFollower) -> None:
        """Ask the ranks to stop if they have to move."""
        if self._job is None:
            return
        for event in self._job.nodes.given_back():
            self._ledger.record(event, follower.attempt.number)
        if not self._job.nodes.departing:
            return
        now = self._decide(self._job, commits=not follower.reports_nothing)
        if now.departure is DepartureAction.LEAVE_OUT:
            self._leave_out(self._job, now)
        elif now.departure is not DepartureAction.NOTHING and follower.trains:
            follower.ask_to_stop(StopOrder(StopReason.NODE_LEAVES, now.reason, self._grace))
        elif now.departure is DepartureAction.NOTHING and now.nodes and now.reason != self._told:
            self._told = now.reason
            logger().warning(now.reason)

    def leave(self, attempt: Attempt, unable: CannotRestart | None) -> CannotRestart | None:
        """Before a start: do without nodes that are to go, or say why there can be no other start.

        `unable` is why there can be none anyway."""
        if self._job is None:
            return unable
        for event in self._job.nodes.given_back():
            self._ledger.record(event, attempt.number)
        now = self._decide(self._job, commits=True)
        if unable is not None or now.departure is DepartureAction.REQUEUE:
            reasons = [unable.reason] if unable is not None else []
            bad = unable.nodes if unable is not None else ()
            if now.departure is not DepartureAction.NOTHING:
                reasons, bad = [*reasons, now.reason], (*bad, *now.nodes)
            return CannotRestart("; ".join(reasons), tuple(dict.fromkeys(bad)))
        if now.departure is not DepartureAction.NOTHING:
            self._leave_out(self._job, now)
            self._ledger.record(NodesLeft(now.nodes, now.reason), attempt.number)
        return None

    def _decide(self, job: JobMonitor, commits: bool) -> DepartureDecision:
        going, launcher = job.nodes.departing, self._launcher
        there = [node for node in launcher.nodes.all if node in going]
        return decide_departure(
            DepartureSituation(
                going=going,
                nodes=launcher.nodes.all,
                used=launcher.nodes.allocation.nodes,
                host=node_name(os.environ),
                unavoidable=launcher.nodes.unavoidable(there) if there else (),
                commits=commits,
                comes_back=bool(there) and job.comes_back,
            )
        )

    def _leave_out(self, job: JobMonitor, now: DepartureDecision) -> None:
        self.left |= set(now.nodes)
        self._launcher.leave_out(now.nodes)
        job.leave(now.nodes)
        logger().warning(f"without {', '.join(now.nodes)} from now on: {now.reason}")


@dataclass(frozen=True)
class SupervisorContext:
    run: RunDirectory
    launcher: Launcher
    program: Program
    config: Config
    signals: SignalInbox
    job: JobMonitor | None
    lease: Lease
    hooks: Hooks

    @cached_property
    def began(self) -> float | None:
        """When the supervisor's process began, or the batch script that became it or its keeper."""
        began = process_began(process="self" if board().alone else os.getppid())
        return None if began is None else round(began, 3)

    @cached_property
    def ledger(self) -> Ledger:
        return LedgerWithHooks(self.run.ledger, self.hooks)

    @cached_property
    def history(self) -> RunHistory:
        """What the ledger tells, and what is recorded in it; read again after each attempt."""
        return storage_waits().retry(partial(RunHistory.of, self.ledger), worked=True)

    @cached_property
    def outages(self) -> list[StorageOutage]:
        return []

    @property
    def clock(self) -> Callable[[], float]:
        return time.time if self.job is None else self.job.clock

    @cached_property
    def growth(self) -> Growth:
        # Outside of a job there is one machine, and no other one to grow to.
        grows = self.program.ours and self.job is not None
        return Growth(self.launcher, self.run, self.config, grows, self.clock)

    @cached_property
    def departures(self) -> Departures:
        return Departures(self.launcher, self.job, self.ledger, self.config.supervise.stop_grace)

    def terms(self) -> LaunchTerms | None:
        """What a program of the user's own is told; ours reads the configuration."""
        section, patience = self.config.supervise, self.config.resilience.patience
        if self.program.ours:
            return None
        network = self.config.distributed.model_dump_json(exclude_unset=True)
        times = section.supervisor_timeout, section.stop_grace, patience
        trackers = open_trackers(self.run.trackers) if self.config.program.one_tracker_run else ""
        return LaunchTerms(self.run.path, *times, network, trackers)
