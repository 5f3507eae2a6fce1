"""Probes the job's nodes with srun."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError
from kempner.cluster.slurm.node_step import run_on_nodes
from kempner.probe import node as probe
from kempner.probe import processes
from kempner.probe.node import ProbeQuestion, ProbeResult
from kempner.probe.processes import read_answer
from kempner.run.output.logs import logger
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.supervisor.nodes.exclusion import node_flags

PROBE_WITHIN = 15.0
"""Seconds for a trivial task on all nodes. A healthy node takes 0.1 s; srun itself gives up after
twelve seconds."""

SURVEY_WITHIN = 30.0
"""Seconds for all nodes to answer a question of the probe."""

TRIES = 3
"""Tries if no node answers: then the controller is probably busy."""

_PAUSE = 2.0
"""Seconds between two tries."""


def present(
    nodes: Sequence[str], pids: Mapping[str, Sequence[int]], allocation: str | None
) -> dict[str, tuple[int, ...]]:
    """The nodes that answer, asked in one step, each with those of its `pids` that still run.

    `pids` are processes by node, `allocation` the job to ask in, None for the job of this process.
    If no node answers, no step could be started, and nothing is known of the nodes."""
    for left in reversed(range(TRIES)):
        lines = _run(nodes, allocation, _look_at(json.dumps(dict(pids))), PROBE_WITHIN)
        answers = dict(answer for line in lines if (answer := read_answer(line)) is not None)
        if answers or not left:
            return answers
        time.sleep(_PAUSE)
    raise AssertionError("the last try returns")


def survey(
    question: ProbeQuestion, nodes: Sequence[str], allocation: str | None
) -> list[ProbeResult]:
    """Ask all `nodes` in one step; the answers until srun gave up. It gives up a dead node after
    some ten seconds, when the others have long answered. Without srun there are none: the start of
    the ranks reports that."""
    lines = _run(nodes, allocation, probe.command(question), survey_within(question))
    return probe.read_results(lines)


def survey_within(question: ProbeQuestion) -> float:
    """Seconds for the answers to a question, including the site's own check."""
    check = question.site_check
    return SURVEY_WITHIN + (0.0 if check is None else check.seconds)


def look(node: str, pids: Sequence[int], allocation: str | None) -> list[str]:
    """Descriptions of processes on a node; empty if it does not answer."""
    return _run([node], allocation, _look_at(*map(str, pids)), PROBE_WITHIN)


def kill(node: str, pid: int, allocation: str | None) -> None:
    """Send SIGKILL to a process on a node, if a step can be started there."""
    _run([node], allocation, ["kill", "-KILL", str(pid)], PROBE_WITHIN)


def states(nodes: Sequence[str]) -> dict[str, frozenset[str]]:
    """The state flags of these nodes according to Slurm; empty if it does not answer."""
    if not nodes:
        return {}
    try:
        return {node.name: node_flags(node.state) for node in scontrol.shown_nodes(nodes)}
    except SlurmError as error:
        logger().info("cannot ask Slurm about the nodes", reason=str(error))
        return {}


def _look_at(*asked: str) -> list[str]:
    return [sys.executable, *SAFE_MODULE, processes.__name__, *asked]


def _run(
    nodes: Sequence[str], allocation: str | None, task: Sequence[str], within: float
) -> list[str]:
    try:
        output = run_on_nodes(nodes, allocation, task, within)
    except OSError as error:  # no memory for another process, say
        logger().warning("cannot ask the nodes", error=error.strerror)
        return []
    if output.complaints:
        logger().info("output of the failed health check", said=output.complaints[-2000:])
    return output.out.splitlines()
