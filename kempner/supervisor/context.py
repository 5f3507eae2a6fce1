"""`SupervisorContext`, the parts of a supervisor; `Growth`, which watches idle and joined nodes and
has the ranks restart on more of them, or on fewer; `Departures`, which moves the ranks off nodes
that Slurm takes away."""

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
"""Seconds between the exit of a node's ranks and the time by which the node has to be gone."""

LOOKS = 4
"""Probes of a node within the seconds for which it must be healthy."""

OFTEN, SELDOM = 1.0, 30.0
"""The least and most seconds between two probes."""

YOUNG = 3 * SETTLED
"""Seconds for which a node counts as new."""


@dataclass(frozen=True)
class Sighting:
    """The nodes that were healthy `at` a time (`time.monotonic`, seconds), the nodes that no check
    can clear (`barred`), and the seconds of a restart according to the ledger."""

    at: float
    well: frozenset[str]
    barred: frozenset[str]
    restart_takes: float


class IdleNodesWatch:
    """Probes idle nodes from a thread until `done` is set; new nodes at once, and again soon.
    `latest` is the last result."""

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
    """Decides when the ranks restart on more nodes, or without a joined node that leaves. Knows
    over all attempts since when idle nodes have been healthy, and which nodes have joined. Only for
    kempner's own `train`, whose ranks report their steps and commit when asked to stop."""

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
        """Stop probing at the end of an attempt, without waiting for a probe under way."""
        if self.watched is not None:
            self.watched.done.set()
        self.watched = None

    def consider(self, follower: AttemptFollower) -> None:
        """Ask the ranks to stop if it is time to restart them on other nodes."""
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
        """Before a start: clear suspect nodes that have been healthy for long enough."""
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
        """Before a start, with its nodes chosen: record which nodes of other jobs now have ranks,
        or no longer. Recorded for the attempt before, if this supervisor had one."""
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
        """Whether ranks that stopped for a signal got it because a joined job ends."""
        return reason in _OF_A_RANK and bool(self._departing())

    @property
    def _names(self) -> set[str]:
        """The names of this run among those that share their suspects."""
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
        """Probe the idle nodes, and this one for comparison."""
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
        takes = restart_seconds(history)  # including this attempt's start
        return Sighting(time.monotonic(), well & set(idle), frozenset(barred), takes)


class Departures:
    """Moves the ranks off nodes of the job that drain or will be in maintenance: to other nodes of
    the job, or by a requeue."""

    def __init__(self, launcher: Launcher, job: JobMonitor | None, ledger: Ledger, grace: float):
        self._launcher, self._job, self._ledger, self._grace = launcher, job, ledger, grace
        self._logged = ""
        self.left: frozenset[str] = frozenset()
        """Nodes that the run has left although they responded."""

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
        elif now.departure is DepartureAction.NOTHING and now.nodes and now.reason != self._logged:
            self._logged = now.reason
            logger().warning(now.reason)

    def leave(self, attempt: Attempt, unable: CannotRestart | None) -> CannotRestart | None:
        """Before a start: leave nodes that depart, or return why there can be no other start here.
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
        """Start time of the supervisor's process, or of the batch script that became it or its
        watchdog's keeper."""
        began = process_began(process="self" if board().alone else os.getppid())
        return None if began is None else round(began, 3)

    @cached_property
    def ledger(self) -> Ledger:
        return LedgerWithHooks(self.run.ledger, self.hooks)

    @cached_property
    def history(self) -> RunHistory:
        """The ledger's entries; includes what this process records, and is read again after each
        attempt."""
        return storage_waits().retry(partial(RunHistory.of, self.ledger), worked=True)

    @cached_property
    def outages(self) -> list[StorageOutage]:
        return []

    @property
    def clock(self) -> Callable[[], float]:
        return time.time if self.job is None else self.job.clock

    @cached_property
    def growth(self) -> Growth:
        # Outside of a job there is only this machine.
        grows = self.program.ours and self.job is not None
        return Growth(self.launcher, self.run, self.config, grows, self.clock)

    @cached_property
    def departures(self) -> Departures:
        return Departures(self.launcher, self.job, self.ledger, self.config.supervise.stop_grace)

    def terms(self) -> LaunchTerms | None:
        """The terms for a user's program; kempner's own reads the configuration."""
        section, patience = self.config.supervise, self.config.resilience.patience
        if self.program.ours:
            return None
        network = self.config.distributed.model_dump_json(exclude_unset=True)
        times = section.supervisor_timeout, section.stop_grace, patience
        trackers = open_trackers(self.run.trackers) if self.config.program.one_tracker_run else ""
        return LaunchTerms(self.run.path, *times, network, trackers)
