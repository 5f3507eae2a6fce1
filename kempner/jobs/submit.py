"""`submit`: starts a run from Python, on a Slurm cluster or on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError, submission_environment
from kempner.config.loading import load
from kempner.jobs.job import CHILDREN, Job, Submission, folder_of, last_submission, log_of, reserve
from kempner.run.process.exit_codes import RunError, UsageError, cannot_write
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.run.record import gave_up
from kempner.run.record.attempts import read_current
from kempner.run.record.identity import choose_run
from kempner.run.record.lease import is_owned
from kempner.run.record.program import identity_of_words
from kempner.run.record.run_dir import RunDirectory, name_of_command

SCRIPT = """#!/bin/bash
#SBATCH --signal=B:SIGTERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
trap '' TERM  # a warning must not end the job before the supervisor is there
cd "${SLURM_SUBMIT_DIR}"
exec %s -P -m kempner supervise --launcher srun "$@"
"""


@dataclass(frozen=True)
class Resources:
    """What a job requests, in submitit's terms; None is left to Slurm.

    `tasks_per_node` are ranks, by default one for each GPU. For Slurm only: `cpus_per_task` are CPU
    cores of each rank, `mem_gb` is memory per node in GiB, `timeout_min` the time limit in minutes,
    after which the job is requeued.
    """

    nodes: int = 1
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    timeout_min: int | None = None

    def wrong(self) -> str:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "gpus_per_node" else 1
            if value is not None and (isinstance(value, bool) or not value >= least):
                return f"{field.name}={value} must be at least {least}"
        return ""

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus_per_node or 1

    def options(self) -> list[str]:
        given = {
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            "gpus-per-node": self.gpus_per_node or None,
            "cpus-per-task": self.cpus_per_task,
            "mem": None if self.mem_gb is None else f"{round(1024 * self.mem_gb)}M",
            "time": self.timeout_min,
        }
        return _options(given)


def script(python: str) -> str:
    """The batch script: scripts/slurm/multinode.sh for any resources."""
    return SCRIPT % shlex.quote(python)


def sbatch(
    resources: Resources,
    slurm: Mapping[str, object],
    name: str,
    output: Path,
    file: Path,
    words: Sequence[str],
) -> list[str]:
    """The command that submits `file` with arguments `words`. Options in `slurm` take
    precedence."""
    ours = [f"--job-name={name}", f"--output={str(output).replace('%', '%%')}"]
    options = [*ours, *resources.options(), *_options(slurm)]
    return ["sbatch", "--parsable", *options, str(file), *words]


def _options(given: Mapping[str, object]) -> list[str]:
    found = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(option)
        elif value is not None and value is not False:
            found.append(f"{option}={value}")
    return found


def submit(
    program: str | os.PathLike[str] | Sequence[str],
    *overrides: str,
    name: str | None = None,
    cluster: Literal["slurm", "local"] | None = None,
    nodes: int = 1,
    tasks_per_node: int | None = None,
    gpus_per_node: int | None = None,
    cpus_per_task: int | None = None,
    mem_gb: float | None = None,
    timeout_min: int | None = None,
    **slurm: object,
) -> Job:
    """Start a run that outlives this Python session; the same call resumes it.

    Args:
        program: A configuration's path, or the words of a command, as in `kempner supervise --`.
        overrides: `--section.key=value`.
        name: `run.name`; by default the configuration's, or the command's script.
        cluster: "slurm", by default where there is an sbatch, or "local" for this machine.
        nodes, tasks_per_node, gpus_per_node, cpus_per_task, mem_gb, timeout_min: See `Resources`.
        slurm: More options of sbatch, as in `slurm_partition="gpu", slurm_exclusive=True`.

    Raises:
        ConfigError: The configuration or an override is wrong.
        UsageError: The run is still running, or was given up, or an argument is wrong.
        RunError: The job cannot be submitted now.
    """
    resources = Resources(nodes, tasks_per_node, gpus_per_node, cpus_per_task, mem_gb, timeout_min)
    if wrong := resources.wrong():
        raise UsageError(wrong)
    options = _sbatch_options(slurm)
    on_slurm = _on_slurm(cluster, nodes)
    words, run = _words(program, overrides, name)
    _refuse_if_running(run)
    gave_up.refuse_if_given_up(run)
    _start_submission(words, run, resources, options if on_slurm else None)
    return Job(run.path)


def _start_submission(
    words: Sequence[str],
    run: RunDirectory,
    resources: Resources,
    slurm: Mapping[str, object] | None,
) -> None:
    """Submit a job with the options `slurm`; if None, start the run on this machine."""
    try:
        number = reserve(run)
    except OSError as error:
        raise cannot_write(run.submissions, error) from error
    try:
        current = read_current(run.attempts)
        attempts = 0 if current is None else current.number
        if slurm is None:
            pid = _start(words, resources.ranks_per_node, log_of(run, number))
            submission = Submission.of_process(number, attempts, pid)
        else:
            job = _submit_job(words, resources, slurm, run, number)
            submission = Submission(number, attempts, job)
        submission.write(run)
    except OSError as error:
        raise cannot_write(folder_of(run, number), error) from error


def _on_slurm(cluster: str | None, nodes: int) -> bool:
    if cluster not in (None, "slurm", "local"):
        raise UsageError(f'cluster={cluster!r} is neither "slurm" nor "local"')
    found = shutil.which("sbatch") is not None
    if cluster == "slurm" and not found:
        raise UsageError('cluster="slurm", but there is no sbatch on the PATH of this host')
    on_slurm = found if cluster is None else cluster == "slurm"
    if nodes > 1 and not on_slurm:
        raise UsageError(f"nodes={nodes} needs Slurm: on this machine leave nodes out")
    return on_slurm


def _sbatch_options(slurm: Mapping[str, object]) -> dict[str, object]:
    for name in slurm:
        if not name.startswith("slurm_"):
            raise UsageError(f"submit has no option {name}: options of sbatch are slurm_<option>")
    return {name.removeprefix("slurm_"): value for name, value in slurm.items()}


def _words(
    program: object, overrides: Sequence[str], name: str | None
) -> tuple[list[str], RunDirectory]:
    """The arguments of `kempner supervise`, and the run that they name."""
    given = [*overrides] if name is None else [*overrides, f"--run.name={name}"]
    command: list[str] = []
    path = None
    if isinstance(program, (str, os.PathLike)):
        path = Path(program)
    elif not isinstance(program, Sequence):
        what = "a function" if callable(program) else f"what is of type {type(program).__name__}"
        raise UsageError(
            f"submit(): {what} cannot be submitted; give the path of a configuration, "
            'or a command as a list of words, such as ["python", "train.py"]'
        )
    elif not (command := [str(word) for word in program]):
        raise UsageError("the command is empty: give a configuration, or a list of words")
    config = load(path, given)
    if config.run.name is None:
        usual = Path(config.run.dir) / name_of_command(command, "submit(..., name=NAME)")
        chosen = choose_run(usual, identity_of_words(command, os.environ, Path.cwd()))
        given.append(f"--run.name={chosen.path.name}")
        config = load(path, given)
    run = RunDirectory(Path(config.run.dir).absolute() / str(config.run.name))
    words = given if path is None else [str(path), *given]
    return ([*words, "--", *command] if command else words), run


def _refuse_if_running(run: RunDirectory) -> None:
    """Raise `UsageError` if a process works on the run, or a job will."""
    known = run.ledger.is_file() or last_submission(run) is not None
    job = Job(run.path) if known else None
    if job is not None and not job.done():
        raise UsageError(
            f"{run.path} is still in work ({job.state}): wait for it, or cancel it first"
        )
    if run.supervisors.is_dir() and is_owned(run.supervisors):
        raise UsageError(f"{run.path} is still running: wait for it or stop it first")


def _start(words: Sequence[str], ranks: int, log: Path) -> int:
    """Start a supervisor in its own session, which a Ctrl-C here does not reach; returns its
    process id."""
    here = ["--launcher", "local", "--nproc", str(ranks)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *SAFE_MODULE, "kempner", "supervise", *here, *words],
            env=submission_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    CHILDREN[process.pid] = process
    return process.pid


def _submit_job(
    words: Sequence[str],
    resources: Resources,
    options: Mapping[str, object],
    run: RunDirectory,
    number: int,
) -> str:
    file = folder_of(run, number) / "batch.sh"
    file.write_text(script(sys.executable))
    command = sbatch(resources, options, run.path.name, log_of(run, number), file, words)
    try:
        return scontrol.submit(command, submission_environment(os.environ))
    except SlurmError as error:
        raise RunError(f"the job is not submitted: {error}") from error
