"""Looks, before any rank starts, whether they can run where the configuration puts them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial

from kempner.cluster.slurm.allocation import Allocation
from kempner.cluster.slurm.command import Answer, Worth, client_environment, judge
from kempner.cluster.slurm.containers import IMAGE, knows_option
from kempner.cluster.slurm.node_step import NO_GPUS, Told, run_on_nodes
from kempner.run.control.protocol import PROTOCOL
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.side_thread import unless
from kempner.supervisor.launchers.surroundings import Surroundings

WITHIN = 1800.0
"""Seconds for a step: the first one in a container fetches its image."""

TRY_FOR, PAUSE = 300.0, 5.0
"""Seconds for which a step is tried again that Slurm does not start, and between two tries."""

_SAYS = "kempner-says"
_VERSION = (
    "import os, kempner.supervisor.launchers.agents.node_agent; "
    "from kempner.run.control.protocol import PROTOCOL; "
    f"print('{_SAYS}', os.environ.get('SLURMD_NODENAME'), PROTOCOL)"
)
_STATUS = f'"$@" >&2; echo {_SAYS} setup $?'


def check_surroundings(
    around: Surroundings, setup: Sequence[str], allocation: Allocation, stop: Callable[[], bool]
) -> None:
    """Run the set-up once, then see that kempner can be imported where the ranks will run.

    Neither is waited for any more once there is a reason to `stop`. Raises `UsageError`.
    """
    if around.in_image and not knows_option(_srun_help(), IMAGE):
        raise UsageError(
            f"slurm.container.image needs srun's plugin pyxis, and this srun has no {IMAGE}; set "
            'slurm.container.prefix instead, such as ["apptainer", "exec", "--nv", "image.sif"]'
        )
    if setup and not stop():
        unless(stop, partial(_set_up, around, setup, allocation), "setup")
    if around.foreign and not stop():
        unless(stop, partial(_import_there, around, allocation), "import")


def _set_up(around: Surroundings, setup: Sequence[str], allocation: Allocation) -> None:
    logger().info("running slurm.setup", command=list(setup), node=allocation.nodes[0])
    told = _run(around, ["sh", "-c", _STATUS, "sh", *setup], allocation, allocation.nodes[:1])
    answers = _answers(told)
    logger().info("output of slurm.setup", said=told.complaints[-2000:])
    if answers.get("setup") != "0":
        ended = f"ended with {answers['setup']}" if answers else "did not run"
        raise UsageError(
            f"slurm.setup {ended} on {allocation.nodes[0]}, so no rank was started: "
            f"{complaint(told.complaints)}"
        )


def _import_there(around: Surroundings, allocation: Allocation) -> None:
    told = _run(around, [around.python, "-c", _VERSION], allocation, allocation.nodes)
    answers = _answers(told)
    missing = [node for node in allocation.nodes if node not in answers]
    if not answers:
        raise UsageError(
            f"kempner cannot be imported by the ranks' Python, {around}: "
            f"{complaint(told.complaints)}; install it there, or set slurm.python to one that has "
            "it"
        )
    if set(answers.values()) != {str(PROTOCOL)}:
        raise UsageError(
            f"the ranks' Python, {around}, has another version of kempner than the supervisor's; "
            "install the same there"
        )
    if missing:
        logger().warning(
            f"{around} does not import kempner on {', '.join(missing)}: "
            f"{complaint(told.complaints)}"
        )


def _run(
    around: Surroundings, task: Sequence[str], allocation: Allocation, nodes: Sequence[str]
) -> Told:
    """What a task says where the ranks will run, on each of some nodes."""
    outside = None if allocation.batch else allocation.job
    command, options = [*around.prefix, *task], (*NO_GPUS, *around.options)
    end = time.monotonic() + TRY_FOR
    while True:
        try:
            told = run_on_nodes(nodes, outside, command, WITHIN, options)
        except OSError as error:
            told = Told("", f"srun: {error.strerror}")
        silent = judge(Answer(1, "", told.complaints)) is Worth.SILENCE
        if _answers(told) or not silent or time.monotonic() > end:
            return told
        time.sleep(PAUSE)


def _answers(told: Told) -> dict[str, str]:
    """What was said, by who said it."""
    words = [line.split() for line in told.out.splitlines()]
    return {word[1]: word[2] for word in words if len(word) == 3 and word[0] == _SAYS}


def complaint(text: str) -> str:
    """The line that says what is wrong: the last one that is not srun's account of its tasks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("srun:", "slurmstepd: error: ***"))]
    return (telling or lines or ["it says nothing"])[-1]


def _srun_help() -> str:
    """What srun says of its options; everything is one where it cannot be asked."""
    try:
        asked = subprocess.run(
            ["srun", "--help"],
            env=client_environment(os.environ),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return IMAGE
    return asked.stdout
