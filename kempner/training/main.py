"""Runs one rank: find its place, build everything, train, exit with the right code."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import psutil
import torch

from kempner.cluster.slurm.hostlist import node_name
from kempner.cluster.slurm.job import restart_count
from kempner.cluster.world import World
from kempner.config.sections import Config, SuperviseSection
from kempner.model.sharding import keep_compiled
from kempner.run.control.heartbeat import Progress
from kempner.run.control.launch_env import Launch
from kempner.run.control.leftovers import end_leftovers
from kempner.run.control.protocol import Phase
from kempner.run.output.console import leave
from kempner.run.output.logs import logger, open_log
from kempner.run.process.exit_codes import ExitCode, RunError, UsageError
from kempner.run.process.retry import PASSING, storage_waits
from kempner.run.record.attempts import Attempt, begin_attempt, prune_attempts
from kempner.run.record.events import AttemptStarted, RankReady
from kempner.run.record.lease import Lease
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.training.build import build
from kempner.training.fault_injection import arm
from kempner.training.groups.process_groups import (
    Ranks,
    add_variables,
    check_device,
    choose_device,
    connect,
)
from kempner.training.loop import Training, train
from kempner.training.rank_link.rank_link import RankLink
from kempner.training.rank_link.shutdown import StopListener

_NO_HOST_MEMORY = ("DefaultCPUAllocator", "not enough memory")
"""torch's messages when host memory runs out; it has no exception type for that."""


def describe_shortage(error: BaseException, progress: Progress) -> str | None:
    """A sentence if `error` means that memory ran out, on a GPU or on the host; else None."""
    message = str(error)
    where = f"in phase {progress.phase} after step {progress.step}"
    if isinstance(error, torch.OutOfMemoryError):
        free, total = torch.cuda.mem_get_info()
        return (
            f"out of GPU memory {where}: tensors have {_gib(torch.cuda.memory_allocated())}, "
            f"PyTorch reserved {_gib(torch.cuda.memory_reserved())}, {_gib(free)} of {_gib(total)} "
            "are free; lower train.micro_batch_size or train.seq_len, shard over more ranks, or "
            "set parallelism.reduce_gradients to micro_batch and reshard_after_forward to always"
        )
    if isinstance(error, MemoryError) or any(words in message for words in _NO_HOST_MEMORY):
        host = psutil.virtual_memory()
        return (
            f"out of memory {where}: this rank has {_gib(psutil.Process().memory_info().rss)}, "
            f"{_gib(host.available)} of the host's {_gib(host.total)} are available; ask for more "
            "memory, or lower train.micro_batch_size or data.num_dataloader_workers"
        )
    return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Read error",
    "Timed out waiting",
    "Socket Timeout",
)
"""Messages of Gloo and the store when a peer is gone; they have no exception type for that."""


def main(config: Config, rank_link: RankLink, shutdown: StopListener) -> NoReturn:
    """Run this process as one rank, and exit with the code for how it ended."""
    sentence = ""
    try:
        code = run_rank(config, rank_link, shutdown)
    except RunError as error:
        logger().error(str(error))
        rank_link.report_unfit_node(error)
        code, sentence = error.code, str(error)
    except Exception as error:  # noqa: BLE001 - the process ends here, with a code for the cause
        code, sentence = classify(error, rank_link), f"{type(error).__name__}: {error}"
        if shortage := describe_shortage(error, rank_link.progress):
            logger().error(shortage)
            code, sentence = ExitCode.CRASHED, shortage
        elif code is ExitCode.PEERS_LOST:
            logger().error("lost another rank", reason=sentence.partition("\n")[0])
        else:
            logger().error("unexpected exception", exc_info=True)
    rank_link.leave(code, sentence)
    # Not sys.exit: a daemon thread in native code, Gloo's destructors or a loader worker that is
    # stuck on storage could turn a clean exit into an abort or a hang.
    leave(code)


def classify(error: BaseException, rank_link: RankLink) -> ExitCode:
    """The exit code for an unexpected exception: a lost peer, failing storage, or a crash of this
    rank. A lost peer reported by the supervisor takes precedence over the error itself."""
    reported = rank_link.link is not None and rank_link.link.peer_lost is not None
    if isinstance(error, OSError) and error.filename is not None and error.errno in PASSING:
        return ExitCode.STORAGE_UNAVAILABLE  # with a file name: not a network error
    lost = isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _PEER_GONE)
    )
    return ExitCode.PEERS_LOST if reported or lost else ExitCode.CRASHED


def run_rank(config: Config, rank_link: RankLink, shutdown: StopListener) -> ExitCode:
    """Connect, build, resume, train. Raises `RunError` for problems that the user can fix."""
    world, run, progress = rank_link.world, rank_link.run, rank_link.progress
    torch.set_num_threads(thread_count(config, world))
    if config.train.deterministic:  # cuBLAS reads it at its first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.train.compile:
        keep_compiled(run.compiled)
    # As use_deterministic_algorithms(), which would import the compiler, too.
    torch.set_deterministic_debug_mode("error" if config.train.deterministic else "default")
    faults = arm(config, rank_link)
    faults.maybe_inject(Phase.START)
    add_variables(config)
    if config.resilience.health_check:
        check_device(choose_device(world), node_name(os.environ))
    progress.enter(Phase.RENDEZVOUS)
    ranks = connect(world, config)
    grace = config.supervise.stop_grace if rank_link.launch is not None else None
    shutdown.join_group(grace, rank_link.tell_of_signal)
    storage_waits().configure(config.resilience.patience, shutdown.should_shutdown)
    ownership = take_run(run, ranks, rank_link.launch, config.supervise)
    try:
        attempt = ownership.attempt
        storage_waits().tell_to(partial(rank_link.tell_of_wait, attempt))
        open_log(run.log(attempt.number, world.rank), attempt=attempt.number, rank=world.rank)
        progress.enter(Phase.LOAD)
        faults.maybe_inject(Phase.LOAD)
        training = build(config, rank_link, ranks, attempt, shutdown, faults)
        progress.enter(Phase.COMPILE)
        step, reached = training.train_state.step, dict(progress.reached)
        rank_link.record(attempt, RankReady(step, str(ranks.device), reached))
        logger().info(
            "ready", step=training.train_state.step, reached=progress.reached, **_place(ranks)
        )
        return _train(training)
    finally:
        ownership.release()


def _train(training: Training) -> ExitCode:
    try:
        return train(training)
    finally:
        training.tools.step_metrics.close()
        training.tools.profiler.close()
        training.tools.data.feed.close()


def thread_count(config: Config, world: World) -> int:
    """Threads for CPU kernels: as configured, else OMP_NUM_THREADS, else a share of the cores."""
    if config.train.threads is not None:
        return config.train.threads
    if asked := os.environ.get("OMP_NUM_THREADS", ""):
        if not asked.isdecimal() or int(asked) == 0:
            raise UsageError(f"OMP_NUM_THREADS={asked} is not a number of threads; unset it")
        return int(asked)
    return max(1, len(os.sched_getaffinity(0)) // world.local_size)


@dataclass
class Ownership:
    """The attempt of a rank, and rank 0's `lease` on the run if there is no supervisor to hold it.
    `users` is the number of loops that use it at the same time."""

    attempt: Attempt
    lease: Lease | None = None
    users: int = 1

    def release(self) -> None:
        self.users -= 1
        if self.users == 0 and self.lease is not None:
            self.lease.release()


def take_run(
    run: RunDirectory, ranks: Ranks, launch: Launch | None, section: SuperviseSection
) -> Ownership:
    """The supervisor's attempt, or one that rank 0 begins without a supervisor. Raises
    `UsageError`, on every rank, if another process owns the run, or it cannot be written."""
    if launch is not None:
        return Ownership(launch.attempt)
    mine: Ownership | str = ""
    if ranks.world.rank == 0:
        mine = _begin(run, ranks.world, section)
    agreed = ranks.broadcast(mine.attempt if isinstance(mine, Ownership) else mine)
    if isinstance(agreed, str):
        raise UsageError(agreed)
    assert isinstance(agreed, Attempt)  # rank 0 made one
    return mine if isinstance(mine, Ownership) else Ownership(agreed)


def _begin(run: RunDirectory, world: World, section: SuperviseSection) -> Ownership | str:
    """Own the run and begin an attempt; on failure, the reason for all ranks."""
    try:
        lease = Lease.acquire(run, section.lease, restart_count(os.environ))
    except UsageError as error:
        return str(error)
    try:
        end_leftovers(run, section.stop_grace)
        attempt = begin_attempt(run)
    except UsageError as error:
        lease.release()
        return str(error)
    started = AttemptStarted(ranks=world.size, launcher=world.launcher)
    Ledger(run.ledger).record(started, attempt.number)
    prune_attempts(run, section.keep_attempts)
    return Ownership(attempt, lease)


def _place(ranks: Ranks) -> dict[str, object]:
    world = ranks.world
    return {
        "pid": os.getpid(),
        "world": world.size,
        "local_rank": world.local_rank,
        "host": platform.node(),
        "device": str(ranks.device),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "threads": torch.get_num_threads(),
        "launcher": world.launcher,
    }
