"""The agent of a node: forks its ranks, reports how they end, and answers questions on the node.

    python -m kempner.supervisor.launchers.agents.node_agent PROGRAM

is the one task of a Slurm step on each node. It imports no torch, so that it always answers; its
fork server does. Slurm signals only a step's direct children, so it passes stop signals on to the
ranks. It outlives them: what is left of a step on a node dies with its task there. It ends when the
supervisor says so, or when the supervisor is gone and no rank is left.

An agent that `kempner join` has started in another job gets no stop signals for its ranks. When its
input says so, it asks the supervisor to release it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from signal import SIGTERM
from typing import Protocol, TypeAlias

from kempner.checkpoint.slots.memory import CopyHolder, LentSlots, SlotHolder
from kempner.checkpoint.slots.requests import SlotKeeper, reply_text
from kempner.cluster.machine import leave_no_cores, memory_group, raise_open_file_limit
from kempner.cluster.network.ports import exported_master
from kempner.cluster.slurm.hostlist import node_name
from kempner.cluster.world import OF_AGENT, World
from kempner.probe.activity import ActivityWatch, StackReader, Stillness
from kempner.probe.gpu_events import GpuTrouble, GpuWatch
from kempner.probe.node import answer_text
from kempner.probe.processes import describe_process, still_runs
from kempner.run.control.launch_env import Launch, mark_of
from kempner.run.control.leftovers import end_leftovers
from kempner.run.control.protocol import DumpStacks, Stop, TellRanks
from kempner.run.link.auth import AGENTS, Door, Secret
from kempner.run.link.client import LinkClient, Outbox, SilenceClock
from kempner.run.link.messages import Alive, Caller, Message, Post, Role, shorten
from kempner.run.link.wire import Connection, connect
from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.process.signals import ReceivedSignal, inbox
from kempner.run.process.threads import AwakeClock, start_thread
from kempner.run.process.whereabouts import CodePlace
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.rank_hub import LinkState, RankHub
from kempner.supervisor.launchers.agents.affinity import bindings_of_ranks
from kempner.supervisor.launchers.agents.buddy.copies import CopyReceiver, CopySender
from kempner.supervisor.launchers.agents.invitation import (
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
    Answer,
    AttemptCleared,
    DepartureRequest,
    Ended,
    GpuTold,
    KillRanks,
    LeaveOrder,
    Question,
    RanksStill,
    RankStill,
    Sent,
    StartRanks,
    TaskBinding,
    ToAgent,
    decode_from_agent,
    decode_to_agent,
)
from kempner.supervisor.launchers.agents.stdio import BY_SRUN, offer_stdio
from kempner.supervisor.launchers.base import TELLING, Program
from kempner.supervisor.launchers.children import Children
from kempner.supervisor.launchers.rank_output import ChildRank
from kempner.supervisor.policy.outcome import RankExit, with_lack_of_memory

AGAIN = 0.2
"""Seconds between two tries to connect."""


REPORT_BEAT = 1.0
"""Seconds between two sums of what ranks report."""


@dataclass(frozen=True)
class SupervisorPlace:
    """Where the supervisor listens to agents, the likeliest address first, and their secret."""

    addresses: tuple[str, ...]
    port: int
    secret: Secret


class AgentLink:
    """Talks to the supervisor from a thread, which calls `listen` with each message.

    What is numbered is sent again over each new connection, until it is confirmed. `ranks` follows
    the link.
    """

    def __init__(
        self,
        place: SupervisorPlace,
        caller: Callable[[], Caller],
        listen: Callable[[ToAgent], None],
    ) -> None:
        self._place, self._caller, self._listen = place, caller, listen
        self._beat_at = self._report_at = 0.0
        self._clock, self._alone_since = AwakeClock(), 0.0
        outbox, silence = Outbox(decode_from_agent), SilenceClock(inf)
        self._link: LinkClient[ToAgent] = LinkClient(
            self._dial, decode_to_agent, self, outbox, silence, (AGAIN, AGAIN)
        )
        self.start, self.say, self.post = self._link.start, self._link.say, self._link.post
        self.close = self._link.close
        self.ranks = RankHub(self.say)

    def alone_for(self) -> float:
        """Seconds for which there has been no connection, of those that this process was awake."""
        now = self._clock.now()
        if self._link.alone_since is None:
            self._alone_since = now
        return now - self._alone_since

    def _dial(self) -> Connection:
        where = self._place
        connection = connect(where.addresses, where.port)
        return Door(where.secret, AGENTS).open(connection, self._caller())

    def opened(self) -> None:
        """A sign of life is due."""
        self._beat_at = 0.0
        self.ranks.follow(LinkState.UP)

    def hear(self, message: ToAgent) -> None:
        """Pass it on."""
        self._listen(message)

    def due(self, behind: bool) -> Iterator[Message]:
        """What ranks report, or a sign of life every `BEAT` seconds."""
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + REPORT_BEAT
            for summary in () if behind else self.ranks.summary():
                self._beat_at = now + BEAT  # it is a sign of life, too
                yield summary
        if now >= self._beat_at:
            self._beat_at = now + BEAT
            yield Alive()

    def next_at(self, connected: bool) -> float:
        """When the next of these is due."""
        return min(self._beat_at, self._report_at) if connected else inf

    def look(self, connected: bool) -> None:
        """Without a connection the ranks have none. The main thread looks at its clock by
        itself."""
        if not connected:
            refused = self._link.silence.refuses
            self.ranks.follow(LinkState.REFUSED if refused else LinkState.CUT)


LOOK = 0.5
"""Seconds between two looks whether there is still something to do."""

LEFT_WITHIN = 10.0
"""Seconds that ranks of an earlier supervisor get to leave, which can commit nothing any more."""

USE_EVERY, TELL_EVERY = 5.0, 30.0
"""Seconds between two looks at what the ranks use, and between two messages about what has not
changed."""

ALONE = 30.0
"""Seconds without a supervisor, and without ranks, after which an agent ends."""

ALONE_AT_A_STOP = 3.0
"""The same where the ranks were to stop: the job, which is to go back into the queue, waits for
it."""

ALONE_CODE = 1
"""Exit code of an agent that has left unasked: srun tells of it, and it is replaced."""

REFUSED_CODE = int(ExitCode.USAGE)
"""Exit code of an agent that cannot join, as it has said."""

_Event: TypeAlias = ToAgent | ReceivedSignal | Departure


class Link(Protocol):
    """What an agent says to its supervisor, as `AgentLink` does it, and where its ranks do."""

    ranks: RankHub

    def start(self) -> None: ...

    def alone_for(self) -> float: ...

    def say(self, message: Message) -> None: ...

    def post(self, make: Callable[[int], Post]) -> None: ...


class RanksHere(Protocol):
    """What ranks of a `run` are given on a machine; `gone_within` is in seconds, for those that
    were killed, unless one is stuck in the kernel. With `shows_all` what every rank of a program of
    the user's own prints is shown, as by srun; else rank 0's."""

    gone_within: float
    shows_all: bool
    run: RunDirectory

    def environment(self, launch: Launch, master: tuple[str, int]) -> dict[str, str]:
        """What all ranks here have in common."""

    def place(self, world: World) -> dict[str, str]:
        """What names the place of one."""

    def bindings(self, told: Sequence[TaskBinding], ranks: int) -> Sequence[TaskBinding]:
        """What each of them is bound to."""


class RanksOfAgent:
    """Of a process that is the agent of one of several nodes."""

    gone_within, shows_all = 10.0, True

    def __init__(self, run: RunDirectory) -> None:
        self.run = run

    def environment(self, launch: Launch, master: tuple[str, int]) -> dict[str, str]:
        """The address is told, and whether the user has chosen the port."""
        address, port = master
        return {
            **TELLING,
            **os.environ,
            **launch.environment(),
            OF_AGENT: "1",
            **exported_master(os.environ, ()).variables(),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }

    def place(self, world: World) -> dict[str, str]:
        """As Slurm's variables would say it of a task, too."""
        return world.environment() | {
            "SLURM_PROCID": str(world.rank),
            "SLURM_LOCALID": str(world.local_rank),
            "SLURM_NTASKS": str(world.size),
            "SLURM_NPROCS": str(world.size),
        }

    def bindings(self, told: Sequence[TaskBinding], ranks: int) -> Sequence[TaskBinding]:
        """As the user wishes, or a share of the CPUs each."""
        return bindings_of_ranks(told, os.sched_getaffinity(0), ranks)


def _oom_kills() -> tuple[int, str]:
    """The out-of-memory kills in the job's control group on this node, or else in that of this
    process, and the folder of that group."""
    try:
        group = memory_group()
        return (0, "") if group is None else (group.oom_kills(), str(group.path))
    except OSError as error:
        logger().warning("the control group cannot be read", reason=str(error))
        return 0, ""


class NodeAgent:
    """Acts on what the supervisor says, and on signals, in one thread: the main one, where it is a
    process of its own. Its supervisor listens at the `addresses`."""

    def __init__(
        self,
        program: Program,
        children: Children,
        here: RanksHere,
        secret: Secret,
        addresses: Sequence[str],
        terms: JoinTerms | None = None,
    ) -> None:
        self._program, self._children, self._here = program, children, here
        self._secret, self._terms = secret, terms
        self._sender, copies = CopySender(secret), CopyHolder()
        receiver = CopyReceiver(copies, secret, addresses, node_name(os.environ))
        self._slots = SlotKeeper(SlotHolder(), copies, receiver.listen)
        self._incoming: SimpleQueue[_Event] = SimpleQueue()
        self._attempt = self._oom_kills = 0
        self._found: Mapping[int, Stillness] = {}
        self._gpus = GpuWatch(self._tell_of_gpu)
        self._cleared = 0
        self._patience = ALONE
        self._over = threading.Event()

    def run(self, link: Link) -> int:
        """Until the supervisor says so, or is gone for good; the exit code."""
        self._link = link
        self._link.start()
        self._children.prepare(self._program)
        if not self._program.ours:
            start_thread("activity", self._watch_ranks)
        self._gpus.start()
        if self._terms is not None:
            start_thread("departures", partial(hear_departures, self._hear_departure))
        while True:
            try:
                event = self._incoming.get(timeout=LOOK)
            except Empty:
                if not self._children.alive() and self._link.alone_for() > self._patience:
                    logger().warning("the supervisor is gone, and no rank is left")
                    return self._leave(ALONE_CODE)
                continue
            if isinstance(event, LeaveOrder):
                if event.refusal:
                    say(f"kempner join: {event.refusal}", sys.stderr)
                return self._leave(REFUSED_CODE if event.refusal else 0)
            self._act_on(event)

    def take_signal(self, came: ReceivedSignal) -> None:
        """Act on a signal."""
        self._incoming.put(came)

    def _leave(self, code: int) -> int:
        self._over.set()
        self._gpus.close()
        self._children.kill()
        self._children.close()
        return code

    def hear(self, message: ToAgent) -> None:
        """Questions are answered, and ranks told, at once, whatever else is going on. A stop that
        is for all is a signal to those that cannot be told."""
        if isinstance(message, Question):
            start_thread("answer", partial(self._answer, message))
        elif isinstance(message, TellRanks | Alive):
            self._link.ranks.pass_on(message)
            said = message.message if isinstance(message, TellRanks) else None
            if isinstance(said, DumpStacks):
                start_thread("stacks", self._tell_places)
            elif isinstance(said, Stop) and said.reason.ends_run:
                # To be signalled would say more than that the ranks go on elsewhere.
                self._incoming.put(message)
        else:
            self._incoming.put(message)

    def _hear_departure(self, departure: Departure | None) -> None:
        self._incoming.put(LeaveOrder() if departure is None else departure)

    def _answer(self, question: Question) -> None:
        left = tuple(pid for pid in question.pids if still_runs(pid))
        seen = tuple(map(describe_process, question.look))
        told, slots = answer_text(question.about), reply_text(self._slots, question.slots)
        self._link.say(Answer(question.number, told, left, seen, slots))

    def _watch_ranks(self) -> None:
        """Tell what the ranks do, as far as it is seen from outside, until the agent leaves: at
        once what has changed, and now and then what has not."""
        clock = AwakeClock()
        watch, told_at, before = ActivityWatch(clock.now), -inf, dict[int, tuple[bool, bool]]()
        while not self._over.wait(USE_EVERY):
            attempt, pids = self._attempt, self._children.pids()
            self._found = watch.look(pids)
            now = {rank: (how.works, how.idle > 0) for rank, how in self._found.items()}
            if now == before and clock.now() - told_at < TELL_EVERY:
                continue
            told_at, before = clock.now(), now
            told = (_told_still(rank, how, None) for rank, how in self._found.items())
            self._link.say(RanksStill(attempt, tuple(told)))

    def _tell_places(self) -> None:
        """Tell where each rank stands, or that this cannot be seen."""
        if self._program.ours:
            return
        attempt, stacks, pids = self._attempt, StackReader(), self._children.pids()
        with ThreadPoolExecutor(max(1, len(pids))) as readers:
            places = readers.map(lambda pid: stacks.place(pid) or CodePlace(), pids.values())
            found = self._found
            told = [
                _told_still(rank, found.get(rank, Stillness()), place)
                for rank, place in zip(pids, places, strict=True)
            ]
        self._link.say(RanksStill(attempt, tuple(told)))

    def _tell_of_gpu(self, found: GpuTrouble) -> None:
        told = (found.gpu, found.xid, shorten(found.reason), found.broken)
        self._link.post(lambda number: GpuTold(number, *told))

    def _act_on(self, event: _Event) -> None:
        match event:
            case StartRanks(attempt) if attempt > self._attempt:
                first, self._attempt, self._patience = not self._attempt, attempt, ALONE
                if not (first and self._is_hindered(event)):
                    self._start(event)
            case TellRanks(attempt) if attempt == self._attempt and not self._children.asked:
                self._children.ask_to_stop(self._link.ranks.pids())
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
                self._patience = ALONE_AT_A_STOP
                self._children.ask_to_stop()
            case ReceivedSignal(number):
                self._children.signal(number)

    def _is_hindered(self, order: StartRanks) -> bool:
        """Whether ranks of an earlier supervisor are still here, and cannot be ended: a node that
        Slurm has lost and found may have some."""
        mark = mark_of(os.environ)
        try:
            if mark is not None:
                end_leftovers(RunDirectory(mark.run), LEFT_WITHIN)
        except UsageError as error:
            why = shorten(f"{node_name(os.environ)}: {error}")
            for rank in range(order.first, order.first + order.count):
                self._post(order.attempt, RankExit(rank, None, sentence=why, unstarted=True))
            return True
        return False

    def _start(self, order: StartRanks) -> None:
        self._children.forget(self._here.gone_within)
        self._children.prepare(self._program)
        self._oom_kills, _ = _oom_kills()
        self._sender.end()
        self._slots.copies.clear()
        launch = order.launch.open(self._secret, order.attempt)
        size = order.size if order.ranks is None else order.ranks
        socket = self._link.ranks.begin(order.attempt, size, launch.secret)
        launch = replace(launch, socket=socket)
        common, lent = self._here.environment(launch, order.master), dict[int, LentSlots]()
        ranks = range(order.first, order.first + order.count)
        self._slots.own.keep_only(ranks if launch.in_memory else ())
        post = partial(self._post, order.attempt)
        shows_all = self._here.shows_all and not self._program.ours
        for local, bound in enumerate(self._here.bindings(order.bindings, order.count)):
            world = World(order.first + local, order.size, local, order.count, "agent")
            environ = common | dict(bound.devices.items()) | self._here.place(world)
            environ |= launch.of_rank(world.rank, environ)
            if launch.in_memory:
                has_buddy = order.buddy is not None
                own = self._slots.own.lend(world.rank, environ, has_buddy)
                lent |= {} if own is None else {world.rank: own}
            output = self._here.run.output(order.attempt, order.first_rank + local)
            shown = shows_all or not world.rank
            child = ChildRank(world.rank, environ, output, bound.cpus, shown)
            self._children.start(child, self._program, post)
        if order.buddy is not None:
            self._sender.begin(order.buddy, lent)

    def _post(self, attempt: int, end: RankExit) -> None:
        kills = 0
        if not end.ended_by_us and end.status:
            kills, group = _oom_kills()
            end = with_lack_of_memory(end, group) if kills > self._oom_kills else end
        sent: Sent = "stop" if end.asked else "none"
        if end.unstarted:
            sent = "nothing"
        if end.ended_by_us:
            sent = "kill"
        words = shorten(end.sentence)
        self._link.post(
            lambda number: Ended(number, attempt, end.rank, end.status, sent, words, kills)
        )

    def _clear(self, attempt: int) -> None:
        self._children.kill()
        self._link.ranks.end()
        clean = self._children.forget(self._here.gone_within)
        if not clean:
            logger().warning("a rank cannot be killed")
        self._children.prepare(self._program)  # so that a fork server that has died is back soon
        self._link.post(lambda number: AttemptCleared(number, attempt, clean))


def _told_still(rank: int, how: Stillness, at: CodePlace | None) -> RankStill:
    place = None if at is None else (shorten(at.line), shorten(at.collective))
    return RankStill(rank, how.idle, how.still, place, how.works)


def program_text(program: Program) -> str:
    """A program as an argument for this module's command."""
    return json.dumps(asdict(program))


def _program(text: str) -> Program:
    told = json.loads(text)
    command, modules = tuple(told["command"]), tuple(told["modules"])
    python, pattern = str(told["python"]), str(told["pattern"])
    return Program(command, bool(told["ours"]), modules, python, pattern)


def _place(environ: MutableMapping[str, str]) -> SupervisorPlace:
    """Where the supervisor is, and the agents' secret, which is taken out of the environment."""
    addresses, port = tuple(environ.pop(ADDRESSES).split(",")), int(environ.pop(PORT))
    if environ.pop(BY_SRUN, ""):
        addresses, port = ("127.0.0.1",), offer_stdio()
    return SupervisorPlace(addresses, port, Secret(environ.pop(TOKEN)))


def _run(terms: JoinTerms | None, environ: Mapping[str, str]) -> RunDirectory:
    if terms is not None:
        return RunDirectory(Path(terms.run))
    mark = mark_of(environ)
    assert mark is not None, "what a supervisor starts is marked"
    return RunDirectory(mark.run)


def main(text: str, environ: MutableMapping[str, str]) -> None:
    """Be the agent of this node."""
    inbox().install()
    raise_open_file_limit()
    leave_no_cores()
    place, terms = _place(environ), JoinTerms.taken_from(environ)
    step = int(environ.pop(STEP))
    task = int(environ["SLURM_PROCID"]) if terms is None else 0

    def caller() -> Caller:
        role, joins = (Role.AGENT, None) if terms is None else (Role.GUEST, terms.now)
        return Caller(role, step, task, node_name(os.environ), os.getpid(), joins)

    here, program = RanksOfAgent(_run(terms, environ)), _program(text)
    agent = NodeAgent(program, Children(), here, place.secret, place.addresses, terms)
    inbox().react_with(agent.take_signal)
    code = agent.run(AgentLink(place, caller, agent.hear))
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for ranks that are stuck


if __name__ == "__main__":
    main(sys.argv[1], os.environ)
