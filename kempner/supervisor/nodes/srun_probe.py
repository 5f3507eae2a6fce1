"""Probes nodes of the job with srun, and releases lost ones to Slurm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.job import parse_job
from kempner.cluster.slurm.scontrol import SlurmError
from kempner.run.process.logs import logger
from kempner.supervisor.nodes import probe
from kempner.supervisor.nodes.probe import ProbeQuestion, ProbeResult

PROBE_WITHIN = 15.0
"""Seconds that a node gets to run a task that does nothing. One that is well takes a tenth of one;
srun itself gives up after twelve."""

SURVEY_WITHIN = 30.0
"""Seconds that all nodes together get to say how they are."""

_AT_ONCE = 16
"""Nodes that are asked at the same time."""


def silent_nodes(nodes: Sequence[str], allocation: str | None) -> tuple[str, ...]:
    """Those of the `nodes` on which no task can be started; Slurm takes minutes to notice.

    `allocation` is the job to ask in, None for the one around this process.
    """
    if not nodes:
        return ()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(partial(_answers, allocation=allocation), nodes)
    return tuple(node for node, answered in zip(nodes, answers, strict=True) if not answered)


def survey(
    question: ProbeQuestion, nodes: Sequence[str], allocation: str | None
) -> list[ProbeResult]:
    """Ask all of the `nodes` in one step; the answers that have come before srun gave up.

    It gives a dead node up after some ten seconds, and the others have long answered by then. No
    answers where there is no srun: the start of the ranks says that better.
    """
    if shutil.which("srun") is None:
        return []
    command = [
        *_srun(allocation),
        "--job-name=kempner-health",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        "--export=ALL",
        *(sys.executable, "-m", probe.__name__, probe.question_text(question)),
    ]
    asked = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, complaints = asked.communicate(timeout=SURVEY_WITHIN)
    except subprocess.TimeoutExpired:
        asked.kill()
        told, complaints = asked.communicate()
    if complaints:
        logger().info("output of the failed health check", said=complaints[-2000:])
    return [answer for line in told.splitlines() if (answer := probe.read_result(line))]


def give_back(job: str, gone: Sequence[str]) -> None:
    """Take nodes out of a job of ours. Where Slurm refuses, the job goes on as long as it may."""
    try:
        held = scontrol.hostnames(parse_job(scontrol.show_job(job)).nodes.held)
        scontrol.keep_nodes(job, [node for node in held if node not in gone])
    except (SlurmError, ValueError) as error:
        logger().warning("cannot release a lost node from the job", reason=str(error))


def _answers(node: str, allocation: str | None) -> bool:
    command = [*_srun(allocation), "--nodes=1", "--ntasks=1", f"--nodelist={node}", "true"]
    try:
        done = subprocess.run(
            command, timeout=PROBE_WITHIN, capture_output=True, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _srun(allocation: str | None) -> list[str]:
    return ["srun", "--overlap", *([] if allocation is None else [f"--jobid={allocation}"])]
