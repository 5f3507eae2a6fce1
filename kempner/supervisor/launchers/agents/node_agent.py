"""The agent of a node: forks its ranks, reports how they end, and answers questions about the node.

    python -m kempner.supervisor.launchers.agents.node_agent PROGRAM

In a Slurm job it is the only task of a step on each node. It imports no torch, so that it always
responds; its fork server does. Slurm signals only direct children of a step, so the agent passes
stop signals on to the ranks. It outlives them, since Slurm kills what is left of a step on a node
together with its task. It ends when the supervisor orders it to, or when the supervisor is gone and
no rank is left.

An agent that `kempner join` has started in another job ignores stop signals. When `kempner join`
writes a `Departure` to its standard input, it asks the supervisor to release it."""

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
from kempner.cluster.machine import (
    OutOfMemoryKills,
    leave_no_cores,
    memory_group,
    raise_open_file_limit,
)
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
from kempner.supervisor.launchers.agents.last_resort import LastResort
from kempner.supervisor.launchers.agents.messages import (
    ADDRESSES,
    BEAT,
    PORT,
    STEP,
    TOKEN,
    ActivityReport,
    Answer,
    AttemptCleared,
    DepartureRequest,
    Ended,
    GpuReport,
    KillRanks,
    LeaveOrder,
    Question,
    RankActivity,
    Sent,
    StartRanks,
    TaskBinding,
    ToAgent,
    decode_from_agent,
    decode_to_agent,
)
from kempner.supervisor.launchers.agents.stdio import BY_SRUN, offer_stdio
from kempner.supervisor.launchers.base import RANK_DEFAULTS, Program
from kempner.supervisor.launchers.children import Children
from kempner.supervisor.launchers.rank_output import ChildRank
from kempner.supervisor.policy.outcome import RankExit, with_lack_of_memory

AGAIN = 0.2
"""Seconds between two attempts to connect."""


REPORT_BEAT = 1.0
"""Seconds between two summaries of the ranks' reports."""


@dataclass(frozen=True)
class SupervisorPlace:
    """Where the supervisor listens for agents, the likeliest address first, and the agents'
    secret."""

    addresses: tuple[str, ...]
    port: int
    secret: Secret


class AgentLink:
    """Connects to the supervisor from a thread, which calls `listen` with each message.

    Numbered messages are sent again over each new connection until they are acknowledged. `ranks`
    is told the state of the link."""

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
        """Seconds without a connection, not counting those for which this process was suspended."""
        now = self._clock.now()
        if self._link.alone_since is None:
            self._alone_since = now
        return now - self._alone_since

    def _dial(self) -> Connection:
        where = self._place
        connection = connect(where.addresses, where.port)
        return Door(where.secret, AGENTS).open(connection, self._caller())

    def opened(self) -> None:
        self._beat_at = 0.0
        self.ranks.follow(LinkState.UP)

    def hear(self, message: ToAgent) -> None:
        self._listen(message)

    def due(self, behind: bool) -> Iterator[Message]:
        """Summaries of the ranks' reports, or `Alive` every `BEAT` seconds."""
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + REPORT_BEAT
            for summary in () if behind else self.ranks.summary():
                self._beat_at = now + BEAT  # a summary is a sign of life, too
                yield summary
        if now >= self._beat_at:
            self._beat_at = now + BEAT
            yield Alive()

    def next_at(self, connected: bool) -> float:
        return min(self._beat_at, self._report_at) if connected else inf

    def look(self, connected: bool) -> None:
        """Tell the ranks that there is no connection. How long that lasts, `alone_for` measures."""
        if not connected:
            refused = self._link.silence.refuses
            self.ranks.follow(LinkState.REFUSED if refused else LinkState.CUT)


LOOK = 0.5
"""Seconds between two checks for the end of supervisor and ranks."""

LEFT_WITHIN = 10.0
"""Seconds for ranks of an earlier supervisor, which can no longer commit, to exit."""

USE_EVERY, TELL_EVERY = 5.0, 30.0
"""Seconds between two looks at the ranks' activity, and between two messages if it does not
change."""

ALONE = 30.0
"""Seconds without a supervisor, and without ranks, after which an agent ends."""

ALONE_AT_A_STOP = 3.0
"""As `ALONE`, once the ranks were asked to stop: the requeue of the job waits for the agent."""

ALONE_CODE = 1
"""Exit code of an agent that leaves without an order: srun reports it, and the supervisor replaces
it."""

REFUSED_CODE = int(ExitCode.USAGE)
"""Exit code of an agent that cannot join; it has printed why."""

_Event: TypeAlias = ToAgent | ReceivedSignal | Departure


class Link(Protocol):
    """An agent's connection to its supervisor, as `AgentLink`; `ranks` are the ranks' connections
    to the agent."""

    ranks: RankHub

    def start(self) -> None: ...

    def alone_for(self) -> float: ...

    def say(self, message: Message) -> None: ...

    def post(self, make: Callable[[int], Post]) -> None: ...


class RankSetup(Protocol):
    """How the ranks of a `run` are set up on a machine. Killed ranks are gone within `gone_within`
    seconds unless one is stuck in the kernel. With `shows_all` the output of every rank of a user's
    program is shown, as by srun; else only rank 0's."""

    gone_within: float
    shows_all: bool
    run: RunDirectory

    def environment(self, launch: Launch, master: tuple[str, int]) -> dict[str, str]:
        """The environment of all ranks on this machine."""

    def place(self, world: World) -> dict[str, str]:
        """The variables that give one rank its place."""

    def bindings(self, given: Sequence[TaskBinding], ranks: int) -> Sequence[TaskBinding]:
        """The binding of each rank; `given` are those of `StartRanks`."""


class AgentRankSetup:
    """For an agent that is a process of its own, on one of several nodes."""

    gone_within, shows_all = 10.0, True

    def __init__(self, run: RunDirectory) -> None:
        self.run = run

    def environment(self, launch: Launch, master: tuple[str, int]) -> dict[str, str]:
        address, port = master
        return {
            **RANK_DEFAULTS,
            **os.environ,
            **launch.environment(),
            OF_AGENT: "1",
            **exported_master(os.environ, ()).variables(),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }

    def place(self, world: World) -> dict[str, str]:
        """Torch's variables, and those that Slurm sets in a task."""
        return world.environment() | {
            "SLURM_PROCID": str(world.rank),
            "SLURM_LOCALID": str(world.local_rank),
            "SLURM_NTASKS": str(world.size),
            "SLURM_NPROCS": str(world.size),
        }

    def bindings(self, given: Sequence[TaskBinding], ranks: int) -> Sequence[TaskBinding]:
        return bindings_of_ranks(given, os.sched_getaffinity(0), ranks)


def _oom_kills() -> tuple[int, str]:
    """The out-of-memory kills in the job's control group on this node, or else in this process's,
    and the path of that group."""
    try:
        group = memory_group()
        return (0, "") if group is None else (group.oom_kills(), str(group.path))
    except OSError as error:
        logger().warning("the control group cannot be read", reason=str(error))
        return 0, ""


class NodeAgent:
    """Handles the supervisor's messages and signals, one after the other, in the thread that calls
    `run`: the main thread if the agent is a process of its own. Its supervisor listens at
    `addresses`."""

    def __init__(
        self,
        program: Program,
        children: Children,
        here: RankSetup,
        secret: Secret,
        addresses: Sequence[str],
        terms: JoinTerms | None = None,
        last_resort: LastResort | None = None,
    ) -> None:
        self._program, self._children, self._here = program, children, here
        self._secret, self._terms, self._last_resort = secret, terms, last_resort
        self._job: str | None = None
        self._sender, copies = CopySender(secret), CopyHolder()
        receiver = CopyReceiver(copies, secret, addresses, node_name(os.environ))
        self._slots = SlotKeeper(SlotHolder(), copies, receiver.listen)
        self._incoming: SimpleQueue[_Event] = SimpleQueue()
        self._attempt, self._kills = 0, OutOfMemoryKills(0, -inf)
        self._found: Mapping[int, Stillness] = {}
        self._gpus = GpuWatch(self._report_gpu)
        self._cleared = 0
        self._patience = ALONE
        self._over = threading.Event()

    def run(self, link: Link) -> int:
        """Serve until the supervisor orders the agent to leave, or is gone; the exit code."""
        self._link = link
        self._link.start()
        self._children.prepare(self._program)
        if not self._program.ours:
            start_thread("activity", self._watch_ranks)
        self._gpus.start()
        if self._terms is not None:
            start_thread("departures", partial(hear_departures, self._hear_departure))
        while True:
            if time.monotonic() - self._kills.noted_at >= USE_EVERY:
                self._kills.note(_oom_kills()[0], time.monotonic())
            try:
                event = self._incoming.get(timeout=LOOK)
            except Empty:
                if self._is_left_alone():
                    return self._leave(ALONE_CODE)
                continue
            if isinstance(event, LeaveOrder):
                if event.refusal:
                    say(f"kempner join: {event.refusal}", sys.stderr)
                return self._leave(REFUSED_CODE if event.refusal else 0)
            self._act_on(event)

    def _is_left_alone(self) -> bool:
        """Whether the supervisor is gone, and no rank is left; the job is seen to then."""
        if self._link.alone_for() <= self._patience:
            return False
        last_resort = self._last_resort
        if last_resort is not None and self._patience == ALONE_AT_A_STOP:
            last_resort.begin(self._job, self._attempt)
        if self._children.alive():
            return False
        logger().warning("the supervisor is gone, and no rank is left")
        if last_resort is not None:
            last_resort.finish(self._job, self._attempt)
        return True

    def take_signal(self, received: ReceivedSignal) -> None:
        self._incoming.put(received)

    def _leave(self, code: int) -> int:
        self._over.set()
        self._gpus.close()
        self._children.kill()
        self._children.close()
        return code

    def hear(self, message: ToAgent) -> None:
        """Queue a message; questions are answered, and messages for ranks passed on, at once. A
        stop is queued as well, to send a signal to the ranks without a connection."""
        if isinstance(message, Question):
            start_thread("answer", partial(self._answer, message))
        elif isinstance(message, TellRanks | Alive):
            self._link.ranks.pass_on(message)
            content = message.message if isinstance(message, TellRanks) else None
            if isinstance(content, DumpStacks):
                start_thread("stacks", self._report_places)
            elif isinstance(content, Stop) and content.reason.ends_run:
                # Other stops are not signalled: the ranks go on elsewhere, and a program might
                # take SIGTERM for the end.
                self._incoming.put(message)
        else:
            self._incoming.put(message)

    def _hear_departure(self, departure: Departure | None) -> None:
        self._incoming.put(LeaveOrder() if departure is None else departure)

    def _answer(self, question: Question) -> None:
        left = tuple(pid for pid in question.pids if still_runs(pid))
        seen = tuple(map(describe_process, question.look))
        vitals, slots = answer_text(question.about), reply_text(self._slots, question.slots)
        self._link.say(Answer(question.number, vitals, left, seen, slots))

    def _watch_ranks(self) -> None:
        """Report the ranks' activity, observed from outside, until the agent leaves: changes at
        once, and else every `TELL_EVERY` seconds."""
        clock = AwakeClock()
        watch, sent_at, before = ActivityWatch(clock.now), -inf, dict[int, tuple[bool, bool]]()
        while not self._over.wait(USE_EVERY):
            attempt, pids = self._attempt, self._children.pids()
            self._found = watch.look(pids)
            now = {rank: (how.works, how.idle > 0) for rank, how in self._found.items()}
            if now == before and clock.now() - sent_at < TELL_EVERY:
                continue
            sent_at, before = clock.now(), now
            activities = (_rank_activity(rank, how, None) for rank, how in self._found.items())
            self._link.say(ActivityReport(attempt, tuple(activities)))

    def _report_places(self) -> None:
        """Report the line and collective in which each rank is, as far as its stack can be read."""
        if self._program.ours:
            return
        attempt, stacks, pids = self._attempt, StackReader(), self._children.pids()
        with ThreadPoolExecutor(max(1, len(pids))) as readers:
            places = readers.map(lambda pid: stacks.place(pid) or CodePlace(), pids.values())
            found = self._found
            activities = [
                _rank_activity(rank, found.get(rank, Stillness()), place)
                for rank, place in zip(pids, places, strict=True)
            ]
        self._link.say(ActivityReport(attempt, tuple(activities)))

    def _report_gpu(self, found: GpuTrouble) -> None:
        error = (found.gpu, found.xid, shorten(found.reason), found.broken)
        self._link.post(lambda number: GpuReport(number, *error))

    def _act_on(self, event: _Event) -> None:
        match event:
            case StartRanks(attempt) if attempt > self._attempt:
                first, self._attempt, self._patience = not self._attempt, attempt, ALONE
                if not (first and self._is_blocked(event)):
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
                logger().info("ignoring a signal, which `kempner join` handles")
            case ReceivedSignal(number) if number == SIGTERM:
                self._patience = ALONE_AT_A_STOP
                self._children.ask_to_stop()
            case ReceivedSignal(number):
                self._children.signal(number)

    def _is_blocked(self, order: StartRanks) -> bool:
        """End ranks that an earlier supervisor left on this node, which Slurm may have lost for a
        while; whether that failed."""
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
        self._kills = OutOfMemoryKills(_oom_kills()[0], time.monotonic())
        self._sender.end()
        self._slots.copies.clear()
        launch = order.launch.open(self._secret, order.attempt)
        self._job = launch.job
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
            end = with_lack_of_memory(end, group) if self._kills.recent(kills) else end
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
        self._children.prepare(self._program)  # in case the fork server has died
        self._link.post(lambda number: AttemptCleared(number, attempt, clean))


def _rank_activity(rank: int, how: Stillness, at: CodePlace | None) -> RankActivity:
    place = None if at is None else (shorten(at.line), shorten(at.collective))
    return RankActivity(rank, how.idle, how.still, place, how.works)


def program_text(program: Program) -> str:
    """A program as this module's command-line argument."""
    return json.dumps(asdict(program))


def _program(text: str) -> Program:
    fields = json.loads(text)
    command, modules = tuple(fields["command"]), tuple(fields["modules"])
    python, pattern = str(fields["python"]), str(fields["pattern"])
    return Program(command, bool(fields["ours"]), modules, python, pattern)


def _place(environ: MutableMapping[str, str]) -> SupervisorPlace:
    """Take the supervisor's addresses and the agents' secret out of the environment."""
    addresses, port = tuple(environ.pop(ADDRESSES).split(",")), int(environ.pop(PORT))
    if environ.pop(BY_SRUN, ""):
        addresses, port = ("127.0.0.1",), offer_stdio()
    return SupervisorPlace(addresses, port, Secret(environ.pop(TOKEN)))


def _run(terms: JoinTerms | None, environ: Mapping[str, str]) -> RunDirectory:
    if terms is not None:
        return RunDirectory(Path(terms.run))
    mark = mark_of(environ)
    assert mark is not None, "the supervisor sets the mark"
    return RunDirectory(mark.run)


def main(text: str, environ: MutableMapping[str, str]) -> None:
    """Run the agent of this node."""
    inbox().install()
    raise_open_file_limit()
    leave_no_cores()
    place, terms = _place(environ), JoinTerms.taken_from(environ)
    step = int(environ.pop(STEP))
    task = int(environ["SLURM_PROCID"]) if terms is None else 0

    def caller() -> Caller:
        role, joins = (Role.AGENT, None) if terms is None else (Role.GUEST, terms.now)
        return Caller(role, step, task, node_name(os.environ), os.getpid(), joins)

    here, program = AgentRankSetup(_run(terms, environ)), _program(text)
    last_resort = LastResort.here(here.run, environ) if terms is None else None
    agent = NodeAgent(program, Children(), here, place.secret, place.addresses, terms, last_resort)
    inbox().react_with(agent.take_signal)
    code = agent.run(AgentLink(place, caller, agent.hear))
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for ranks that are stuck


if __name__ == "__main__":
    main(sys.argv[1], os.environ)
