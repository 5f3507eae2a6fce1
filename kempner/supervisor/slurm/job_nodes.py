"""The nodes of a job: what Slurm is about to do with its own, which of them it gets back, and which
it is kept away from when it is requeued: made anew each time, never for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError
from kempner.cluster.slurm.job import JobNodes, JobState, eligible
from kempner.cluster.slurm.scontrol import NodeShown
from kempner.run.output.logs import logger
from kempner.run.record.events import NodesGivenBack, Requeued
from kempner.run.record.history import RunHistory
from kempner.supervisor.nodes.changes import drained, in_maintenance, may_give_back

NODES_EVERY = 30.0
"""Seconds between two questions about the nodes."""

MAINTENANCE_EVERY = 600.0
"""Seconds between two questions about reservations, each in the place of one about the nodes."""

SOON_AGAIN, TRIES = 4.0, 12
"""Seconds between two questions while the job waits to give nodes back, and how often they come so
soon."""

SENT_EVERY = 4
"""Of these questions, before each fourth the controller is made to try the nodes."""


class NodesWatch:
    """Of one job; those that it is to do without are `leave`d, and given back when Slurm itself
    gives them to no other job."""

    def __init__(self, job: str, batch: bool) -> None:
        self._job, self._batch = job, batch
        self._drained: Mapping[str, str] = {}
        self._in_maintenance: Mapping[str, str] = {}
        self._left: frozenset[str] = frozenset()
        self._tries = TRIES
        self._given: list[NodesGivenBack] = []
        self._changed = threading.Condition()
        # Slurm starts no job on a node of which a maintenance is planned in the job's time, nor on
        # one that drains: nothing is asked as it begins.
        self.due = self._maintenance_due = time.monotonic() + NODES_EVERY

    @property
    def going(self) -> dict[str, str]:
        """The nodes that are to go, each with a reason, as Slurm said when it was last asked."""
        return {**self._in_maintenance, **self._drained}

    def leave(self, nodes: Collection[str]) -> None:
        if nodes and self._batch:
            with self._changed:
                self._left, self._tries = self._left | set(nodes), 0
            self.due = 0.0

    def wait_for_return(self, nodes: Collection[str], within: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left.isdisjoint(nodes), within)

    def given_back(self) -> list[NodesGivenBack]:
        """What was given back and has not been told yet."""
        with self._changed:
            told, self._given = self._given, []
        return told

    def look(self, job: JobState, now: float) -> None:
        """Ask once. `job` is what is known of it, `now` the controller's clock in seconds since the
        epoch. Raises `SlurmError`."""
        if not self._left and time.monotonic() >= self._maintenance_due:
            self._maintenance_due = time.monotonic() + MAINTENANCE_EVERY
            self.due = time.monotonic() + SOON_AGAIN
            self._look_at_reservations(job, now)
            return
        hurry = bool(self._left) and self._tries < TRIES
        self.due = time.monotonic() + (SOON_AGAIN if hurry else NODES_EVERY)
        held = scontrol.hostnames(job.nodes.held) if job.nodes.held else []
        if hurry:
            self._have_nodes_tried()
        shown = scontrol.shown_nodes(held, within=0.0) if held else []
        self._drained = drained(node for node in shown if node.name not in self._left)
        self._give_back(shown)

    def _have_nodes_tried(self) -> None:
        due, self._tries = self._tries % SENT_EVERY == 0, self._tries + 1
        try:
            if due:
                scontrol.have_nodes_tried(self._job)
        except SlurmError as error:  # then Slurm notices by itself, later
            logger().info("Slurm does not try the job's nodes", reason=str(error))

    def _look_at_reservations(self, job: JobState, now: float) -> None:
        planned, held = scontrol.reservations(within=0.0), scontrol.hostnames(job.nodes.held)
        own, end = job.nodes.reservation, job.times.end
        found = in_maintenance(planned, held, now, end, own, scontrol.hostnames)
        self._in_maintenance = {n: why for n, why in found.items() if n not in self._left}

    def _give_back(self, shown: Sequence[NodeShown]) -> None:
        ready = may_give_back(self._left, shown)
        if not ready:
            return
        held = scontrol.hostnames(scontrol.job_state(self._job, within=0.0).nodes.held)
        there = [node for node in ready if node in held]
        if there:  # Slurm may have taken it by itself
            scontrol.keep_nodes(self._job, [node for node in held if node not in ready])
            reason = "; ".join(f"{node}: {ready[node]}" for node in there)
            logger().warning(f"given back to Slurm: {reason}")
        with self._changed:
            self._left -= ready.keys()
            if there:
                self._given.append(NodesGivenBack(tuple(there), reason))
            self._changed.notify_all()


_HELD = ("JobHeldAdmin", "JobHeldUser", "BadConstraints")
"""Reasons of a job that Slurm will never start as it stands."""


@dataclass(frozen=True)
class Exclusion:
    """What a requeue excludes: `without` are our suspects, `own` what the user excluded."""

    without: tuple[str, ...]
    own: tuple[str, ...]

    @property
    def nodes(self) -> list[str]:
        return [*self.own, *(node for node in self.without if node not in self.own)]


def of_the_user(excluded: Iterable[str], history: RunHistory, job: str) -> tuple[str, ...]:
    """What the user excluded when the job was submitted: of all that is `excluded` now, the nodes
    that no requeue of this job has added."""
    ours = {
        node for event in history.events(Requeued) if event.job == job for node in event.without
    }
    return tuple(node for node in excluded if node not in ours)


def choose(
    bad: Collection[str], suspect: Collection[str], candidates: Collection[str] | None, needed: int
) -> tuple[str, ...]:
    """The nodes to do without: all suspects, or the `bad` ones alone, or none.

    Suspects that it would not get anyway stay out: another run's may be of another cluster.
    `candidates` are the nodes on which the job could run, those that its user excludes left out;
    None if unknown. As many of them as are `needed` must be left, or Slurm would hold the job."""
    if candidates is None:
        return ()
    for without in ({*bad, *set(suspect).intersection(candidates)}, set(bad)):
        if len(set(candidates) - without) >= needed:
            return tuple(sorted(without))
    return ()


def candidates(job: JobState, own: Collection[str]) -> set[str] | None:
    """The nodes on which a job could run, in whatever state they are; None if Slurm does not say.

    Those of its partitions and its reservation that have the features and the type of GPU that it
    asks for, without those that its user excludes. A job that asks for certain nodes by name gets
    no others: they are all that counts."""
    nodes = job.nodes
    try:
        if nodes.required:
            return set(scontrol.hostnames(nodes.required))
        found = scontrol.partition_nodes(nodes.partition)
        if nodes.reservation:
            found &= scontrol.reservation_nodes(nodes.reservation)
        fitting = _fitting(nodes, found)
    except (SlurmError, KeyError, ValueError) as error:
        logger().warning("cannot ask Slurm about the partition", reason=str(error))
        return None
    return None if fitting is None else fitting - set(own)


def _fitting(nodes: JobNodes, found: Collection[str]) -> set[str] | None:
    if not found or not (nodes.features or nodes.resources):
        return set(found)
    return eligible(nodes.features, nodes.resources, scontrol.show_nodes(sorted(found)))


def let_go_if_held(job: str, state: JobState | None, exclusion: Exclusion) -> bool:
    """Give up our part of the exclusion if Slurm holds the job; whether it did."""
    if state is None or state.reason not in _HELD or not exclusion.without:
        return False
    logger().warning("Slurm holds the job: excluding no suspect nodes", reason=state.reason)
    try:
        scontrol.exclude(job, exclusion.own)
        scontrol.release(job)
    except SlurmError as error:
        logger().error("the job is held", reason=str(error))
    return True


def expanded(hostlist: str) -> Sequence[str]:
    return scontrol.hostnames(hostlist) if hostlist else []
