"""How each kind of fault strikes a simulated world."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder
from simulated.faults import Fault, Kind

if TYPE_CHECKING:
    from simulated.ranks import Ranks
    from simulated.slurm import Job
    from simulated.world import World

Strike: TypeAlias = "Callable[[World, Job, Fault], bool]"

SLOW_FOR = 600.0
"""Seconds for which steps are slow."""


def maybe_inject(world: World, job: Job, fault: Fault) -> bool:
    """Whether there was anything to strike."""
    return _STRIKES[fault.kind](world, job, fault)


def _on_ranks(act: Callable[[World, Ranks, Fault], object]) -> Strike:
    def maybe_inject(world: World, job: Job, fault: Fault) -> bool:
        if job.ranks is None or job.ranks.over:
            return False
        act(world, job.ranks, fault)
        return True

    return maybe_inject


def _rank(ranks: Ranks, fault: Fault) -> int:
    return fault.who % ranks.size


def _kill(world: World, ranks: Ranks, fault: Fault) -> None:
    ranks.die(_rank(ranks, fault))


def _hang(world: World, ranks: Ranks, fault: Fault) -> None:
    ranks.hang(_rank(ranks, fault))


def _stop(world: World, ranks: Ranks, fault: Fault) -> None:
    rank = _rank(ranks, fault)
    ranks.stop(rank)
    world.engine.call(fault.amount, lambda: ranks.go_on(rank))


def _told(world: World, ranks: Ranks, fault: Fault) -> None:
    ranks.ask(None)


def _crash_ahead(world: World, ranks: Ranks, fault: Fault) -> None:
    world.crash_at = ranks.train_state.step + int(fault.amount), fault


def _loss(value: float) -> Callable[[World, Ranks, Fault], None]:
    def spoil(world: World, ranks: Ranks, fault: Fault) -> None:
        first = ranks.train_state.step + 1
        world.bad_steps.update(dict.fromkeys(range(first, first + int(fault.amount)), value))

    return spoil


def _bad_data(world: World, ranks: Ranks, fault: Fault) -> None:
    first = ranks.train_state.cursor + 1
    world.bad_samples.update(dict.fromkeys(range(first, first + int(fault.amount)), 100.0))


def _slow(world: World, job: Job, fault: Fault) -> bool:
    world.slow_until, world.slow_by = world.engine.now + SLOW_FOR, fault.amount
    return True


def _lose_node(world: World, job: Job, fault: Fault, loud: bool = True) -> bool:
    others = [node for node in job.nodes if job.daemon is None or node != job.daemon.host]
    if job.state != "RUNNING" or not others:
        return False
    node = others[fault.who % len(others)]
    world.slurm.lose(node)
    if job.ranks is not None:
        job.ranks.lose_node(node, loud)
    return True


def _silence_node(world: World, job: Job, fault: Fault) -> bool:
    return _lose_node(world, job, fault, loud=False)


def _orphans(world: World, job: Job, fault: Fault) -> bool:
    if job.state != "RUNNING" or not job.nodes:
        return False
    node = job.nodes[fault.who % len(job.nodes)]
    world.slurm.lose(node)
    if job.ranks is not None:
        job.ranks.cut_off(node, fault.amount)
    if job.daemon is not None and node == job.daemon.host:
        world.bereave(job)
    return True


def _lose_batch_host(world: World, job: Job, fault: Fault) -> bool:
    if job.daemon is None or job.state != "RUNNING":
        return False
    host = job.daemon.host
    world.slurm.lose(host)
    world.bereave(job)
    if job.ranks is not None:
        job.ranks.lose_node(host, loud=bool(fault.who % 2))
    return True


def _kill_supervisor(world: World, job: Job, fault: Fault) -> bool:
    if job.daemon is None or job.state != "RUNNING":
        return False
    world.lose_supervisor(job)
    return True


def _kill_keeper(world: World, job: Job, fault: Fault) -> bool:
    if job.batch is None or job.state != "RUNNING":
        return False
    job.batch.end()
    job.batch = job.daemon = None
    job.bereaved_at = world.engine.now
    world.slurm.batch_killed(job)
    return True


def _kill_watchdog(world: World, job: Job, fault: Fault) -> bool:
    if job.batch is not None:
        (job.batch.kill_watchdog if fault.who % 2 else job.batch.stop_watchdog)()
    return job.batch is not None


def _stick(world: World, job: Job, fault: Fault) -> bool:
    if job.daemon is None or job.state != "RUNNING":
        return False
    world.stick(job, fault.amount)
    return True


def _stick_at_the_end(world: World, job: Job, fault: Fault) -> bool:
    world.sticks_for = fault.amount
    return True


def _take_room(world: World, job: Job, fault: Fault) -> bool:
    job.no_room_until = world.engine.now + fault.amount
    return job.state == "RUNNING"


def _second(world: World, job: Job, fault: Fault) -> bool:
    world.engine.call(fault.amount, lambda: world.slurm.submit())
    return True


def _in_commit(world: World, job: Job, fault: Fault) -> bool:
    world.commit_fault = fault
    return True


def _preempt(world: World, job: Job, fault: Fault) -> bool:
    world.slurm.preempt(job, fault.amount if fault.who % 4 else 0.0)
    return job.state == "RUNNING"


def _limit(world: World, job: Job, fault: Fault) -> bool:
    world.slurm.shorten(job, fault.amount)
    return job.state == "RUNNING"


def _warn(world: World, job: Job, fault: Fault) -> bool:
    if job.daemon is None or job.state != "RUNNING":
        return False
    job.daemon.signal()
    return True


def _cancel(world: World, job: Job, fault: Fault) -> bool:
    world.slurm.cancel(job)
    return True


def _operator(world: World, job: Job, fault: Fault) -> bool:
    was = job.state
    world.slurm.put_back(job)
    return was == "RUNNING"


def _suspend(world: World, job: Job, fault: Fault) -> bool:
    world.slurm.suspend(job, fault.amount)
    return job.state == "SUSPENDED"


def _refuse(world: World, job: Job, fault: Fault) -> bool:
    world.refuse_until = world.engine.now + fault.amount
    return True


def _mute(world: World, job: Job, fault: Fault) -> bool:
    world.mute_until = world.engine.now + fault.amount
    return True


def _fail_save(world: World, job: Job, fault: Fault) -> bool:
    world.save_fails = True
    return True


def _slow_save(world: World, job: Job, fault: Fault) -> bool:
    world.save_slow = fault.amount
    return True


def _fill(world: World, job: Job, fault: Fault) -> bool:
    world.full_until = world.engine.now + fault.amount
    return True


def _damage(world: World, job: Job, fault: Fault) -> bool:
    """Flip bits; what is left must have a whole checkpoint after the next retention, too."""
    oracle, folder = world.oracle, CheckpointFolder(world.run.checkpoints)
    there = [s for s in oracle.branch if (folder.step(s) / MANIFEST).exists()]
    whole = [s for s in there if s not in oracle.damaged]
    if len(whole) < 2 or len(there) - len(whole) >= world.setting.keep_last - 1:
        return False
    step = whole[-2] if fault.amount > 0.5 else whole[-1]
    world.damage((folder.step(step) / MANIFEST).read_bytes())
    oracle.damaged.add(step)
    return True


_STRIKES: dict[Kind, Strike] = {
    Kind.KILL: _on_ranks(_kill),
    Kind.HANG: _on_ranks(_hang),
    Kind.STOP: _on_ranks(_stop),
    Kind.SLOW: _slow,
    Kind.CRASH: _on_ranks(_crash_ahead),
    Kind.KILLER: _on_ranks(_crash_ahead),
    Kind.NODE_LOST: _lose_node,
    Kind.NODE_SILENT: _silence_node,
    Kind.ORPHANS: _orphans,
    Kind.BATCH_HOST_LOST: _lose_batch_host,
    Kind.SUPERVISOR_KILLED: _kill_supervisor,
    Kind.SUPERVISOR_STUCK: _stick,
    Kind.STUCK_BEFORE_REQUEUE: _stick_at_the_end,
    Kind.WATCHDOG: _kill_watchdog,
    Kind.KEEPER_KILLED: _kill_keeper,
    Kind.NO_ROOM: _take_room,
    Kind.SECOND: _second,
    Kind.SECOND_IN_COMMIT: _in_commit,
    Kind.PREEMPT: _preempt,
    Kind.LIMIT: _limit,
    Kind.WARNING: _warn,
    Kind.TOLD: _on_ranks(_told),
    Kind.CANCEL: _cancel,
    Kind.OPERATOR: _operator,
    Kind.SUSPEND: _suspend,
    Kind.REFUSE: _refuse,
    Kind.MUTE: _mute,
    Kind.SAVE_FAILS: _fail_save,
    Kind.SAVE_SLOW: _slow_save,
    Kind.TORN: _in_commit,
    Kind.FULL: _fill,
    Kind.DAMAGE: _damage,
    Kind.NAN: _on_ranks(_loss(float("nan"))),
    Kind.SPIKES: _on_ranks(_loss(100.0)),
    Kind.BAD_DATA: _on_ranks(_bad_data),
}
