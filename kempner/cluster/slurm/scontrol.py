"""Runs Slurm's commands: query, signal and requeue a job.

Each has a time limit and is tried again while the controller does not answer. Never to be called
from a signal handler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kempner.cluster.slurm.hostlist import expand_hosts
from kempner.cluster.slurm.job import job_fields, node_fields

_TIMEOUT = 20.0
"""Seconds for one command; Slurm's own clients give up on a controller after about ten."""
_TRIES = 3
_PAUSE = 1.0
"""Seconds before another try."""

# What the clients say when the controller is away for a moment: restarting, failing over, busy.
_PASSING = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Connection reset",
    "Slurm backup controller in standby mode",
    "Slurm temporarily unable to accept job",
    "Resource temporarily unavailable",
)


class SlurmError(Exception):
    """A command of Slurm is missing, was refused or had no answer: one sentence."""


class SlurmMissingError(SlurmError):
    """The command is not installed here."""


class SlurmRefusedError(SlurmError):
    """The controller answered no, `answer` in its own words."""

    def __init__(self, command: str, answer: str) -> None:
        super().__init__(f"`{command}` was refused: {answer}")
        self.answer = answer


def show_job(job: str) -> dict[str, str]:
    """The fields of a job or of one element of an array, for `kempner.cluster.slurm.job.parse_job`.

    Raises `SlurmError`.
    """
    return job_fields(_run(["scontrol", "show", "job", "-o", job]))


def show_node(node: str) -> dict[str, str]:
    """The fields of a node. Raises `SlurmError`."""
    return node_fields(_run(["scontrol", "show", "node", "-o", node]))


def output_file(job: str) -> str:
    """Where a job's output goes; empty if Slurm does not say. Raises `SlurmError`."""
    found = re.findall(r"^   StdOut=(.*)$", _run(["scontrol", "show", "job", job]), re.MULTILINE)
    return found[-1] if found else ""


def launches(job: str) -> list[str]:
    """How each launch of a job ended or stands, oldest first, as the accounting has it.

    Without `-D` sacct shows the last one only. A job that goes on without a node that it lost has a
    record for that, too, which is no launch. Raises `SlurmError`.
    """
    told = _run(["sacct", "-D", "-X", "-n", "-P", "-j", job, "--format=State"])
    return [line for line in told.splitlines() if line != "RESIZING"]


def submit_line(job: str) -> str:
    """The command by which a job was submitted, as the accounting keeps it: once more for each time
    that it lost nodes. Raises `SlurmError`.
    """
    told = _run(["sacct", "-X", "-n", "-P", "-j", job, "--format=SubmitLine"]).splitlines()
    return told[-1] if told else ""


def write_script(job: str, file: Path) -> None:
    """Write a job's batch script, as it was submitted, to `file`. Raises `SlurmError`."""
    _run(["scontrol", "write", "batch_script", job, str(file)])


def submit(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a command of sbatch; the last word that it says, the new job's id.

    Not repeated when an answer was lost, because the first may have worked. Raises `SlurmError`.
    """
    return _run(command, tries=1, environ=environ).split()[-1]


def configured_seconds(name: str) -> float | None:
    """A time that slurm.conf sets, in seconds; None if the answer has none of that name.

    Raises `SlurmError`.
    """
    shown = _run(["scontrol", "show", "config"])
    found = re.search(rf"^{name}\s*= (\d+) sec", shown, re.MULTILINE)
    return float(found[1]) if found else None


def partition_nodes(partitions: str) -> set[str]:
    """All nodes of one or more partitions, in whatever state. Raises `SlurmError`.

    `partitions` are names with commas between, as a job shows them.
    """
    found: set[str] = set()
    for name in partitions.split(","):
        shown = _run(["scontrol", "show", "partition", name, "-o"])
        fields = dict(word.partition("=")[::2] for word in shown.split())
        found.update(hostnames(fields["Nodes"]))
    return found


def requeue(job: str) -> None:
    """Put a job back into the queue; its processes are signalled at once, this one's included.

    Ask for the job's state first: a cancelled job is brought back to life by this. Not repeated
    when an answer was lost, because the first may have worked. Raises `SlurmError`.
    """
    _run(["scontrol", "requeue", job], tries=1)


def signal_tasks(job: str, signal_name: str = "TERM") -> None:
    """Send a signal once to the top process of every task, not to the batch script.

    Of the whole job, not of a step: that would deliver it twice while any job is pending (Slurm
    22.05). Raises `SlurmError`.
    """
    _run(["scancel", "-s", signal_name, job])


def end_step(job: str, step: str) -> None:
    """Kill a step's tasks. Takes seconds if one of its nodes is gone. Raises `SlurmError`."""
    _run(["scancel", "-s", "KILL", f"{job}.{step}"])


def keep_nodes(job: str, nodes: Sequence[str]) -> None:
    """Give back all nodes of a running job but these. Raises `SlurmError`.

    Slurm then neither ends the job when it sees that one of the others is dead, nor waits for that
    node before it starts the job again. scontrol leaves two scripts in its working directory, for
    shells that want to adapt their variables.
    """
    with tempfile.TemporaryDirectory() as folder:
        _run(["scontrol", "update", f"jobid={job}", f"NodeList={','.join(nodes)}"], cwd=folder)


def ask_for(job: str, *, nodes: int, without: Sequence[str] = (), after: float = 0.0) -> None:
    """How many `nodes` a requeued job is to get, and which not; `after` so many seconds.

    Raises `SlurmError`.
    """
    excluded = [f"ExcNodeList={','.join(without)}"] if without else []
    later = [f"StartTime=now+{after:.0f}"] if after else []
    _run(["scontrol", "update", f"jobid={job}", f"NumNodes={nodes}", *excluded, *later])


def hostnames(nodelist: str) -> list[str]:
    """The host names of a list, asked of scontrol; worked out here where there is none.

    Raises `ValueError` with a sentence if it is no host list.
    """
    try:
        return _run(["scontrol", "show", "hostnames", nodelist]).split()
    except SlurmError:
        return expand_hosts(nodelist)


def _run(
    command: Sequence[str],
    tries: int = _TRIES,
    environ: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> str:
    """Its output. What it complains about while it exits with 0 (a plugin, say) is no failure."""
    for left in reversed(range(tries)):
        try:
            return _once(command, environ, cwd)
        except SlurmRefusedError as refusal:
            passing = any(text in refusal.answer for text in _PASSING)
            if not (passing and left):
                raise
            time.sleep(_PAUSE)
    raise AssertionError("the last try returns or raises")


def _once(command: Sequence[str], environ: Mapping[str, str] | None, cwd: str | None) -> str:
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command,
            env=environ,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise SlurmMissingError(f"`{command[0]}` is not on the PATH of this host") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmRefusedError(shown, f"no answer within {_TIMEOUT:g} s") from error
    complaint = (done.stderr.strip() or done.stdout.strip()).replace("\n", "; ")
    if done.returncode != 0:
        raise SlurmRefusedError(shown, complaint or f"exit code {done.returncode}")
    return done.stdout
