"""srun launcher: ranks are the tasks of a Slurm step, one per GPU.

Reads what srun says of its tasks, and passes all of it on to the job's log.

torchrun launcher: a Slurm step with one torchrun per node.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from kempner.cluster.machine.job_place import JobPlace, find_place
from kempner.cluster.network.interfaces import Interface, common_address
from kempner.cluster.network.ports import choose_master
from kempner.cluster.slurm.allocation import Allocation, avoid, without
from kempner.cluster.slurm.command import (
    SlurmError,
    SlurmRefusedError,
    patiently,
    see_step_end,
    start_step,
    step_environment,
)
from kempner.cluster.slurm.hostlist import node_name, node_of
from kempner.cluster.slurm.scontrol import series, signal_tasks
from kempner.config.sections import SuperviseSection
from kempner.run.control.launch_env import Launch
from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.awake_clock import AwakeClock
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.process.threads import keep_running, start_thread
from kempner.supervisor.launchers.base import BareLauncher, CannotRestart, Idle, Program
from kempner.supervisor.launchers.surroundings import Surroundings, reachable_addresses
from kempner.supervisor.nodes import srun_probe
from kempner.supervisor.nodes.exclusion import lost_nodes, still_boots
from kempner.supervisor.nodes.health_check import NO_ANSWER
from kempner.supervisor.nodes.probe import SITE_CHECK, ProbeQuestion, ProbeResult
from kempner.supervisor.policy.outcome import RankExit

_ENDED = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?\s*$")
_CODE = re.compile(r"Exited with exit code (\d+)$")
_SIGNALS = {signal.strsignal(number): -number for number in signal.Signals}
_LONGEST = 4096
"""Bytes of a line that are looked at: no line of srun's is longer."""


def task_ends(line: str) -> Iterator[tuple[int, int]]:
    """The tasks that have ended by what srun says, each with its exit status, or minus the signal.

    `srun: error: node2: task 1: Killed`; also of several: `tasks 1,3-4: Exited with exit code 1`.
    """
    found = _ENDED.match(line)
    status = None if found is None else _status(found[2])
    if found is None or status is None:
        return
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        for task in range(int(first), int(last or first) + 1):
            yield task, status


def _status(words: str) -> int | None:
    if code := _CODE.match(words):
        return int(code[1])
    return -signal.SIGKILL if words == "Out Of Memory" else _SIGNALS.get(words)


class StepErrors:
    """What a step prints on its standard error; `ended` is told of each task that has ended."""

    def __init__(self, ended: Callable[[int, int], None]) -> None:
        self._ended, self._rest = ended, b""

    def hear(self, chunk: bytes) -> None:
        """Pass on what came, and look in it for the ends of tasks."""
        _write(chunk)
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            for task, status in task_ends(line.decode(errors="replace")):
                self._ended(task, status)
        self._rest = rest[-_LONGEST:]


def _write(chunk: bytes) -> None:
    if sys.stderr is not None:
        sys.stderr.buffer.write(chunk)
        sys.stderr.flush()


START_WITHIN = 300.0
"""Seconds for which srun is started again and again: the machine may be short of memory."""

SIGNAL_AGAIN = 2.0
"""Seconds after which the tasks are signalled again, if Slurm did not answer."""

ABANDON_AFTER = 20.0
"""Seconds that srun gets to end its tasks; it waits for nodes that are gone, and we do not."""

BOOT_WITHIN, BOOT_LOOK = 600.0, 10.0
"""Seconds that a node gets that is on its way up when the job begins, and between two looks."""

DEAF = ["sh", "-c", 'trap "" TERM HUP INT USR1 USR2; exec "$@"', "sh"]
"""Becomes the command that follows, which no stop signal ends before it traps it. One that comes
while its interpreter starts is lost; the control channel repeats it to ranks that join later."""


class SrunLauncher(BareLauncher):
    """Starts the ranks with srun, in a session of its own.

    srun answers SIGTERM by killing every task at once, so it is never signalled but to that end.
    A wish to stop goes to the tasks by scancel, and by the control channel.
    """

    def __init__(
        self,
        allocation: Allocation,
        section: SuperviseSection,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._allocation, self._section = allocation, section
        self._around = surroundings or Surroundings()
        self._given = allocation
        self.bound: dict[str, Interface | None] = {}
        """What the ranks of nodes will bind to, as far as it is known."""
        self._starts = 0
        self._unheard: tuple[str, ...] = ()
        wanted = section.control_interface, self._around.interface
        self.addresses = reachable_addresses(allocation.nodes, *wanted)
        """Of this machine, for the nodes of the step."""
        self._srun: subprocess.Popen[bytes] | None = None
        self._following: threading.Thread | None = None
        self._killed_at: float | None = None
        self._clock = AwakeClock()

    def prepare(self, program: Program) -> None:
        """Nothing: srun starts the ranks all at once."""

    def start(self, launch: Launch, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start the step; once srun has ended, `post` how those ended that did not say it."""
        name, nodes = f"kempner-{launch.attempt.number}", self._allocation.nodes
        if self._tasks_per_node() > 1 and (why := self._allocation.why_no_tasks):
            raise UsageError(
                f"job {self._allocation.job}: srun cannot start the ranks, because {why}; submit "
                "with --gpus-per-node and --cpus-per-task"
            )
        step = self._step(name, nodes, self._tasks_per_node())
        command = [*step, *self._rank(launch, program)]
        job = self._allocation.job if self._allocation.batch else None
        in_step = find_place(os.environ) is JobPlace.STEP
        environ = step_environment(os.environ, in_step) | replace(launch, job=job).environment()
        environ.pop("TORCHELASTIC_RUN_ID", None)
        try:
            self._srun = patiently(lambda: start_step(command, environ), START_WITHIN)
        except SlurmError as error:
            raise UsageError(f"{error}; use --launcher local") from error
        self._following = start_thread("srun", lambda: self._wait(command, environ, post))

    def ask_to_stop(self) -> None:
        """Signal each task once; in a user's own allocation only the control channel is used."""
        if self._allocation.batch:
            keep_running("scancel", self._signal)

    def kill(self) -> None:
        """Have srun kill its tasks; called again later, leave a srun behind that cannot."""
        if self._srun is None or not self.alive():
            return
        if self._killed_at is None:
            self._killed_at = self._clock.now()
            self._srun.terminate()
        elif self._clock.now() - self._killed_at > ABANDON_AFTER:
            self._srun.kill()

    @property
    def size(self) -> int:
        """How many ranks `start` starts."""
        return self._allocation.size

    @property
    def used(self) -> Sequence[str]:
        """The nodes of the ranks."""
        return self._allocation.nodes

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes of the ranks, and those in reserve."""
        return (*self._allocation.nodes, *self._allocation.spare)

    @property
    def idle(self) -> Idle:
        """The spare nodes, once some of those of the ranks were left out."""
        missing = self._wanted - len(self._allocation.nodes)
        return Idle(self._allocation.spare if missing > 0 else (), missing)

    def ask_idle(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """In a step of its own."""
        return srun_probe.survey(question, self.idle.nodes, self._outside)

    def survey(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        """Ask all `nodes`; those that give no answer are probed before the next start.

        Nodes of a cloud that still boot are waited for.
        """
        found: dict[str, str] = {}
        if question.site_check is not None and self._around.contained:
            found = self._check_site(question)
            question = replace(question, site_check=None)
        told, began = self._survey(question, self.nodes), self._clock.now()
        while booting := [
            n
            for n, flags in srun_probe.states(_unheard(self._own_nodes, told)).items()
            if still_boots(flags)
        ]:
            if self._clock.now() - began > BOOT_WITHIN:
                break
            logger().info("waiting for nodes that boot", nodes=booting)
            time.sleep(BOOT_LOOK)
            told += self._survey(question, booting)
        self._unheard = _unheard(self.nodes, told)
        self.bound |= {result.node: result.interface for result in told}
        return [_with_site_check(result, found) for result in told]

    def avoid(self, suspects: Mapping[str, str]) -> None:
        """Start no ranks on these nodes if others can do, or `supervise.min_nodes`."""
        self._allocation = self._without_suspects(suspects)
        for node in self.nodes:
            if node in suspects:
                what = "used anyway" if node in self._allocation.nodes else "left out"
                logger().warning(f"{node} is suspect, and {what}: {suspects[node]}")

    def unavoidable(self, suspects: Collection[str]) -> Sequence[str]:
        """Those of the suspects that no spare node replaces, nor `supervise.min_nodes` spares."""
        return [n for n in self._without_suspects(suspects).nodes if n in suspects]

    def _without_suspects(self, suspects: Collection[str]) -> Allocation:
        """The allocation with as few of them as can be, and as many other nodes as are wanted."""
        return avoid(self._allocation, suspects, self._least, self._wanted)

    def prepare_again(
        self, lost: Sequence[str], stuck: Mapping[str, Sequence[int]]
    ) -> CannotRestart | None:
        """Leave out the `lost` hosts that do not answer, and those with a `stuck` process; spare
        nodes take their place."""
        before, least = self._allocation, self._least
        known = {node_of(host, self.nodes) for host in (*lost, *stuck, *self._unheard)}
        bad = self._lost_nodes(known, {node_of(h, self.nodes): pids for h, pids in stuck.items()})
        self._wait_for_end(0.0 if bad else ABANDON_AFTER)  # it would wait for a node that is gone
        self._allocation = without(before, bad)
        left = len(self._allocation.nodes)
        if bad:
            why = "; ".join(f"{node}: {reason}" for node, reason in bad.items())
            logger().warning(
                f"{why}; {left} node{'' if left == 1 else 's'} remain{'s' * (left == 1)}"
            )
            if before.batch:
                srun_probe.give_back(
                    before.job, [node for node, why in bad.items() if why == NO_ANSWER]
                )
        if left < least:
            return CannotRestart(f"too few nodes: {why}", tuple(bad))
        self._starts, self._killed_at = self._starts + 1, None
        return None

    def _lost_nodes(
        self, accused: Collection[str], stuck: Mapping[str, Sequence[int]]
    ) -> dict[str, str]:
        """Ask all nodes whether they are there; those of the `accused` that are of no more use."""
        own = node_name(os.environ)
        if not stuck and not set(accused) - {own}:
            return {}
        answers = self._present(accused, stuck)
        silent = sorted(set(accused) - set(answers))
        found = lost_nodes(accused, answers, srun_probe.states(silent), own)
        for node in sorted(set(silent) - set(found)):
            logger().info("no answer, and no sign against it", node=node)
        return found

    def alive(self) -> bool:
        """Whether srun is still there, or is to be started again."""
        return self._following is not None and self._following.is_alive()

    def waits(self) -> bool:
        """Whether srun could not start the ranks, and is to be started again."""
        return self.alive() and self._srun is not None and self._srun.returncode is not None

    def look(self, node: str, pids: Sequence[int]) -> Sequence[str]:
        """Look in a step of its own, which takes up to 15 s."""
        return srun_probe.look(node, pids, self._outside)

    def close(self) -> None:
        """Nothing: each start has a step of its own."""

    def _check_site(self, question: ProbeQuestion) -> dict[str, str]:
        """Have the nodes do the site's check outside of the ranks' container; what is wrong."""
        asked = replace(question, folders=(), on_one_node=True)
        told = srun_probe.survey(asked, self._own_nodes, self._outside)
        return {v.node: v.troubles[SITE_CHECK] for v in told if SITE_CHECK in v.troubles}

    def _survey(self, question: ProbeQuestion, nodes: Sequence[str]) -> list[ProbeResult]:
        """What these nodes say of themselves."""
        return srun_probe.survey(question, nodes, self._outside)

    def _present(
        self, accused: Collection[str], stuck: Mapping[str, Sequence[int]]
    ) -> dict[str, tuple[int, ...]]:
        """The nodes that answer, each with those of the `stuck` processes that still run."""
        return srun_probe.present(self._own_nodes, stuck, self._outside)

    @property
    def _own_nodes(self) -> Sequence[str]:
        """Those of the nodes that belong to the job."""
        return self.nodes

    @property
    def _outside(self) -> str | None:
        """The allocation, if this process is not its batch process."""
        return None if self._allocation.batch else self._allocation.job

    @property
    def _at_first(self) -> int:
        return len(self._given.nodes)

    @property
    def _wanted(self) -> int:
        """Nodes that the ranks get if there are enough sound ones."""
        return len((self._given if self._section.grow else self._allocation).nodes)

    @property
    def _least(self) -> int:
        """Nodes without which there is no other start."""
        used = len(self._allocation.nodes)
        return min(used, self._section.min_nodes or used)

    def _step(self, name: str, nodes: Sequence[str], tasks: int) -> list[str]:
        """srun and its options, for `tasks` tasks per node."""
        allocation = self._allocation
        command = [
            "srun",
            f"--job-name={name}",
            f"--nodes={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            f"--ntasks={len(nodes) * tasks}",
            f"--ntasks-per-node={tasks}",
            "--kill-on-bad-exit=0",  # the supervisor ends the step, when it has seen why
            "--wait=0",
            "--mpi=none",
            "--export=ALL",
        ]
        if allocation.cpus_per_task and not allocation.uneven:
            cpus = allocation.cpus_per_task * allocation.tasks_per_node // tasks
            command.append(f"--cpus-per-task={cpus}")
        if not allocation.batch or self._starts:
            command.append(
                "--overlap"
            )  # a step before may still hold CPUs, on a dead node for long
        if not allocation.batch:
            command.append(f"--jobid={allocation.job}")
        slurm = series() if allocation.uneven else ""
        return [*command, *allocation.gpu_options(nodes, slurm), *self._around.options]

    def _tasks_per_node(self) -> int:
        return self._allocation.tasks_per_node

    def _wait_for_end(self, patience: float) -> None:
        """Wait for a srun that was told to end its tasks, or leave it behind."""
        if self._srun is None:
            return
        try:
            self._srun.wait(patience)
        except subprocess.TimeoutExpired:
            self._srun.kill()

    def _rank(self, launch: Launch, program: Program) -> list[str]:
        """What each task runs. Python becomes the step's direct child: Slurm signals no other."""
        # srun has its own order of the nodes, which is that of the job.
        given = (*self._given.nodes, *self._given.spare)
        nodes = sorted(self._allocation.nodes, key=given.index)
        host, port = choose_master(os.environ, nodes, launch.attempt.nonce, self.bound)
        master = ["env", f"MASTER_ADDR={host}"]
        if program.ours:  # it finds the port itself
            return [*master, *DEAF, *self._around.prefix, *program.command]
        say(f"the ranks meet at {host}:{port}")
        return [*master, f"MASTER_PORT={port}", *self._around.prefix, *program.cold]

    def _signal(self) -> None:
        """Until it worked, or these tasks are gone. A task may get the signal twice."""
        srun, asking = self._srun, True
        while asking and srun is not None and srun.poll() is None:
            try:
                signal_tasks(self._allocation.job)
                asking = False
            except SlurmError as error:
                logger().info("could not signal the tasks", reason=str(error))
                asking = not isinstance(error, SlurmRefusedError)
                time.sleep(SIGNAL_AGAIN)

    def _post_end(self, task: int, status: int, post: Callable[[RankExit], None]) -> None:
        """A task is a rank; srun says at once how it ended, and itself goes on."""
        post(RankExit(task, status, ended_by_us=self._was_killed()))

    def _was_killed(self) -> bool:
        return self._killed_at is not None

    def _wait(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        post: Callable[[RankExit], None],
    ) -> None:
        """Until the tasks have ended. While Slurm cannot start them, they are started again."""

        first = [self._srun]

        def see() -> int:
            srun = first.pop() if first else None
            if srun is None:
                if self._was_killed():
                    return 1
                srun = self._srun = start_step(command, environ)
                if self._was_killed():  # meanwhile
                    srun.terminate()
            return see_step_end(srun, StepErrors(partial(self._post_end, post=post)).hear)

        try:
            status = patiently(see, inf, _say_why)
        except SlurmError as error:
            _say_why(error)
            status = 1
        ours = self._was_killed()
        logger().info("srun has ended", status=status)
        for rank in range(self._allocation.size):
            # srun ends with the highest code of its tasks. One that was stopped before it had
            # joined the channel could not say so; one that crashed would have.
            if status in (ExitCode.COMPLETED, ExitCode.STOPPED):
                post(RankExit(rank, status))
            elif status == 128 + signal.SIGTERM and not ours:
                post(RankExit(rank, -signal.SIGTERM))
            else:
                post(RankExit(rank, None, ended_by_us=ours))


def _unheard(nodes: Sequence[str], told: Sequence[ProbeResult]) -> tuple[str, ...]:
    answered = {vitals.node for vitals in told}
    return tuple(node for node in nodes if node not in answered)


def _with_site_check(result: ProbeResult, found: Mapping[str, str]) -> ProbeResult:
    if result.node not in found:
        return result
    return replace(result, troubles={**result.troubles, SITE_CHECK: found[result.node]})


def _say_why(error: SlurmError) -> None:
    logger().warning("the ranks could not be started", reason=str(error))


_HOSTS = (
    '[ "$SLURMD_NODENAME" = "$0" ] && hosts=1 || hosts=0; '
    'export PET_RDZV_CONF="${PET_RDZV_CONF:+$PET_RDZV_CONF,}is_host=$hosts"; '
    'for at in $1; do if [ "${at%%=*}" = "$SLURMD_NODENAME" ]; then '
    'export PET_LOCAL_ADDR="${at#*=}"; fi; done; shift; exec "$@"'
)
"""Tells torchrun whether the rendezvous is on its node, and the node's address, where the workers
meet if it has rank 0: it knows no address of its machine but that which the host's name means, and
would look for its host for ever."""


class TorchrunLauncher(SrunLauncher):
    """Starts one torchrun per node, and that the ranks.

    torchrun kills its children 30 seconds after it is signalled. It is therefore started to ignore
    SIGTERM, and the ranks are asked to stop by the control channel alone.
    """

    def ask_to_stop(self) -> None:
        """Nothing: a signal would reach torchrun only."""

    def _post_end(self, task: int, status: int, post: Callable[[RankExit], None]) -> None:
        """Nothing: a task is torchrun, and how that ends says little about its ranks."""

    def _tasks_per_node(self) -> int:
        return 1

    def _rank(self, launch: Launch, program: Program) -> list[str]:
        nodes = self._allocation.nodes
        address, port = choose_master(os.environ, nodes, launch.attempt.nonce, self.bound)
        hosts = ["sh", "-c", _HOSTS, nodes[0], " ".join(self._local_addresses())]
        torchrun = self._around.run("torch.distributed.run")
        options = [
            f"--nnodes={len(nodes)}",
            f"--nproc-per-node={self._allocation.tasks_per_node}",
            "--max-restarts=0",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={address}:{port}",
            f"--rdzv-id={launch.attempt.nonce}",
            "--signals-to-handle=SIGINT",
            "--no-python",
        ]
        return [*DEAF, *hosts, *torchrun, *options, *program.command]

    def _local_addresses(self) -> list[str]:
        """`NODE=ADDRESS` of each node, on the network that the ranks use."""
        nodes = self._allocation.nodes
        if not common_address(self.bound, nodes):
            return []
        known = {node: self.bound.get(node) for node in nodes}
        return [f"{n}={at.address.partition('/')[0]}" for n, at in known.items() if at]
