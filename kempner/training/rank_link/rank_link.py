"""Connects a rank to its supervisor, before torch is imported: on a cold file system that import
takes minutes, and a rank that is stuck in it should be noticed.

Also measures a rank's memory, processes and open files; finds by the lease whether the supervisor
has died; and requeues the job from a rank whose supervisor is gone. When the node of the batch
script dies, a job submitted with --no-kill stays RUNNING on its other nodes. When only the
supervisor is killed, Slurm ends the job as failed, and gives its tasks KillWait seconds (both seen
on Slurm 22.05). The ranks leave, with a checkpoint if all of them are alive, and the lowest living
rank asks Slurm for the requeue.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from kempner.cluster.machine import MemoryGroup, memory_group
from kempner.cluster.network.tcp_stalls import dead_connections
from kempner.cluster.slurm.command import SlurmError
from kempner.cluster.slurm.hostlist import node_name
from kempner.cluster.slurm.job import JobState, restart_count
from kempner.cluster.slurm.scontrol import (
    RequeueOutcome,
    SlurmAccess,
    decide_orphan_requeue,
    put_back,
)
from kempner.cluster.world import World, discover
from kempner.config.sections import Config, SuperviseSection
from kempner.run.control.client import ControlClient, Reactions
from kempner.run.control.heartbeat import Progress, describe_places
from kempner.run.control.launch_env import Launch, forget_secret
from kempner.run.control.protocol import Event, NodeMemory, Phase, Usage
from kempner.run.output.console import leave
from kempner.run.output.logs import logger, warn
from kempner.run.output.writers import LatestContent
from kempner.run.process.exit_codes import (
    ExitCode,
    RunError,
    StopReason,
    UnfitNodeError,
    UsageError,
)
from kempner.run.process.retry import StorageWait
from kempner.run.process.signals import signal_at_end_of
from kempner.run.process.threads import AwakeClock, call_at_end_of
from kempner.run.record.attempts import Attempt, read_current
from kempner.run.record.events import (
    LedgerEvent,
    NodeSuspected,
    Requeued,
    Signalled,
    StorageWaited,
    parse_event,
)
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import (
    RELEASED,
    RENEWALS,
    Holder,
    LeaseReading,
    holder_lives,
    look,
)
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.training.rank_link.shutdown import StopListener

RESUMABLE = (ExitCode.STOPPED, ExitCode.PEERS_LOST)
"""Exit codes after which the run resumes from its newest checkpoint when it is started again."""

TURN = 2.0
"""Seconds between the turns of two ranks: they notice the supervisor's silence that far apart."""

LONGEST = 30.0
"""Seconds after which every rank has had its turn."""

TRY_FOR = 3600.0
"""Seconds for which to ask a Slurm that does not answer; usually it ends this process earlier."""

_LOOK = 0.2
"""Seconds between two looks whether another rank requeues."""


def hand_back(
    job: str, run: RunDirectory, attempt: Attempt, rank: int, means: SlurmAccess | None = None
) -> None:
    """Requeue `job` once, unless another rank of this attempt does; lower ranks go first. Slurm is
    asked until it answers. The ledger is written afterwards: Slurm leaves this process some
    seconds."""
    if not _has_turn(run, attempt, rank):
        return
    fruitless = _fruitless(_history(run), job)
    decide = lambda state: decide_orphan_requeue(  # noqa: E731
        state, restart_count(os.environ), _superseded(run, attempt), fruitless
    )
    end = put_back(job, decide, time.monotonic() + TRY_FOR, _note_silence, means)
    if end.outcome is RequeueOutcome.DONE and end.asked is not None:
        _record(job, run, attempt, rank, end.asked)
    unanswered = end.outcome in (RequeueOutcome.REFUSED, RequeueOutcome.SILENT)
    logger().warning(
        f"{end.reason}; submit the same command again to continue" if unanswered else end.reason
    )


def _has_turn(run: RunDirectory, attempt: Attempt, rank: int) -> bool:
    """Wait for this rank's turn; returns whether no other rank has claimed the requeue by then."""
    turn = time.monotonic() + min(rank * TURN, LONGEST)
    while time.monotonic() < turn:
        if run.claim(attempt.number).exists():
            return False
        time.sleep(_LOOK)
    return _claim(run, attempt, rank)


def _claim(run: RunDirectory, attempt: Attempt, rank: int) -> bool:
    """Whether this rank is the first to claim the requeue, by creating a file. If storage fails,
    each rank tries in its turn, and sees whether the job was requeued before."""
    try:
        with open(run.claim(attempt.number), "x", encoding="utf-8") as file:
            file.write(f"{rank}\n")
    except FileExistsError:
        return False
    except OSError as error:
        logger().warning("cannot tell the other ranks of the requeue", reason=error.strerror)
    return True


def _superseded(run: RunDirectory, attempt: Attempt) -> bool:
    """Whether a newer attempt is current; False if storage fails."""
    try:
        current = read_current(run.attempts)
    except (OSError, KeyError, ValueError) as error:
        logger().warning("cannot read which attempt is current", reason=str(error))
        return False
    return current is not None and current != attempt


def _fruitless(history: RunHistory, job: str) -> bool:
    """Whether a rank has requeued this job before, and the run has made no progress since."""
    mine = [event for event in history.events(Requeued) if event.job == job]
    return bool(mine) and mine[-1].by_rank is not None and mine[-1].step == history.last_step


def _history(run: RunDirectory) -> RunHistory:
    """The ledger; empty if it cannot be read."""
    try:
        return RunHistory.read(run.ledger)
    except OSError as error:
        logger().warning("cannot read the ledger", reason=error.strerror)
        return RunHistory()


def _note_silence(error: SlurmError) -> None:
    logger().info("Slurm gives no answer; asking again", reason=str(error))


def _record(job: str, run: RunDirectory, attempt: Attempt, rank: int, state: JobState) -> None:
    event = Requeued(
        step=_history(run).last_step,
        job=job,
        restarts=state.restarts,
        nodes=state.nodes.held,
        by_rank=rank,
    )
    Ledger(run.ledger).record(event, attempt.number)


STILL = 2.5
"""Missed renewals after which the holder of a lease counts as dead. That is shorter than the lease,
since it is used only when the supervisor's port also refuses connections."""

LOOK_EVERY = 0.5
"""Seconds between two looks at a file that hundreds of ranks may read."""


@dataclass(frozen=True)
class Watched:
    """A reading of a lease, unchanged since `since`, in seconds of some clock."""

    seen: LeaseReading
    since: float


def has_died(watched: Watched, now: float, machine: str, lives: bool) -> bool:
    """Whether the holder of a lease has died, and not just left. `machine` is this one; `lives`:
    the process in the lease is running here."""
    seen = watched.seen
    if seen.beat == RELEASED or seen.holder is None:
        return False
    if seen.holder.machine == machine:
        return not lives
    return now - watched.since > STILL * seen.holder.lasts / RENEWALS


class SupervisorWatch:
    """Watches the lease of the supervisor that has started this rank."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._clock = folder, AwakeClock()
        self._here = Holder.here(0.0).machine
        self._watched: Watched | None = None
        self._looked_at = -LOOK_EVERY
        self._died = False

    def died(self) -> bool:
        """Whether it is dead: known at once on its machine, elsewhere after a few missed
        renewals."""
        now = self._clock.now()
        if not self._died and now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            self._died = self._look(now)
        return self._died

    def _look(self, now: float) -> bool:
        try:
            seen = look(self._folder)
        except (OSError, ValueError):
            return False  # failing storage is no evidence
        if seen is None:
            return False
        if self._watched is None or self._watched.seen != seen:
            self._watched = Watched(seen, now)
        return has_died(self._watched, now, self._here, holder_lives(seen.holder))


def measure() -> Usage:
    """The usage of this process and its children, and the memory of its node. Raises `OSError` or
    `psutil.Error` if the kernel does not show it."""
    process, host = psutil.Process(), psutil.virtual_memory()
    children = [child.memory_info().rss for child in _living(process)]
    files_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    group = memory_group()
    memory = NodeMemory(*_room(group, host.available, host.total))
    if group is not None:
        memory = replace(memory, group=str(group.path), oom_kills=group.oom_kills())
    return Usage(
        rss=process.memory_info().rss,
        children=len(children),
        children_rss=sum(children),
        files=process.num_fds(),
        files_limit=files_limit,
        memory=memory,
    )


def _living(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if child.is_running()]


def _room(group: MemoryGroup | None, available: int, total: int) -> tuple[int, int]:
    """Available and total bytes, of the node or of the job's memory limit there."""
    limit = None if group is None else group.limit()
    if group is None or limit is None or limit >= total:
        return available, total
    return min(available, max(0, limit - group.used())), limit


@dataclass(frozen=True)
class RankLink:
    """A rank's place in the world and in the run. `link` is None without a supervisor."""

    world: World
    run: RunDirectory
    launch: Launch | None
    progress: Progress
    link: ControlClient | None

    def record(self, attempt: Attempt, event: LedgerEvent) -> None:
        """Record an event of rank 0 in the ledger, through the supervisor if there is one."""
        if self.world.rank != 0:
            return
        if self.link is not None:
            self.link.record(event)
        else:
            Ledger(self.run.ledger).record(event, attempt.number)

    def tell_of_wait(self, attempt: Attempt, waited: StorageWait) -> None:
        """Record, on any rank, that storage works again."""
        event = StorageWaited(**asdict(waited), rank=self.world.rank)
        if self.link is not None:
            self.link.record(event)
        else:
            self.record(attempt, event)

    def tell_of_signal(self, sentence: str) -> None:
        """On rank 0, report a signal to the supervisor, or without one to the user, who may have
        pressed Ctrl-C."""
        if self.world.rank != 0:
            return
        if self.link is not None:
            self.link.record(Signalled())
        else:
            logger().warning(f"{sentence}: stopping after this step, with a checkpoint")

    def report_unfit_node(self, error: RunError) -> None:
        """Report to the supervisor that this node is unfit, if the error says so."""
        if self.link is not None and isinstance(error, UnfitNodeError):
            self.link.record(NodeSuspected(node_name(os.environ), str(error)))

    def leave(self, code: int, sentence: str) -> None:
        """Report how this rank ends. Ledger events that the supervisor cannot take any more are
        written here. If it is gone for good, while the job continues, requeue the job."""
        if self.link is None or self.launch is None:
            return
        attempt, job = self.launch.attempt, self.launch.job
        self.link.say_how_it_ends(code, sentence)
        self._write(self.link.take_back(), attempt)  # now: Slurm may leave no time later
        resumable = job is not None and code in RESUMABLE
        orphaned = resumable and self.link.outlives_supervisor()
        if code is ExitCode.STOPPED and (orphaned or self.link.supervisor_has_died()):
            self._tell_places(attempt)
        self._write(self.link.close_link(), attempt)
        if job is not None and orphaned:
            hand_back(job, self.run, attempt, self.world.rank)

    def _write(self, unheard: Iterable[Event], attempt: Attempt) -> None:
        """Write events to the ledger that the supervisor did not take; it no longer writes
        itself."""
        for line in unheard:
            if (event := parse_event(line.name, line.fields)) is not None:
                Ledger(self.run.ledger).record(event, attempt.number)

    def _tell_places(self, attempt: Attempt) -> None:
        """Write ranks.json for `kempner status`: all ranks stop after the same step, and rank 0
        leaves last."""
        if self.world.rank == 0:
            report = self.progress.report()
            places = describe_places(dict.fromkeys(range(self.world.size), report))
            LatestContent(self.run.ranks(attempt.number), warn).replace(places)


def open_rank_link(config: Config, shutdown: StopListener) -> RankLink:
    """Find this rank's place, and connect to its supervisor, if any. Raises as `join`."""
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    return join(run, config.supervise, shutdown, compiles=config.train.compile)


def join(
    run: RunDirectory, section: SuperviseSection, shutdown: StopListener, compiles: bool = False
) -> RankLink:
    """Find this rank's place in `run`, and connect to its supervisor, if any. With `compiles`, the
    rank exits at once if its supervisor ends during the first step, which may compile for minutes.
    Raises `UsageError` if the launcher's variables are wrong."""
    launch = Launch.from_environment(os.environ)
    forget_secret(os.environ)
    world = find_place()
    progress = Progress(own_program=launch is not None and launch.terms is not None)
    if launch is None:
        return RankLink(world, run, launch, progress, None)
    if launch.parent is not None:
        _follow(launch.parent, launch.forked, shutdown)
    react = Reactions(
        stop=lambda order: shutdown.stop(order.reason, order.seconds_left, order.sentence),
        silence=partial(_stop_in_silence, shutdown),
        standstill=lambda seconds: _leave_in_silence(rank_link, seconds),
        patience=section.supervisor_timeout,
        grace=section.stop_grace,
        stalled=_dead_connections,
        measure=_measure,
        has_died=SupervisorWatch(run.supervisors).died,
    )
    link = ControlClient(launch, run, world.rank, progress, react)
    rank_link = RankLink(world, run, launch, progress, link)
    shutdown.connect(
        last_words=partial(link.leave, ExitCode.STOPPED),
        supervisor_gone=lambda: launch.parent is not None and not _descends_from(launch.parent),
    )
    link.start()
    if launch.parent is not None and compiles:
        call_at_end_of(launch.parent, partial(_leave_first_step, rank_link))
    return rank_link


def _follow(supervisor: int, forked: bool, shutdown: StopListener) -> None:
    """Stop when the supervisor on this machine ends."""
    ended = partial(shutdown.stop, StopReason.SUPERVISOR_LOST, sentence="the supervisor has ended")
    if forked:
        # The end of the fork server does not concern the ranks that it has forked.
        signal_at_end_of(os.getppid(), None)
        call_at_end_of(supervisor, ended)
    # The parent may be a wrapper, which the kernel signals when its own parent ends.
    elif not (signal_at_end_of(os.getppid(), signal.SIGTERM) and _descends_from(supervisor)):
        ended()


def _descends_from(pid: int) -> bool:
    """Whether the process `pid` is an ancestor of this one, possibly through wrappers. If a wrapper
    ends, its children become those of the supervisor; if that happens during the look, it is
    repeated."""
    before: list[int] = []
    while (parents := _parents()) != before:
        if pid in parents:
            return True
        before = parents
    return False


def _parents() -> list[int]:
    """The ancestors of this process, the nearest first, as far as they are visible."""
    found = [os.getppid()]
    with suppress(psutil.Error):
        while found[-1] > 1:
            found.append(psutil.Process(found[-1]).ppid())
    return found


def _dead_connections() -> list[tuple[str, str]]:
    try:
        return dead_connections()
    except (OSError, psutil.Error) as error:
        logger().warning("cannot inspect the connections", reason=str(error))
        return []


def _measure() -> Usage | None:
    """As `measure`; None if the kernel does not show it."""
    try:
        return measure()
    except (OSError, psutil.Error) as error:
        logger().debug("cannot measure memory", reason=str(error))
        return None


def find_place() -> World:
    """This process's place among the ranks, by its launcher's variables. Raises `UsageError` if
    they are wrong."""
    try:
        world = discover(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if world.warning:
        logger().warning(world.warning)
    return world


def _stop_in_silence(shutdown: StopListener, seconds: float) -> None:
    silence = f"no heartbeat from the supervisor for {seconds:.0f} s"
    shutdown.stop(StopReason.SUPERVISOR_LOST, sentence=silence)
    logger().warning(f"{silence}: committing and exiting")


def _leave_first_step(rank_link: RankLink) -> None:
    """End the process from a thread while the main one compiles: no step is lost."""
    if rank_link.progress.phase is Phase.COMPILE:
        sentence = "the supervisor has ended before the first step was made"
        rank_link.leave(ExitCode.STOPPED, sentence)
        logger().warning(f"{sentence}: exiting")
        leave(ExitCode.STOPPED)


def _leave_in_silence(rank_link: RankLink, seconds: float) -> None:
    """End the process from a thread: the main one waits for a peer that may be gone."""
    sentence = f"no progress for {seconds:.0f} s, and no supervisor to say which rank is gone"

    def end() -> None:
        rank_link.leave(ExitCode.PEERS_LOST, sentence)
        leave(ExitCode.PEERS_LOST)

    threading.Thread(target=end, name="exit", daemon=True).start()
    logger().error(sentence)
