"""The agents of a Slurm job's nodes: the steps that start them, and what srun says of their tasks.

Agents whose host cannot be reached speak to the supervisor over srun's standard input and output.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf

from kempner.cluster.machine import JobPlace, find_place
from kempner.cluster.network.interfaces import Interface
from kempner.cluster.network.ports import choose_master
from kempner.cluster.slurm.command import (
    SlurmError,
    patiently,
    see_step_end,
    start_step,
    step_environment,
)
from kempner.cluster.slurm.hostlist import node_name
from kempner.cluster.slurm.node_step import without_binding
from kempner.cluster.slurm.scontrol import series
from kempner.config.sections import SuperviseSection
from kempner.run.control.launch_env import Launch
from kempner.run.link.wire import listen
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.threads import start_thread
from kempner.supervisor.launchers.agents import affinity, node_agent
from kempner.supervisor.launchers.agents.fleet import AgentSeen, Fleet, FleetNews
from kempner.supervisor.launchers.agents.messages import (
    ADDRESSES,
    PORT,
    STEP,
    TOKEN,
    AgentHello,
    TaskBinding,
)
from kempner.supervisor.launchers.agents.stdio import BY_SRUN, carry
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.run_nodes import RunNodes
from kempner.supervisor.launchers.surroundings import Surroundings, reachable_addresses
from kempner.supervisor.nodes import srun_probe

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


DEAF = ["sh", "-c", 'trap "" TERM HUP INT USR1 USR2; exec "$@"', "sh"]
"""Becomes the command that follows, which no stop signal ends before it traps it. One that comes
while its interpreter starts is lost; the control channel repeats it to ranks that join later."""


class AgentStep:
    """One srun with an agent on each of some `nodes`, started again while Slurm cannot do it.

    `ended` is called with the step, each task of it that has ended, and its exit status. An srun of
    a single task is connected with the `listener`, if there is one: an address and a port.
    """

    def __init__(
        self,
        number: int,
        nodes: Collection[str],
        ended: Callable[[AgentStep, int, int], None],
        listener: tuple[str, int] | None = None,
    ) -> None:
        self.number, self.nodes, self._listener = number, frozenset(nodes), listener
        self.gone: set[str] = set()
        """Nodes whose agent has ended, or was given up."""
        self.refusal = ""
        """Why Slurm has started no agent, if it has not."""
        self.began = time.monotonic()
        self._ended = ended
        self._srun: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it. Raises `SlurmError` if there is no srun here."""
        self._srun = patiently(lambda: self._begin(command, environ), START_WITHIN)
        self._thread = start_thread("agents' srun", lambda: self._wait(command, environ))

    @property
    def alive(self) -> bool:
        """Whether srun is there, or is to be started again."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def waits(self) -> bool:
        """Whether srun could not start the tasks, and is to be started again."""
        return self.alive and self._srun is not None and self._srun.returncode is not None

    def covers(self, node: str) -> bool:
        """Whether there is an agent of this step on a node, or one may come."""
        return self.alive and node in self.nodes and node not in self.gone

    def end(self, patience: float) -> None:
        """Wait for srun, whose tasks were sent away; then have it kill them, and leave it behind if
        it cannot."""
        self._over.set()
        srun = self._srun
        if srun is None:
            return
        with suppress(subprocess.TimeoutExpired):
            srun.wait(patience)
            return
        srun.terminate()
        with suppress(subprocess.TimeoutExpired):
            srun.wait(KILLED_WITHIN)
            return
        srun.kill()

    def _begin(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if self._listener is None:
            return start_step(command, environ)
        near, far = socket.socketpair()
        with far:
            try:
                srun = start_step(command, environ, (near, far))
            except SlurmError:
                near.close()
                raise
        start_thread("agent by srun", partial(carry, near, *self._listener))
        return srun

    def _wait(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Until the tasks have ended. While Slurm cannot start them, they are started again."""
        first = [self._srun]

        def see() -> int:
            srun = first.pop() if first else None
            if srun is None:
                if self._over.is_set():
                    return 1
                srun = self._srun = self._begin(command, environ)
            return see_step_end(srun, StepErrors(self._hear_end).hear)

        try:
            status = patiently(see, inf, _say_why)
        except SlurmError as error:
            _say_why(error)
            self.refusal, status = str(error), 1
        logger().info("the agents' srun has ended", step=self.number, status=status)

    def _hear_end(self, task: int, status: int) -> None:
        self._ended(self, task, status)


KILLED_WITHIN = 5.0
"""Seconds for srun to kill tasks; it waits for nodes that are gone, and we do not."""

START_WITHIN = 300.0
"""Seconds for which srun is started again and again: the machine may be short of memory."""


def _say_why(error: SlurmError) -> None:
    logger().warning("the agents could not be started", reason=str(error))


COME_WITHIN = 30.0
"""Seconds within which an agent connects: it starts in one, or where its container is open."""

GIVEN_UP_WITHIN = 10.0
"""Seconds to wait until an agent that was killed, and all that Slurm kills with it, is gone."""

HUNG_UP = 3.0
"""Seconds after the end of an agent's process, seen by its link, in which srun may say how."""

AWAY = 45.0
"""Seconds after which an agent whose link broke off in any other way is not expected back."""

END_WITHIN, LOST_WITHIN = 10.0, 1.0
"""Seconds for srun to end when agents were sent away, and if it waits for a node that is gone."""

BOUND_WITHIN = 60.0
"""Seconds for the tasks that say to what srun binds them."""


class SlurmAgents:
    """Starts an agent on each node of a job, in a further step beside those that are there.

    Agents that do not connect are started again, with the standard input and output of an srun of
    their own as their link. `lost` is called with a node
    whose agent has ended, and the signal that ended it, minus, if there was one.
    """

    takes_others = True
    here, killed_within, cleared_within = False, 1.0, 15.0

    def __init__(
        self, nodes: RunNodes, section: SuperviseSection, around: Surroundings | None = None
    ) -> None:
        self.around, self._nodes, self._section = around or Surroundings(), nodes, section
        allocation = nodes.allocation
        self.addresses = reachable_addresses(
            allocation.nodes, section.control_interface, self.around.interface
        )
        self.bound: dict[str, Interface | None] = {}
        """What the ranks of nodes will bind to, as far as it is known."""
        self._unreachable: set[str] = set()
        self._steps: list[AgentStep] = []
        self._given_up: set[tuple[str, int]] = set()
        self._bindings: dict[str, tuple[TaskBinding, ...]] = {}
        self._fleet: Fleet | None = None
        self._listener = ("127.0.0.1", 0)

    def open(
        self,
        program: Program,
        hear: Callable[[str, FleetNews], None],
        refusal: Callable[[AgentHello], str],
        lost: Callable[[str, int | None], None],
    ) -> Fleet:
        """Listen to agents of this program."""
        self._program, self._lost = program, lost
        listeners = listen(self.addresses, self._section.ports)
        self._fleet = Fleet(listeners, len(self._nodes.all), hear, refusal)
        self._listener = self.addresses[0], self._fleet.port
        return self._fleet

    def have(self) -> None:
        """Start a step for nodes that have no agent, nor one that may come.

        Those that had one are not held up by those that may be gone.
        """
        missing = [node for node in self._nodes.own if self.is_gone(node)]
        known = [node for node in missing if self._seen(node) is not None]
        for group in (known, [node for node in missing if node not in known]):
            alone = [node for node in group if node in self._unreachable]
            for nodes in self._nodes.allocation.steps([n for n in group if n not in alone]):
                self._start(nodes)
            for node in alone:
                self._start([node], by_srun=True)

    def reach_by_srun(self, nodes: Collection[str]) -> None:
        """Start agents anew on nodes whose agents do not connect."""
        self._unreachable |= set(nodes)
        for node in nodes:
            self.forget(node)
        self.have()

    def is_connected(self, node: str) -> bool:
        """Whether a node's agent is one that is expected."""
        seen = self._seen(node)
        return seen is not None and any(
            step.covers(node) and step.number == seen.step for step in self._steps
        )

    def is_gone(self, node: str) -> bool:
        """Whether the agent of a node has ended, as srun reports or its link shows."""
        covering = [step.number for step in self._steps if step.covers(node)]
        if not covering:
            return True
        seen = self._seen(node)
        if seen is None or seen.linked or seen.step < max(covering):
            return False
        if time.monotonic() - seen.went_at < (HUNG_UP if seen.hung_up else AWAY):
            return False
        self.mark_gone(node, seen.step)
        return True

    def refusal_of(self, node: str) -> str:
        """Why Slurm has not started the agent of a node that was expected last; empty if it has."""
        steps = [step for step in self._steps if node in step.nodes]
        return steps[-1].refusal if steps else ""

    def mark_gone(self, node: str, step: int) -> None:
        """Expect no agent any more of this step and those before."""
        for one in self._steps:
            if one.number <= step:
                one.gone.add(node)

    def forget(self, node: str) -> None:
        """Expect no agent there until the next start."""
        self.mark_gone(node, len(self._steps))

    @property
    def waits(self) -> bool:
        """Whether srun could not start the agents, and is to be started again."""
        return any(step.waits for step in self._steps)

    def time_to_come(self) -> float:
        """Seconds that agents still get to connect; those of a step that has ended get none."""
        began = max((step.began for step in self._steps if step.alive), default=-inf)
        return max(0.0, began + COME_WITHIN + self.around.delay - time.monotonic())

    def end(self, node: str) -> None:
        """End an agent that does nothing; with it goes what is left of its ranks."""
        seen = self._seen(node)
        if seen is None or (node, seen.pid) in self._given_up:
            return
        self._given_up.add((node, seen.pid))
        logger().warning("an agent does nothing, and is ended", node=node, pid=seen.pid)
        if node == node_name(os.environ):
            with suppress(ProcessLookupError):
                os.kill(seen.pid, signal.SIGKILL)
        else:
            end = partial(srun_probe.kill, node, seen.pid, self._nodes.outside)
            start_thread("end agent", end)

    def remove(self, node: str) -> None:
        """End an agent that does nothing, and expect it no more."""
        if self._fleet is not None and (seen := self._seen(node)) is not None:
            self.end(node)
            self._fleet.wait_until(partial(self.is_gone, node), GIVEN_UP_WITHIN)
            self.mark_gone(node, seen.step)

    def launch(self, launch: Launch) -> Launch:
        """The job of the ranks, which one of them requeues if its batch process dies."""
        allocation = self._nodes.allocation
        return replace(launch, job=allocation.job if allocation.batch else None)

    def master(self, launch: Launch) -> tuple[str, int]:
        """Where the ranks meet."""
        nodes = self._nodes.allocation.nodes
        return choose_master(os.environ, nodes, launch.attempt.nonce, self.bound)

    def bindings(self) -> Mapping[str, Sequence[TaskBinding]]:
        """By node, how its ranks are to be bound; none where that is left to agents."""
        asked = self.around.binding or affinity.binding_asked_for(_environment())
        if not asked:
            return {}
        allocation = self._nodes.allocation
        if why := allocation.why_no_tasks:
            raise UsageError(
                f"job {allocation.job}: srun cannot bind the ranks by {asked}, because {why}; "
                "submit with --gpus-per-node and --cpus-per-task"
            )
        unknown = [node for node in self._nodes.own if node not in self._bindings]
        if unknown:
            self._bindings |= self._bound_by_srun(unknown)
            if missing := [node for node in unknown if node not in self._bindings]:
                logger().warning(
                    f"srun does not say how {asked} binds ranks, so kempner does", nodes=missing
                )
        return self._bindings

    def close(self, has_left: Callable[[str], bool]) -> None:
        """Wait for srun, once the agents were sent away."""
        for step in self._steps:
            left = all(map(has_left, step.nodes - step.gone))
            step.end(END_WITHIN if left else LOST_WITHIN)
        self._fleet, self._steps = None, []

    def _seen(self, node: str) -> AgentSeen | None:
        return None if self._fleet is None else self._fleet.seen.get(node)

    def _start(self, nodes: Sequence[str], by_srun: bool = False) -> None:
        assert self._fleet is not None, "open comes first"
        listener = self._listener if by_srun else None
        step = AgentStep(len(self._steps), nodes, self._hear_task_end, listener)
        where = {
            ADDRESSES: ",".join(self.addresses),
            PORT: str(self._fleet.port),
            TOKEN: self._fleet.secret.token,
            STEP: str(step.number),
            **({BY_SRUN: "1"} if by_srun else {}),
        }
        agent = [*self.around.run(node_agent.__name__), node_agent.program_text(self._program)]
        options = without_binding(self.around.options)
        srun = self.srun("kempner-agents", nodes, 1, options)
        self._steps.append(step)
        try:
            command = [*srun, "--no-kill", *(["--unbuffered"] if by_srun else []), *DEAF, *agent]
            step.start(command, affinity.unbound(_environment()) | where)
        except SlurmError as error:
            raise UsageError(f"{error}; use --launcher local") from error

    def _hear_task_end(self, step: AgentStep, task: int, status: int) -> None:
        """Take in that an agent has ended, as srun reports; what it has started dies with it."""
        for node in step.nodes:
            seen = self._seen(node)
            if seen is not None and (seen.step, seen.task) == (step.number, task):
                self.mark_gone(node, step.number)
                self._lost(node, status if status < 0 else None)

    def _bound_by_srun(self, nodes: Sequence[str]) -> dict[str, tuple[TaskBinding, ...]]:
        """What tasks say that are as many, and bound, as ranks are to be."""
        tasks = self._nodes.allocation.tasks_per_node
        srun = self.srun("kempner-binding", nodes, tasks, self.around.options)
        try:
            told = subprocess.run(
                [*srun, "--overlap", *self.around.run(affinity.__name__)],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                check=False,
                timeout=BOUND_WITHIN + self.around.delay,
                start_new_session=True,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            logger().warning("srun cannot be asked how it binds ranks", reason=str(error))
            return {}
        return affinity.bindings_by_node(told.stdout.splitlines())

    def srun(
        self, name: str, nodes: Sequence[str], tasks: int, options: Sequence[str]
    ) -> list[str]:
        """srun and its options, for a number of tasks per node."""
        allocation = self._nodes.allocation
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
        if not allocation.batch or self._steps:
            # a step before may still hold CPUs, on a dead node for long
            command.append("--overlap")
        if not allocation.batch:
            command.append(f"--jobid={allocation.job}")
        slurm = series() if allocation.uneven else ""
        return [*command, *allocation.gpu_options(nodes, slurm), *options]


def _environment() -> dict[str, str]:
    """What a step gets of this process's environment."""
    environ = step_environment(os.environ, find_place(os.environ) is JobPlace.STEP)
    environ.pop("TORCHELASTIC_RUN_ID", None)
    return environ
