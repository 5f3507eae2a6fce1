"""The nodes that a requeued job is kept away from: made anew each time, never for good."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError
from kempner.cluster.slurm.job import Demand, JobNodes, JobState, eligible
from kempner.run.output.logs import logger
from kempner.run.record.events import Requeued
from kempner.run.record.history import RunHistory

_HELD = ("JobHeldAdmin", "JobHeldUser", "BadConstraints")
"""Reasons of a job that Slurm will never start as it stands."""


@dataclass(frozen=True)
class Exclusion:
    """What a requeue excludes: `without` are our suspects, `own` what the user excluded."""

    without: tuple[str, ...]
    own: tuple[str, ...]

    @property
    def nodes(self) -> list[str]:
        """All of them, the user's first."""
        return [*self.own, *(node for node in self.without if node not in self.own)]


def of_the_user(excluded: Iterable[str], history: RunHistory, job: str) -> tuple[str, ...]:
    """What the user excluded when the job was submitted: of all that is `excluded` now, the nodes
    that no requeue of this job has added.
    """
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
    None if unknown. As many of them as are `needed` must be left, or Slurm would hold the job.
    """
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
    no others: they are all that counts.
    """
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
    demand = Demand(nodes.features, nodes.resources)
    return eligible(demand, scontrol.show_nodes(sorted(found)))


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
    """The names of a host list; of an empty one none."""
    return scontrol.hostnames(hostlist) if hostlist else []
