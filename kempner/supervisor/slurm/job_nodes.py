"""The nodes of a job: which of them drain or go into maintenance, which are given back to Slurm,
and which are excluded when it is requeued (anew for each requeue, never permanently)."""

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
"""Seconds between two questions about reservations, each asked instead of one about the nodes."""

SOON_AGAIN, TRIES = 4.0, 12
"""Seconds between two questions while the job waits to give nodes back, and how many are asked at
that rate."""

SENT_EVERY = 4
"""Before every n-th of these questions Slurm is made to contact the nodes."""


class NodesWatch:
    """Watches the nodes of one job, and gives back those that the run leaves, as soon as Slurm
    would give them to no other job."""

    def __init__(self, job: str, batch: bool) -> None:
        self._job, self._batch = job, batch
        self._drained: Mapping[str, str] = {}
        self._in_maintenance: Mapping[str, str] = {}
        self._left: frozenset[str] = frozenset()
        self._tries = TRIES
        self._given: list[NodesGivenBack] = []
        self._changed = threading.Condition()
        # Slurm starts no job on a node that drains or has maintenance planned in the job's time,
        # so there is nothing to ask at its start.
        self.due = self._maintenance_due = time.monotonic() + NODES_EVERY

    @property
    def departing(self) -> dict[str, str]:
        """The nodes that drain or will be in maintenance, each with the reason, as of the last
        look."""
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
        """What was given back since the last call."""
        with self._changed:
            given, self._given = self._given, []
        return given

    def look(self, job: JobState, now: float) -> None:
        """Ask Slurm once. `job` is its last known state, `now` the controller's clock in seconds
        since the epoch. Raises `SlurmError`."""
        if not self._left and time.monotonic() >= self._maintenance_due:
            self._maintenance_due = time.monotonic() + MAINTENANCE_EVERY
            self.due = time.monotonic() + SOON_AGAIN
            self._look_at_reservations(job, now)
            return
        hurry = bool(self._left) and self._tries < TRIES
        self.due = time.monotonic() + (SOON_AGAIN if hurry else NODES_EVERY)
        held = scontrol.hostnames(job.nodes.held) if job.nodes.held else []
        if hurry:
            self._ping_nodes()
        shown = scontrol.shown_nodes(held, within=0.0) if held else []
        self._drained = drained(node for node in shown if node.name not in self._left)
        self._give_back(shown)

    def _ping_nodes(self) -> None:
        due, self._tries = self._tries % SENT_EVERY == 0, self._tries + 1
        try:
            if due:
                scontrol.ping_nodes(self._job)
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
"""The pending reasons with which Slurm never starts a job unless it is changed."""


@dataclass(frozen=True)
class Exclusion:
    """The nodes that a requeue excludes: `without` are kempner's suspects, `own` the user's."""

    without: tuple[str, ...]
    own: tuple[str, ...]

    @property
    def nodes(self) -> list[str]:
        return [*self.own, *(node for node in self.without if node not in self.own)]


def excluded_by_user(excluded: Iterable[str], history: RunHistory, job: str) -> tuple[str, ...]:
    """The nodes that the user excluded at submission: those `excluded` now that no requeue of this
    job has added."""
    ours = {
        node for event in history.events(Requeued) if event.job == job for node in event.without
    }
    return tuple(node for node in excluded if node not in ours)


def choose_excluded(
    bad: Collection[str], suspect: Collection[str], candidates: Collection[str] | None, needed: int
) -> tuple[str, ...]:
    """The nodes to exclude: all suspects, or only the `bad` nodes, or none.

    `candidates` are the nodes on which the job could run, without those that its user excludes;
    None if unknown. At least `needed` of them must remain, or Slurm would hold the job. Suspects
    that are no candidates are not excluded: they may be of another cluster."""
    if candidates is None:
        return ()
    for without in ({*bad, *set(suspect).intersection(candidates)}, set(bad)):
        if len(set(candidates) - without) >= needed:
            return tuple(sorted(without))
    return ()


def candidates(job: JobState, own: Collection[str]) -> set[str] | None:
    """The nodes on which a job could run, in whatever state; None if Slurm does not say.

    These are the nodes of its partitions and its reservation with the features and the GPU type
    that it asks for, without those in `own`, which its user excludes. A job that names its nodes
    can run on no others."""
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


def release_if_held(job: str, state: JobState | None, exclusion: Exclusion) -> bool:
    """Drop the suspects from the exclusion if Slurm holds the job; whether it was held."""
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
