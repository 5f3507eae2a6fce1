"""Checks of a Slurm job before any rank starts: its allocation and resources, the banner of its
output, the user's `slurm.setup` command, and whether the nodes can import kempner.

Used by `kempner supervise`; `kempner doctor` uses `find_job` and `inspect_job`, `kempner join`
`forget_other_jobs`."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from math import inf

from kempner.cluster.machine import JobPlace, find_place
from kempner.cluster.network.interfaces import Interface, choose, read_interfaces, route_address
from kempner.cluster.network.ports import ExportedMaster, exported_master
from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.allocation import Allocation, allocate
from kempner.cluster.slurm.command import (
    AnswerKind,
    CommandAnswer,
    SlurmError,
    client_environment,
    is_unstarted,
    judge,
)
from kempner.cluster.slurm.hostlist import node_name
from kempner.cluster.slurm.job import JobState, NodeShare, job_id, parse_job
from kempner.cluster.slurm.node_step import (
    IMAGE,
    NO_GPUS,
    NodeStepOutput,
    knows_option,
    run_on_nodes,
)
from kempner.cluster.slurm.resources import (
    SIGNIFICANT,
    NodeResources,
    WantedResources,
    detect,
    inherited,
)
from kempner.config.sections import Config
from kempner.run.link.messages import PROTOCOL
from kempner.run.output.logs import logger, redacted
from kempner.run.output.units import count
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.threads import unless
from kempner.run.record.run_dir import RUN_LINE, RunDirectory
from kempner.supervisor.launchers.rank_runtime import RankRuntime

AT_A_TERMINAL = 30.0
"""Seconds to retry Slurm's commands when a user waits at a terminal. A batch job retries without a
limit, since no user is there to start it again."""


ARRAY, COMPONENT = "SLURM_ARRAY_TASK_ID", "SLURM_HET_SIZE"
"""Set in the elements of a job array, and in the components of a heterogeneous job."""


def forget_other_jobs(environ: MutableMapping[str, str]) -> None:
    """Remove the array and heterogeneous-job variables that `environ` inherited from another job,
    whose shell submitted this one.

    Asks Slurm only if there are such variables, and keeps them if Slurm does not answer."""
    job = environ.get("SLURM_JOB_ID")
    if not job or not {ARRAY, COMPONENT} & set(environ):
        return
    try:
        _forget(environ, scontrol.show_job(job))
    except SlurmError as error:
        logger().info("Slurm does not say whether the job is in an array", reason=str(error))


def _forget(environ: MutableMapping[str, str], fields: Mapping[str, str]) -> None:
    names = inherited(environ, fields)
    for name in names:
        del environ[name]
    if misleading := sorted(names & SIGNIFICANT):
        logger().warning(
            f"ignoring {', '.join(misleading)} of the shell that submitted this job: according to "
            "Slurm it belongs to another job"
        )


def find_job(environ: Mapping[str, str], given: str | None) -> str:
    """The id of the job to train in: `given`, or the job of this process.

    Raises `UsageError` if there is none, or if it is heterogeneous."""
    try:
        job = given or job_id(environ)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if job is None:
        raise UsageError(
            "this is not a Slurm job: submit scripts/slurm/multinode.sh with sbatch, name an "
            "allocation with --jobid, or use --launcher local"
        )
    return job


def inspect_job(
    job: str, environ: MutableMapping[str, str], config: Config, *, given: bool, per_task: bool
) -> tuple[Allocation, NodeResources]:
    """The allocation of the ranks in `job`, and the resources of its first node.

    `given`: the user named the job, so this process may be outside of it and its environment may
    describe another job. `per_task`: each task is a rank. Removes from `environ` what was inherited
    from another job. Raises `UsageError` if the job cannot be used."""
    section, place = config.slurm, find_place(environ)
    batch = not given and place is JobPlace.BATCH_SCRIPT
    within = inf if batch else AT_A_TERMINAL
    try:
        fields, shares, state = _running_job(job, within)
        nodes = scontrol.hostnames(state.nodes.held)
        # The environment may describe another job, or another step of this one.
        own = not given and place is not JobPlace.STEP
        if own:
            _forget(environ, fields)
        here: Mapping[str, str] = environ if own else {}
        wanted = WantedResources(section.cpus, section.memory_mb, section.gpus_per_node)
        node = scontrol.show_node(nodes[0], within)
        resources = detect(here, configured=wanted, job=fields, node=node)
        allocation = allocate(
            here,
            job=job if batch else state.id,
            batch=batch and state.batch,
            nodes=nodes,
            resources=resources,
            procs=section.procs,
            hosts=section.hosts,
            spare=config.supervise.spare_nodes,
            per_task=per_task,
            shares=shares,
        )
    except (SlurmError, ValueError) as error:
        raise UsageError(str(error)) from error
    if not per_task:
        _warn_of_tasks(here.get("SLURM_NTASKS_PER_NODE", "1"), allocation.tasks_per_node)
    return allocation, resources


def _running_job(job: str, within: float) -> tuple[dict[str, str], dict[str, NodeShare], JobState]:
    fields, shares = scontrol.show_job_and_shares(job, within, _say_once())
    state = parse_job(fields)
    if not state.running:
        raise UsageError(_not_running(job, state.state, state.reason))
    return fields, shares, state


def _warn_of_tasks(asked: str, ranks: int) -> None:
    if asked != "1":
        logger().warning(
            f"--ntasks-per-node={asked} is ignored: one torchrun per node starts "
            f"{ranks} ranks there; submit with --ntasks-per-node=1"
        )


def banner(
    allocation: Allocation,
    resources: NodeResources,
    run: RunDirectory,
    arguments: Sequence[str],
    restarts: int,
    meeting: Sequence[str] = (),
) -> str:
    """The banner at the head of the job's output: each number with its source, and no secrets.
    `meeting` are the lines of `meeting_place`."""
    nodes = count(len(allocation.nodes), "node")
    return "\n".join(
        [
            f"job {allocation.job}: {nodes} ({_shorten(allocation.nodes)}), "
            f"{count(allocation.size, 'rank')}, {_per_node(allocation)} per node",
            f"a node has: GPUs {resources.gpus}, CPUs {resources.cpus}, "
            f"memory {resources.memory_mb} MiB",
            f"configuration: {shlex.join(redacted(arguments))}",
            *meeting,
            f"{RUN_LINE}{run.path.absolute()}",
            f"Restart cnt: {restarts}",
        ]
    )


def meeting_place(allocation: Allocation, config: Config, environ: Mapping[str, str]) -> list[str]:
    """The banner's lines about the rendezvous, and about this node's network interface if it has
    ranks.

    Warns of an exported address that is ignored. Raises `UsageError` if MASTER_PORT is no valid
    port."""
    try:
        exported = exported_master(environ, allocation.nodes)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if exported.warning:
        logger().warning(exported.warning)
    lines = [f"master: {_master(exported, allocation.nodes[0])}"]
    if (used := _interface(allocation, config, environ)) is not None:
        lines.append(f"network: {used.name} ({used.ip}) on {node_name(environ)}")
    return lines


def bound_here(
    allocation: Allocation, config: Config, environ: Mapping[str, str]
) -> dict[str, Interface | None]:
    """The interface that ranks on this node will use, by node name; empty if it has no ranks."""
    used = _interface(allocation, config, environ)
    return {} if used is None else {node_name(environ): used}


def _master(exported: ExportedMaster, first: str) -> str:
    given = {"MASTER_ADDR": exported.address, "MASTER_PORT": exported.port}
    names = ", ".join(name for name, value in given.items() if value is not None)
    port = f":{exported.port}" if exported.port else ", on a port that is chosen at each start"
    place = f"{exported.address or first}{port}"
    return f"{place} ({names} of the environment)" if names else place


def _interface(
    allocation: Allocation, config: Config, environ: Mapping[str, str]
) -> Interface | None:
    """The interface that ranks on this node will use; None if it has no ranks, or if no interface
    fits, which the ranks report themselves."""
    if node_name(environ) not in allocation.nodes:
        return None
    try:
        return choose(
            read_interfaces(),
            on_one_node=len(allocation.nodes) == 1,
            configured=config.distributed.interface,
            environ=environ,
            route_address=route_address(allocation.nodes[-1]),
        ).interface
    except ValueError:
        return None


def _per_node(allocation: Allocation) -> str:
    return ", ".join(dict.fromkeys(str(allocation.ranks_on(node)) for node in allocation.nodes))


def _say_once() -> Callable[[SlurmError], None]:
    warned: list[SlurmError] = []

    def say(error: SlurmError) -> None:
        if not warned:
            logger().warning("Slurm gives no answer; asking again", reason=str(error))
        warned.append(error)

    return say


def _not_running(job: str, state: str, reason: str) -> str:
    why = f" ({reason})" if reason else ""
    if state == "PENDING":
        return f"job {job} is still in the queue{why}: try again when `squeue -j {job}` shows R"
    return f"job {job} is {state}{why}: it cannot be trained in"


def _shorten(nodes: Sequence[str]) -> str:
    return ",".join(nodes) if len(nodes) <= 8 else f"{nodes[0]} to {nodes[-1]}"


STEP_TIMEOUT = 1800.0
"""Seconds for a step: the first one in a container fetches its image."""

TRY_FOR, PAUSE = 300.0, 5.0
"""Seconds for which to retry a step that Slurm does not start, and between two tries."""

_MARK = "kempner-says"
_VERSION = (
    "import os, kempner.supervisor.launchers.agents.node_agent; "
    "from kempner.run.link.messages import PROTOCOL; "
    f"print('{_MARK}', os.environ.get('SLURMD_NODENAME'), PROTOCOL)"
)
_STATUS = f'"$@" >&2; echo {_MARK} setup $?'


def check_runtime(
    runtime: RankRuntime, setup: Sequence[str], allocation: Allocation, stop: Callable[[], bool]
) -> None:
    """Run `slurm.setup` on the first node, then try to import kempner with the ranks' Python on all
    nodes.

    Stops waiting as soon as `stop` returns True. Raises `UsageError`."""
    if runtime.in_image and not knows_option(_srun_help(), IMAGE):
        raise UsageError(
            f"slurm.container.image needs srun's plugin pyxis, and this srun has no {IMAGE}; set "
            'slurm.container.prefix instead, such as ["apptainer", "exec", "--nv", "image.sif"]'
        )
    if setup and not stop():
        unless(stop, partial(_set_up, runtime, setup, allocation), "setup")
    if runtime.has_other_python and not stop():
        unless(stop, partial(_import_kempner, runtime, allocation), "import")


def _set_up(runtime: RankRuntime, setup: Sequence[str], allocation: Allocation) -> None:
    logger().info("running slurm.setup", command=list(setup), node=allocation.nodes[0])
    output = _run(runtime, ["sh", "-c", _STATUS, "sh", *setup], allocation, allocation.nodes[:1])
    answers = _answers(output)
    logger().info("output of slurm.setup", said=output.complaints[-2000:])
    if answers.get("setup") != "0":
        ended = f"ended with {answers['setup']}" if answers else "did not run"
        raise UsageError(
            f"slurm.setup {ended} on {allocation.nodes[0]}, so no rank was started: "
            f"{complaint(output.complaints)}"
        )


def _import_kempner(runtime: RankRuntime, allocation: Allocation) -> None:
    output = _run(runtime, [runtime.python, "-c", _VERSION], allocation, allocation.nodes)
    answers = _answers(output)
    missing = [node for node in allocation.nodes if node not in answers]
    if not answers:
        raise UsageError(
            f"kempner cannot be imported by the ranks' Python, {runtime}: "
            f"{complaint(output.complaints)}; install it there, or set slurm.python to one that "
            "has it"
        )
    if set(answers.values()) != {str(PROTOCOL)}:
        raise UsageError(
            f"the ranks' Python, {runtime}, has another version of kempner than the supervisor's; "
            "install the same there"
        )
    if missing:
        logger().warning(
            f"{runtime} does not import kempner on {', '.join(missing)}: "
            f"{complaint(output.complaints)}"
        )


def _run(
    runtime: RankRuntime, task: Sequence[str], allocation: Allocation, nodes: Sequence[str]
) -> NodeStepOutput:
    """Run a task where the ranks will run, once on each of `nodes`; its output."""
    outside = None if allocation.batch else allocation.job
    command, options = [*runtime.prefix, *task], (*NO_GPUS, *runtime.options)
    end = time.monotonic() + TRY_FOR
    while True:
        try:
            output = run_on_nodes(nodes, outside, command, STEP_TIMEOUT, options)
        except OSError as error:
            output = NodeStepOutput("", f"srun: {error.strerror}")
        silent = is_unstarted(output.complaints) or (
            judge(CommandAnswer(1, "", output.complaints)) is AnswerKind.SILENCE
        )
        if _answers(output) or not silent or time.monotonic() > end:
            return output
        time.sleep(PAUSE)


def _answers(output: NodeStepOutput) -> dict[str, str]:
    """From the lines `kempner-says NAME VALUE`, each value by its name."""
    words = [line.split() for line in output.out.splitlines()]
    return {word[1]: word[2] for word in words if len(word) == 3 and word[0] == _MARK}


def complaint(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("srun:", "slurmstepd: error: ***"))]
    return (telling or lines or ["it says nothing"])[-1]


def _srun_help() -> str:
    """The output of `srun --help`; if that fails, a text that has every option."""
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
