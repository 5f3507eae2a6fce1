"""Probes nodes of the job with srun, and releases lost ones to Slurm."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError
from kempner.cluster.slurm.job import parse_job
from kempner.cluster.slurm.node_step import run_on_nodes, whole_answers
from kempner.run.output.logs import logger
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.supervisor.nodes import presence, probe, process_look
from kempner.supervisor.nodes.exclusion import node_flags
from kempner.supervisor.nodes.presence import read_answer
from kempner.supervisor.nodes.probe import ProbeQuestion, ProbeResult

PROBE_WITHIN = 15.0
"""Seconds that all nodes together get to run a task that does next to nothing. One that is well
takes a tenth of one; srun itself gives up after twelve."""

SURVEY_WITHIN = 30.0
"""Seconds that all nodes together get to say how they are."""

TRIES = 3
"""How often all nodes are asked if none answers: then it is the controller that is busy."""

_PAUSE = 2.0
"""Seconds before another try."""


def present(
    nodes: Sequence[str], pids: Mapping[str, Sequence[int]], allocation: str | None
) -> dict[str, tuple[int, ...]]:
    """The nodes that answer, all asked in one step, each with those of the `pids` that still run.

    `pids` are processes by node, `allocation` the job to ask in, None for the one around this
    process. Without an answer from any node, no step could be started, and nothing is known of the
    nodes.
    """
    for left in reversed(range(TRIES)):
        told = _ask(nodes, allocation, presence.__name__, json.dumps(dict(pids)), PROBE_WITHIN)
        answers = dict(answer for line in told if (answer := read_answer(line)) is not None)
        if answers or not left:
            return answers
        time.sleep(_PAUSE)
    raise AssertionError("the last try returns")


def survey(
    question: ProbeQuestion, nodes: Sequence[str], allocation: str | None
) -> list[ProbeResult]:
    """Ask all of the `nodes` in one step; the answers that have come before srun gave up.

    It gives a dead node up after some ten seconds, and the others have long answered by then. No
    answers where there is no srun: the start of the ranks says that better.
    """
    about = probe.question_text(question)
    told = _ask(nodes, allocation, probe.__name__, about, survey_within(question))
    return [answer for text in whole_answers(told) if (answer := probe.read_result(text))]


def survey_within(question: ProbeQuestion) -> float:
    """Seconds for the answers to a question, the site's own check among them."""
    check = question.site_check
    return SURVEY_WITHIN + (0.0 if check is None else check.seconds)


def look(node: str, pids: Sequence[int], allocation: str | None) -> list[str]:
    """What can be seen of processes on a node (`process_look`); nothing if it does not answer."""
    task = [sys.executable, *SAFE_MODULE, process_look.__name__, *map(str, pids)]
    return _run([node], allocation, task, PROBE_WITHIN)


def kill(node: str, pid: int, allocation: str | None) -> None:
    """End a process of ours on a node, if a step can be started there."""
    _run([node], allocation, ["kill", "-KILL", str(pid)], PROBE_WITHIN)


def states(nodes: Sequence[str]) -> dict[str, frozenset[str]]:
    """What Slurm says of these nodes, in its own words; nothing if it does not answer."""
    if not nodes:
        return {}
    try:
        return {node: node_flags(state) for node, state in scontrol.node_states(nodes).items()}
    except SlurmError as error:
        logger().info("cannot ask Slurm about the nodes", reason=str(error))
        return {}


def _ask(
    nodes: Sequence[str], allocation: str | None, module: str, question: str, within: float
) -> list[str]:
    """What a module says on each node, as far as it came in time."""
    return _run(nodes, allocation, [sys.executable, *SAFE_MODULE, module, question], within)


def _run(
    nodes: Sequence[str], allocation: str | None, task: Sequence[str], within: float
) -> list[str]:
    """What a task on each node prints, as far as it came in time."""
    try:
        told = run_on_nodes(nodes, allocation, task, within)
    except OSError as error:  # no memory for another process, say
        logger().warning("cannot ask the nodes", error=error.strerror)
        return []
    if told.complaints:
        logger().info("output of the failed health check", said=told.complaints[-2000:])
    return told.out.splitlines()


def give_back(job: str, gone: Sequence[str]) -> None:
    """Take nodes out of a job of ours. Where Slurm refuses, the job goes on as long as it may."""
    try:
        held = scontrol.hostnames(parse_job(scontrol.show_job(job)).nodes.held)
        scontrol.keep_nodes(job, [node for node in held if node not in gone])
    except (SlurmError, ValueError) as error:
        logger().warning("cannot release a lost node from the job", reason=str(error))
