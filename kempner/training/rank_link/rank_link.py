"""Connects a rank to its supervisor, before torch is imported.

On a cold file system that import takes minutes, and a rank that is stuck there should be seen.

Measures what a rank uses of its node: memory, processes, open files.

Requeues the job from a rank whose supervisor is gone.

When the node of the batch script dies, a job submitted with --no-kill stays RUNNING on its other
nodes, with no supervisor to requeue it. When the supervisor alone is killed, Slurm ends the job as
failed, and gives its tasks KillWait seconds (both seen on Slurm 22.05). The ranks leave, with a
checkpoint if all of them live, and the lowest rank that lives asks Slurm for the requeue.

Tells whether a run's supervisor has died: by its lease, which it renews as long as it lives.
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
"""The ends after which the run goes on from its newest checkpoint, as soon as it is started."""

TURN = 2.0
"""Seconds after a rank in which the next one has its turn: they notice the silence so far apart."""

LONGEST = 30.0
"""Seconds after which every rank has had its turn."""

TRY_FOR = 3600.0
"""Seconds for which to ask a Slurm that does not answer; as a rule it ends this process before."""

_LOOK = 0.2
"""Seconds between two looks whether another rank does it."""


def hand_back(
    job: str, run: RunDirectory, attempt: Attempt, rank: int, means: SlurmAccess | None = None
) -> None:
    """Requeue `job`, once, if no other rank of this attempt does; lower ranks first.

    Slurm is asked until it answers. That the job went back is written to the ledger afterwards:
    Slurm leaves this process some seconds.
    """
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
    """Wait for this rank's turn; whether no other rank has said by then that it does it."""
    turn = time.monotonic() + min(rank * TURN, LONGEST)
    while time.monotonic() < turn:
        if run.claim(attempt.number).exists():
            return False
        time.sleep(_LOOK)
    return _claim(run, attempt, rank)


def _claim(run: RunDirectory, attempt: Attempt, rank: int) -> bool:
    """Whether this rank is the first to say that it will: only one can create the file.

    Where storage fails, each does it in its turn, and sees whether the job went back before.
    """
    try:
        with open(run.claim(attempt.number), "x", encoding="utf-8") as file:
            file.write(f"{rank}\n")
    except FileExistsError:
        return False
    except OSError as error:
        logger().warning("cannot tell the other ranks of the requeue", reason=error.strerror)
    return True


def _superseded(run: RunDirectory, attempt: Attempt) -> bool:
    """Whether a newer attempt is current, as far as storage says."""
    try:
        current = read_current(run.attempts)
    except (OSError, KeyError, ValueError) as error:
        logger().warning("cannot read which attempt is current", reason=str(error))
        return False
    return current is not None and current != attempt


def _fruitless(history: RunHistory, job: str) -> bool:
    """Whether a rank has requeued this job before, and the run is where it was."""
    mine = [event for event in history.events(Requeued) if event.job == job]
    return bool(mine) and mine[-1].by_rank is not None and mine[-1].step == history.last_step


def _history(run: RunDirectory) -> RunHistory:
    """What the ledger says; nothing where it cannot be read."""
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
"""Renewals that must be missing for the holder of a lease to be dead. This is shorter than the
lease: it is asked only where the supervisor's port refuses connections, too."""

LOOK_EVERY = 0.5
"""Seconds between two looks at a file that hundreds of ranks may look at."""


@dataclass(frozen=True)
class Watched:
    """What was seen of a lease, unchanged since `since`, in seconds of some clock."""

    seen: LeaseReading
    since: float


def has_died(watched: Watched, now: float, machine: str, lives: bool) -> bool:
    """Whether the holder of a lease is dead, rather than that it has left in order.

    `machine` is this one, and `lives` whether the process is there that the lease names.
    """
    seen = watched.seen
    if seen.beat == RELEASED or seen.holder is None:
        return False
    if seen.holder.machine == machine:
        return not lives
    return now - watched.since > STILL * seen.holder.lasts / RENEWALS


class SupervisorWatch:
    """Looks at the lease of the supervisor that has started this rank."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._clock = folder, AwakeClock()
        self._here = Holder.here(0.0).machine
        self._watched: Watched | None = None
        self._looked_at = -LOOK_EVERY
        self._died = False

    def died(self) -> bool:
        """Whether it is dead: known at once on its machine, elsewhere after a few renewals."""
        now = self._clock.now()
        if not self._died and now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            self._died = self._look(now)
        return self._died

    def _look(self, now: float) -> bool:
        try:
            seen = look(self._folder)
        except (OSError, ValueError):
            return False  # storage that fails says nothing
        if seen is None:
            return False
        if self._watched is None or self._watched.seen != seen:
            self._watched = Watched(seen, now)
        return has_died(self._watched, now, self._here, holder_lives(seen.holder))


def measure() -> Usage:
    """Of this process, those that it has started, and its node at this moment.

    Raises `OSError` or `psutil.Error` if the kernel does not show it.
    """
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
    """Bytes that are left, and of how many: of the node, or of what the job may have of it."""
    limit = None if group is None else group.limit()
    if group is None or limit is None or limit >= total:
        return available, total
    return min(available, max(0, limit - group.used())), limit


@dataclass(frozen=True)
class RankLink:
    """A rank's place in the world and in the run. `link` is None where there is no supervisor."""

    world: World
    run: RunDirectory
    launch: Launch | None
    progress: Progress
    link: ControlClient | None

    def record(self, attempt: Attempt, event: LedgerEvent) -> None:
        """A line for the ledger, from rank 0; the supervisor writes it, if there is one."""
        if self.world.rank != 0:
            return
        if self.link is not None:
            self.link.record(event)
        else:
            Ledger(self.run.ledger).record(event, attempt.number)

    def tell_of_wait(self, attempt: Attempt, waited: StorageWait) -> None:
        """A line for the ledger, from any rank, when storage works again."""
        event = StorageWaited(**asdict(waited), rank=self.world.rank)
        if self.link is not None:
            self.link.record(event)
        else:
            self.record(attempt, event)

    def tell_of_signal(self, sentence: str) -> None:
        """Let the supervisor know that a signal came here; one rank of all is enough.

        Without a supervisor, tell the user who may have pressed Ctrl-C that it was noticed.
        """
        if self.world.rank != 0:
            return
        if self.link is not None:
            self.link.record(Signalled())
        else:
            logger().warning(f"{sentence}: stopping after this step, with a checkpoint")

    def report_unfit_node(self, error: RunError) -> None:
        """Tell the supervisor that this node is not fit, if that is what the error says."""
        if self.link is not None and isinstance(error, UnfitNodeError):
            self.link.record(NodeSuspected(node_name(os.environ), str(error)))

    def leave(self, code: int, sentence: str) -> None:
        """Last words. What the supervisor cannot take for the ledger any more is written here.

        If it is gone for good, while the job goes on, the job is put back into the queue.
        """
        if self.link is None or self.launch is None:
            return
        attempt, job = self.launch.attempt, self.launch.job
        self.link.say_how_it_ends(code, sentence)
        self._write(self.link.take_back(), attempt)  # now: Slurm may leave no time for it later
        resumable = job is not None and code in RESUMABLE
        orphaned = resumable and self.link.outlives_supervisor()
        if code is ExitCode.STOPPED and (orphaned or self.link.supervisor_has_died()):
            self._tell_places(attempt)
        self._write(self.link.close_link(), attempt)
        if job is not None and orphaned:
            hand_back(job, self.run, attempt, self.world.rank)

    def _write(self, unheard: Iterable[Event], attempt: Attempt) -> None:
        """Write to the ledger what the supervisor did not; the ledger's other writer is gone."""
        for line in unheard:
            if (event := parse_event(line.name, line.fields)) is not None:
                Ledger(self.run.ledger).record(event, attempt.number)

    def _tell_places(self, attempt: Attempt) -> None:
        """For `kempner status`: all ranks stop after the same step, and rank 0 leaves last."""
        if self.world.rank == 0:
            report = self.progress.report()
            places = describe_places(dict.fromkeys(range(self.world.size), report))
            LatestContent(self.run.ranks(attempt.number), warn).replace(places)


def open_rank_link(config: Config, shutdown: StopListener) -> RankLink:
    """Find this rank's place, and call its supervisor if it has one. Raises as `join`."""
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    return join(run, config.supervise, shutdown, compiles=config.train.compile)


def join(
    run: RunDirectory, section: SuperviseSection, shutdown: StopListener, compiles: bool = False
) -> RankLink:
    """Find this rank's place in `run`, and call its supervisor if it has one.

    A rank that `compiles` leaves at once where it can do nothing else for minutes, should its
    supervisor end. Raises `UsageError` if the launcher's variables make no sense.
    """
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
        # Not when the fork server ends, which does not concern the ranks that it has forked.
        signal_at_end_of(os.getppid(), None)
        call_at_end_of(supervisor, ended)
    # The parent may be a wrapper: that is signalled by the kernel, and ends with its own.
    elif not (signal_at_end_of(os.getppid(), signal.SIGTERM) and _descends_from(supervisor)):
        ended()


def _descends_from(pid: int) -> bool:
    """Whether a process is among this one's parents. One that has ended has no children any more.

    Wrappers may stand between. Should they end, a supervisor on this machine is the next parent;
    should one end while this looks, it looks again.
    """
    before: list[int] = []
    while (parents := _parents()) != before:
        if pid in parents:
            return True
        before = parents
    return False


def _parents() -> list[int]:
    """Of this process, the nearest first, as far as they can be seen and are still there."""
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
    """What this rank uses of its node, unless the kernel does not show it."""
    try:
        return measure()
    except (OSError, psutil.Error) as error:
        logger().debug("cannot measure memory", reason=str(error))
        return None


def find_place() -> World:
    """This process's place among the ranks, as its launcher says.

    Raises `UsageError` if the launcher's variables make no sense.
    """
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
    """End the process from a thread, if the main one compiles: no step is lost."""
    if rank_link.progress.phase is Phase.COMPILE:
        sentence = "the supervisor has ended before the first step was made"
        rank_link.leave(ExitCode.STOPPED, sentence)
        logger().warning(f"{sentence}: exiting")
        leave(ExitCode.STOPPED)


def _leave_in_silence(rank_link: RankLink, seconds: float) -> None:
    """End the process from a thread: the main thread waits for a peer that may be gone."""
    sentence = f"no progress for {seconds:.0f} s, and no supervisor to say which rank is gone"

    def end() -> None:
        rank_link.leave(ExitCode.PEERS_LOST, sentence)
        leave(ExitCode.PEERS_LOST)

    threading.Thread(target=end, name="exit", daemon=True).start()
    logger().error(sentence)
