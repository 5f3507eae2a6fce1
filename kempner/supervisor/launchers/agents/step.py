"""Starts the agents of a Slurm job's nodes with srun, and learns from srun's output which have
ended.

Agents that cannot reach the supervisor's ports connect through srun's standard input and output.
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
from kempner.supervisor.launchers.rank_runtime import RankRuntime, reachable_addresses
from kempner.supervisor.launchers.run_nodes import RunNodes
from kempner.supervisor.nodes import srun_probe

_ENDED = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?\s*$")
_CODE = re.compile(r"Exited with exit code (\d+)$")
_SIGNALS = {signal.strsignal(number): -number for number in signal.Signals}
_LONGEST = 4096
"""Bytes of a line that are searched; srun prints no longer lines."""


def task_ends(line: str) -> Iterator[tuple[int, int]]:
    """The tasks that have ended according to a line of srun's, each with its exit code, or minus
    the signal.

    Such as `srun: error: node2: task 1: Killed` or `tasks 1,3-4: Exited with exit code 1`."""
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
    """Passes on the standard error of a step, and calls `ended` for each task that has ended."""

    def __init__(self, ended: Callable[[int, int], None]) -> None:
        self._ended, self._rest = ended, b""

    def hear(self, chunk: bytes) -> None:
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


NO_STOPS = ["sh", "-c", 'trap "" TERM HUP INT USR1 USR2; exec "$@"', "sh"]
"""Prefix of a command that starts it with stop signals ignored, until it traps them. A signal that
comes while the interpreter starts is lost, but the control channel repeats a stop to ranks that
connect later."""


class AgentStep:
    """One srun that runs an agent on each of `nodes`, retried while Slurm cannot start it.

    `ended` is called with the step, each task that has ended, and its exit status. With a
    `listener` (address, port), the standard input and output of srun, which then has one task, are
    connected to it."""

    def __init__(
        self,
        number: int,
        nodes: Collection[str],
        ended: Callable[[AgentStep, int, int], None],
        listener: tuple[str, int] | None = None,
    ) -> None:
        self.number, self.nodes, self._listener = number, frozenset(nodes), listener
        self.gone: set[str] = set()
        """Nodes whose agent has ended or is no longer expected."""
        self.refusal = ""
        """Why Slurm has not started the agents; empty if it has."""
        self.began = time.monotonic()
        self._ended = ended
        self._srun: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start srun. Raises `SlurmError` if there is none here."""
        self._srun = patiently(lambda: self._begin(command, environ), START_WITHIN)
        self._thread = start_thread("agents' srun", lambda: self._wait(command, environ))

    @property
    def alive(self) -> bool:
        """Whether srun runs or will be retried."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def waits(self) -> bool:
        """Whether srun could not start the tasks and will be retried."""
        return self.alive and self._srun is not None and self._srun.returncode is not None

    def covers(self, node: str) -> bool:
        """Whether the step has an agent on a node, or may still start one."""
        return self.alive and node in self.nodes and node not in self.gone

    def end(self, patience: float) -> None:
        """Wait `patience` seconds for srun, whose agents were told to leave; then have it kill
        them, and at last kill it."""
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
        """Wait until the tasks have ended; retry srun while Slurm cannot start them."""
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
"""Seconds for srun to kill its tasks; for nodes that are gone it would wait longer."""

START_WITHIN = 300.0
"""Seconds for which to retry starting srun: the machine may be short of memory."""


def _say_why(error: SlurmError) -> None:
    logger().warning("the agents could not be started", reason=str(error))


CONNECT_WITHIN = 30.0
"""Seconds for an agent to connect, once its container, if any, is open; it takes about one."""

GIVEN_UP_WITHIN = 10.0
"""Seconds to wait until an agent that was killed, and its ranks, which Slurm kills with it, are
gone."""

HUNG_UP = 3.0
"""Seconds after an agent hung up within which srun may report how it ended."""

RECONNECT_WITHIN = 45.0
"""Seconds for an agent whose link broke in any other way to connect again."""

END_WITHIN, LOST_WITHIN = 10.0, 1.0
"""Seconds for srun to end after its agents have left, and if a node is gone."""

BINDINGS_WITHIN = 60.0
"""Seconds for the tasks that print to what srun binds them."""


class SlurmAgents:
    """Starts an agent on each node of a job, in job steps.

    An agent that does not connect is started again, linked through the standard input and output of
    an srun of its own. `lost` is called with a node whose agent has ended, and minus the signal
    that ended it, None if there was none."""

    takes_others = True
    here, killed_within, cleared_within = False, 1.0, 15.0

    def __init__(
        self, nodes: RunNodes, section: SuperviseSection, runtime: RankRuntime | None = None
    ) -> None:
        self.runtime, self._nodes, self._section = runtime or RankRuntime(), nodes, section
        allocation = nodes.allocation
        self.addresses = reachable_addresses(
            allocation.nodes, section.control_interface, self.runtime.interface
        )
        self.bound: dict[str, Interface | None] = {}
        """The interface that ranks will use, by node, where it is known."""
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
        """Listen for agents, which will run `program`."""
        self._program, self._lost = program, lost
        listeners = listen(self.addresses, self._section.ports)
        self._fleet = Fleet(listeners, len(self._nodes.all), hear, refusal)
        self._listener = self.addresses[0], self._fleet.port
        return self._fleet

    def start_missing(self) -> None:
        """Start a step for the nodes without an agent that is there or expected; a separate one for
        those that had one before, since nodes that may be gone could delay it."""
        missing = [node for node in self._nodes.own if self.is_gone(node)]
        known = [node for node in missing if self._seen(node) is not None]
        for group in (known, [node for node in missing if node not in known]):
            alone = [node for node in group if node in self._unreachable]
            for nodes in self._nodes.allocation.steps([n for n in group if n not in alone]):
                self._start(nodes)
            for node in alone:
                self._start([node], by_srun=True)

    def reach_by_srun(self, nodes: Collection[str]) -> None:
        """Start agents that are linked through srun, on nodes whose agents do not connect."""
        self._unreachable |= set(nodes)
        for node in nodes:
            self.forget(node)
        self.start_missing()

    def is_connected(self, node: str) -> bool:
        """Whether an agent that is still expected has connected from a node."""
        seen = self._seen(node)
        return seen is not None and any(
            step.covers(node) and step.number == seen.step for step in self._steps
        )

    def is_gone(self, node: str) -> bool:
        """Whether the agent of a node has ended, according to srun or its link."""
        covering = [step.number for step in self._steps if step.covers(node)]
        if not covering:
            return True
        seen = self._seen(node)
        if seen is None or seen.linked or seen.step < max(covering):
            return False
        if time.monotonic() - seen.went_at < (HUNG_UP if seen.hung_up else RECONNECT_WITHIN):
            return False
        self.mark_gone(node, seen.step)
        return True

    def refusal_of(self, node: str) -> str:
        """Why Slurm has not started the last agent of a node; empty if it has."""
        steps = [step for step in self._steps if node in step.nodes]
        return steps[-1].refusal if steps else ""

    def mark_gone(self, node: str, step: int) -> None:
        """No longer expect an agent on `node` of this step or those before."""
        for started in self._steps:
            if started.number <= step:
                started.gone.add(node)

    def forget(self, node: str) -> None:
        """Expect no agent on `node` until the next start."""
        self.mark_gone(node, len(self._steps))

    @property
    def waits(self) -> bool:
        """Whether srun could not start agents and will be retried."""
        return any(step.waits for step in self._steps)

    def connect_timeout(self) -> float:
        """Seconds left for agents to connect; 0 if all steps have ended."""
        began = max((step.began for step in self._steps if step.alive), default=-inf)
        return max(0.0, began + CONNECT_WITHIN + self.runtime.delay - time.monotonic())

    def end(self, node: str) -> None:
        """Kill an unresponsive agent; Slurm kills its ranks with it."""
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
        """Kill an unresponsive agent, wait until it is gone, and no longer expect it."""
        if self._fleet is not None and (seen := self._seen(node)) is not None:
            self.end(node)
            self._fleet.wait_until(partial(self.is_gone, node), GIVEN_UP_WITHIN)
            self.mark_gone(node, seen.step)

    def launch(self, launch: Launch) -> Launch:
        """`launch` with the job that a rank requeues if the batch process dies."""
        allocation = self._nodes.allocation
        return replace(launch, job=allocation.job if allocation.batch else None)

    def master(self, launch: Launch) -> tuple[str, int]:
        """The address and port of the rendezvous."""
        nodes = self._nodes.allocation.nodes
        return choose_master(os.environ, nodes, launch.attempt.nonce, self.bound)

    def bindings(self) -> Mapping[str, Sequence[TaskBinding]]:
        """The bindings that srun's options ask for, by node; a node without them leaves that to its
        agent."""
        asked = self.runtime.binding or affinity.binding_asked_for(_environment())
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
        """Wait for srun; the agents were told to leave."""
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
        agent = [*self.runtime.run(node_agent.__name__), node_agent.program_text(self._program)]
        options = without_binding(self.runtime.options)
        srun = self.srun("kempner-agents", nodes, 1, options)
        self._steps.append(step)
        try:
            command = [
                *srun,
                "--no-kill",
                *(["--unbuffered"] if by_srun else []),
                *NO_STOPS,
                *agent,
            ]
            step.start(command, affinity.unbound(_environment()) | where)
        except SlurmError as error:
            raise UsageError(f"{error}; use --launcher local") from error

    def _hear_task_end(self, step: AgentStep, task: int, status: int) -> None:
        """An agent has ended, as srun reports; Slurm has killed its ranks."""
        for node in step.nodes:
            seen = self._seen(node)
            if seen is not None and (seen.step, seen.task) == (step.number, task):
                self.mark_gone(node, step.number)
                self._lost(node, status if status < 0 else None)

    def _bound_by_srun(self, nodes: Sequence[str]) -> dict[str, tuple[TaskBinding, ...]]:
        """The bindings that srun gives to tasks started with the options and number of the
        ranks."""
        tasks = self._nodes.allocation.tasks_per_node
        srun = self.srun("kempner-binding", nodes, tasks, self.runtime.options)
        try:
            printed = subprocess.run(
                [*srun, "--overlap", *self.runtime.run(affinity.__name__)],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                check=False,
                timeout=BINDINGS_WITHIN + self.runtime.delay,
                start_new_session=True,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            logger().warning("srun cannot be asked how it binds ranks", reason=str(error))
            return {}
        return affinity.bindings_by_node(printed.stdout.splitlines())

    def srun(
        self, name: str, nodes: Sequence[str], tasks: int, options: Sequence[str]
    ) -> list[str]:
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
            # an earlier step may still hold CPUs, on a dead node for long
            command.append("--overlap")
        if not allocation.batch:
            command.append(f"--jobid={allocation.job}")
        slurm = series() if allocation.uneven else ""
        return [*command, *allocation.gpu_options(nodes, slurm), *options]


def _environment() -> dict[str, str]:
    """The environment of a step."""
    environ = step_environment(os.environ, find_place(os.environ) is JobPlace.STEP)
    environ.pop("TORCHELASTIC_RUN_ID", None)
    return environ
