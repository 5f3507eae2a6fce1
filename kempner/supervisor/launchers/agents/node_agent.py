"""The agent of a node: forks its ranks, reports how they end, and answers questions on the node.

    python -m kempner.supervisor.launchers.agents.node_agent PROGRAM

is the one task of a Slurm step on each node. It imports no torch, so that it always answers; its
fork server does. Slurm signals only a step's direct children, so it passes stop signals on to the
ranks. It outlives them: what is left of a step on a node dies with its task there. It ends when the
supervisor says so, or when the supervisor is gone and no rank is left.

An agent that `kempner join` has started in another job gets no stop signals for its ranks. When its
input says so, it asks the supervisor to release it.

An agent's link to the supervisor: opened again whenever it breaks.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict
from functools import partial
from queue import Empty, SimpleQueue
from signal import SIGKILL, SIGTERM
from typing import Literal, TypeAlias

from kempner.checkpoint.slots.memory import CopyHolder, LentSlots, SlotHolder
from kempner.checkpoint.slots.requests import SlotKeeper, reply_text
from kempner.cluster.machine.limits import memory_group
from kempner.cluster.machine.rlimits import raise_open_file_limit
from kempner.cluster.network.ports import exported_master
from kempner.cluster.slurm.hostlist import node_name
from kempner.cluster.world import OF_AGENT, World
from kempner.run.control.handshake import open_wire
from kempner.run.control.launch_env import BUDDY, IN_MEMORY, Control, Launch, with_token
from kempner.run.control.protocol import MessageError, Secret, shorten
from kempner.run.control.transport import Connection
from kempner.run.output import logs
from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.awake_clock import AwakeClock
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import ReceivedSignal, inbox
from kempner.run.process.threads import keep_running, start_thread
from kempner.run.record.attempts import Attempt
from kempner.supervisor.launchers.agents.affinity import shares
from kempner.supervisor.launchers.agents.buddy.receiver import CopyReceiver
from kempner.supervisor.launchers.agents.buddy.sender import Buddy, CopySender
from kempner.supervisor.launchers.agents.joined.invitation import (
    Departure,
    JoinTerms,
    hear_departures,
)
from kempner.supervisor.launchers.agents.messages import (
    ADDRESSES,
    BEAT,
    PORT,
    STEP,
    TOKEN,
    AgentConfirmation,
    AgentHeartbeat,
    AgentHello,
    Answer,
    AttemptCleared,
    DepartureRequest,
    Ended,
    FromAgent,
    KillRanks,
    LeaveOrder,
    Numbered,
    Question,
    StartRanks,
    StopRanks,
    ToAgent,
    decode_to_agent,
    encode,
    unseal,
)
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.children import ChildRank, Children
from kempner.supervisor.nodes.presence import still_runs
from kempner.supervisor.nodes.probe import answer_text
from kempner.supervisor.nodes.process_look import of_process
from kempner.supervisor.policy.outcome import RankExit

AGAIN = 0.2
"""Seconds between two tries to connect."""


class AgentLink:
    """Talks to the supervisor from a thread, which calls `hear` with each message, and `hello` for
    the first message of each connection.

    What is numbered is sent again over each new connection, until it is confirmed.
    """

    def __init__(
        self,
        launch: Launch,
        task: int,
        hello: Callable[[], AgentHello],
        hear: Callable[[ToAgent], None],
    ) -> None:
        self._launch, self._task, self._hello, self._hear = launch, task, hello, hear
        self._lock = threading.Lock()
        self._added = 0
        self._unheard: deque[Numbered] = deque()
        self._unsent: deque[FromAgent] = deque()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._clock, self._alone_since = AwakeClock(), 0.0
        self._connected = False

    def start(self) -> None:
        """Connect, and begin to listen."""
        keep_running("link", self._serve)

    def alone_for(self) -> float:
        """Seconds for which there has been no connection, of those that this process was awake."""
        now = self._clock.now()
        if self._connected:
            self._alone_since = now
        return now - self._alone_since

    def say(self, message: FromAgent) -> None:
        """Send a message, or drop it if there is no connection."""
        with self._lock:
            self._unsent.append(message)
        os.eventfd_write(self._alarm, 1)

    def post(self, make: Callable[[int], Numbered]) -> None:
        """Send what `make` returns for its number; it is kept until it is confirmed."""
        with self._lock:
            self._added += 1
            message = make(self._added)
            self._unheard.append(message)
            self._unsent.append(message)
        os.eventfd_write(self._alarm, 1)

    def all_heard(self) -> bool:
        """Whether everything that must not be lost has arrived."""
        with self._lock:
            return not self._unheard

    def _serve(self) -> None:
        while True:
            try:
                wire = open_wire(self._launch, self._task)
            except (OSError, MessageError) as error:
                logger().debug("no connection to the supervisor", reason=str(error))
                time.sleep(AGAIN)
                continue
            try:
                self._talk(wire)
            except (OSError, MessageError) as error:
                logger().info("the connection to the supervisor is over", reason=str(error))
            finally:
                self._connected = False
                wire.close()

    def _talk(self, wire: Connection) -> None:
        """Until the connection is over, which raises."""
        wire.trust()
        with self._lock:
            self._unsent = deque(self._unheard)
        wire.send_line(encode(self._hello()))
        self._connected = True
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm, selectors.EVENT_READ)
            selector.register(wire, selectors.EVENT_READ)
            beat_at = time.monotonic()
            while True:
                self._send(wire)
                now = time.monotonic()
                if now >= beat_at:
                    wire.send_line(encode(AgentHeartbeat()))
                    beat_at = now + BEAT
                writes = selectors.EVENT_WRITE if wire.sending else 0
                selector.modify(wire, selectors.EVENT_READ | writes)
                for key, events in selector.select(beat_at - now):
                    if key.fd == self._alarm:
                        os.eventfd_read(self._alarm)
                    elif events & selectors.EVENT_READ:
                        for line in wire.lines():
                            self._take_in(decode_to_agent(line))

    def _send(self, wire: Connection) -> None:
        wire.flush()
        with self._lock:
            messages, self._unsent = list(self._unsent), deque()
        for message in messages:
            wire.send_line(encode(message))

    def _take_in(self, message: ToAgent) -> None:
        if not isinstance(message, AgentConfirmation):
            self._hear(message)
            return
        with self._lock:
            while self._unheard and self._unheard[0].number <= message.number:
                self._unheard.popleft()


LOOK = 0.5
"""Seconds between two looks whether there is still something to do."""

GONE_WITHIN = 10.0
"""Seconds within which ranks that were killed are gone, unless one is stuck in the kernel."""

ALONE = 30.0
"""Seconds without a supervisor, and without ranks, after which an agent ends."""

ALONE_CODE = 1
"""Exit code of an agent that has left unasked: srun tells of it, and it is replaced."""

REFUSED_CODE = int(ExitCode.USAGE)
"""Exit code of an agent that cannot join, as it has said."""

_Event: TypeAlias = ToAgent | ReceivedSignal | Departure


class NodeAgent:
    """Acts on what the supervisor says, and on signals, in the main thread."""

    def __init__(
        self, launch: Launch, task: int, program: Program, terms: JoinTerms | None = None
    ) -> None:
        self._program, self._secret, self._terms = program, launch.control.secret, terms
        self._children, self._sender = Children(), CopySender(self._secret)
        copies = CopyHolder()
        receiver = CopyReceiver(copies, self._secret, launch.control.addresses)
        self._slots = SlotKeeper(SlotHolder(), copies, receiver.listen)
        self._incoming: SimpleQueue[_Event] = SimpleQueue()
        self._link = AgentLink(launch, task, self._hello, self._hear)
        self._attempt = 0
        self._cleared = 0

    def run(self) -> int:
        """Until the supervisor says so, or is gone for good; the exit code."""
        self._link.start()
        self._children.prepare(self._program)
        inbox().react_with(self._incoming.put)
        if self._terms is not None:
            start_thread("departures", partial(hear_departures, self._hear_departure))
        while True:
            try:
                event = self._incoming.get(timeout=LOOK)
            except Empty:
                if not self._children.alive() and self._link.alone_for() > ALONE:
                    logger().warning("the supervisor is gone, and no rank is left")
                    return self._leave(ALONE_CODE)
                continue
            if isinstance(event, LeaveOrder):
                if event.refusal:
                    say(f"kempner join: {event.refusal}", sys.stderr)
                return self._leave(REFUSED_CODE if event.refusal else 0)
            self._act_on(event)

    def _hello(self) -> AgentHello:
        joins = None if self._terms is None else self._terms.now
        return AgentHello(node_name(os.environ), os.getpid(), joins)

    def _leave(self, code: int) -> int:
        self._children.kill()
        self._children.close()
        return code

    def _hear(self, message: ToAgent) -> None:
        """Questions are answered at once, whatever else is going on."""
        if isinstance(message, Question):
            start_thread("answer", partial(self._answer, message))
        else:
            self._incoming.put(message)

    def _hear_departure(self, departure: Departure | None) -> None:
        self._incoming.put(LeaveOrder() if departure is None else departure)

    def _answer(self, question: Question) -> None:
        left = tuple(pid for pid in question.pids if still_runs(pid))
        seen = tuple(map(of_process, question.look))
        told, slots = answer_text(question.about), reply_text(self._slots, question.slots)
        self._link.say(Answer(question.number, told, left, seen, slots))

    def _act_on(self, event: _Event) -> None:
        match event:
            case StartRanks(attempt) if attempt > self._attempt:
                self._attempt = attempt
                self._start(event)
            case StopRanks(attempt) if attempt == self._attempt:
                self._children.ask_to_stop()
            case KillRanks(attempt) if attempt >= self._attempt and attempt > self._cleared:
                self._attempt = self._cleared = attempt
                self._clear(attempt)
            case Departure() if self._link.alone_for() and not self._children.alive():
                self._incoming.put(LeaveOrder())  # there is no supervisor to ask
            case Departure(seconds, reason):
                self._link.post(lambda number: DepartureRequest(number, seconds, shorten(reason)))
            case ReceivedSignal() if self._terms is not None:
                logger().info("a signal is left to `kempner join`")
            case ReceivedSignal(number) if number == SIGTERM:
                self._children.ask_to_stop()
            case ReceivedSignal(number):
                self._children.signal(number)

    def _start(self, order: StartRanks) -> None:
        self._children.forget(GONE_WITHIN)
        self._children.prepare(self._program)
        self._sender.end()
        self._slots.copies.clear()
        common = self._environment(order)
        ranks = range(order.first, order.first + order.count)
        self._slots.own.keep_only(ranks if IN_MEMORY in common else ())
        buddy, lent = common.pop(BUDDY, ""), dict[int, LentSlots]()
        post = partial(self._post, order.attempt)
        for local, cpus in enumerate(shares(os.sched_getaffinity(0), order.count)):
            world = World(order.first + local, order.size, local, order.count, "agent")
            environ = {**common, **world.environment(), **_as_task(world)}
            environ |= _of_rank(environ, world.rank)
            if IN_MEMORY in common:
                lent[world.rank] = self._slots.own.lend(world.rank, environ, bool(buddy))
            self._children.start(ChildRank(world.rank, environ, None, cpus), self._program, post)
        if buddy:
            self._sender.begin(Buddy.parse(buddy), lent)

    def _environment(self, order: StartRanks) -> dict[str, str]:
        """What all ranks here have in common."""
        address, port = order.master
        token = unseal(self._secret, order.sealed)
        return {
            **os.environ,
            **with_token(order.variables, token),
            OF_AGENT: "1",
            **exported_master(os.environ, ()).variables(),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }

    def _post(self, attempt: int, end: RankExit) -> None:
        kills = 0 if end.ended_by_us or end.status != -SIGKILL else _oom_kills()
        sent: Literal["none", "stop", "kill"] = "stop" if end.asked else "none"
        if end.ended_by_us:
            sent = "kill"
        self._link.post(
            lambda number: Ended(number, attempt, end.rank, end.status, sent, end.sentence, kills)
        )

    def _clear(self, attempt: int) -> None:
        self._children.kill()
        clean = self._children.forget(GONE_WITHIN)
        if not clean:
            logger().warning("a rank cannot be killed")
        self._children.prepare(self._program)  # so that a fork server that has died is back soon
        self._link.post(lambda number: AttemptCleared(number, attempt, clean))


def _oom_kills() -> int:
    """Processes of the job on this node that the kernel has killed for want of memory."""
    try:
        group = memory_group()
        return 0 if group is None else group.oom_kills()
    except OSError as error:
        logger().warning("the control group cannot be read", reason=str(error))
        return 0


def _of_rank(environ: Mapping[str, str], rank: int) -> dict[str, str]:
    launch = Launch.from_environment(environ)
    return {} if launch is None else launch.of_rank(rank, environ)


def _as_task(world: World) -> dict[str, str]:
    """What Slurm's variables would say of a rank that was a task of its own."""
    return {
        "SLURM_PROCID": str(world.rank),
        "SLURM_LOCALID": str(world.local_rank),
        "SLURM_NTASKS": str(world.size),
        "SLURM_NPROCS": str(world.size),
    }


def program_text(program: Program) -> str:
    """A program as an argument for this module's command."""
    return json.dumps(asdict(program))


def _program(text: str) -> Program:
    told = json.loads(text)
    command, modules = tuple(told["command"]), tuple(told["modules"])
    python, pattern = str(told["python"]), str(told["pattern"])
    return Program(command, bool(told["ours"]), modules, python, pattern)


def _launch(environ: MutableMapping[str, str]) -> Launch:
    """Where the supervisor is, and this agent's secret, which is taken out of the environment."""
    step, port = int(environ.pop(STEP)), int(environ.pop(PORT))
    addresses = tuple(environ.pop(ADDRESSES).split(","))
    control = Control(addresses, port, Secret(environ.pop(TOKEN)))
    return Launch(Attempt(step, ""), control)


def main(text: str, environ: MutableMapping[str, str]) -> None:
    """Be the agent of this node."""
    inbox().install()
    logs.configure()
    raise_open_file_limit()
    launch, terms = _launch(environ), JoinTerms.taken_from(environ)
    task = int(environ["SLURM_PROCID"]) if terms is None else 0
    code = NodeAgent(launch, task, _program(text), terms).run()
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for ranks that are stuck


if __name__ == "__main__":
    main(sys.argv[1], os.environ)
