"""Runs the ranks of one schedule, and says what must not have happened."""

from __future__ import annotations

import logging
import math
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity, Manifest, TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.registered.groups import gather
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.tensors.save import RunningSave
from kempner.cluster.world import World
from kempner.model.spec.mesh import MeshDegrees
from kempner.run.control.heartbeat import Progress
from kempner.run.output import logs
from kempner.run.process.exit_codes import ExitCode, RunError
from kempner.run.process.retry import storage_waits
from kempner.run.process.signals import ReceivedSignal
from kempner.run.record.events import CheckpointFailed, Completed, LedgerEvent, Stopped
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory
from kempner.training import loop
from kempner.training.anomalies import Health
from kempner.training.build import _resume
from kempner.training.fault_injection import FaultInjector
from kempner.training.groups.process_groups import Ranks
from kempner.training.homes import Home
from kempner.training.loop import Data, Evaluation, Tools, Training
from kempner.training.main import Ownership
from kempner.training.rank_link.shutdown import StopListener
from kempner.training.session import Session
from kempner.training.survive import LoopPlan as LoopPlan
from kempner.training.survive import Survivor
from kempner.training.watch import LOOKS, HeldObjects, Watch
from simulated.rank_order.edges import ATTEMPT, BATCH, MODEL, OPTIMIZER, Edges, Feed, Metrics, Scene
from simulated.rank_order.plan import Plan, Stop
from simulated.rank_order.slots import give_slots

CPU = torch.device("cpu")
GRACE = 60.0
"""Seconds that a rank has after a signal."""

NOWHERE = Path("no run is here")
STANDING = SimpleNamespace(
    refuse_if_complete=lambda step: None,
    keep=lambda run: None,
    now=SimpleNamespace(facts={}),
)


class Looks(Watch):
    """Looks when a `Watch` does, and finds nothing: all ranks have one model and one optimizer."""

    def begin(self, seed: int, first_rank: bool) -> bool:
        return False

    def begin_step(self) -> None:
        pass

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def end_step(self, save: bool) -> bool:
        self._steps += 1
        return save or self._steps <= LOOKS

    def look(self) -> None:
        pass


@dataclass
class Outcome:
    """How a schedule went; `violation` is empty if nothing happened that must not."""

    violation: str = ""
    turns: int = 0
    collectives: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    """Steps that were kept in memory, over all ranks."""


class Rank:
    """One rank, from its build to its end."""

    def __init__(self, scene: Scene, number: int) -> None:
        self.scene, self.number = scene, number
        self.shutdown = StopListener()
        self.shutdown.join_group(GRACE)
        self.end = ""
        self.stands = TrainState()
        self.recorded: list[LedgerEvent] = []

    def record(self, event: LedgerEvent) -> None:
        if self.number == 0:
            self.recorded.append(event)

    def run(self) -> None:
        """As a process: to an exit code, or to a sentence for a person."""
        try:
            self.end = self._train_own() if self.scene.plan.own_loop else self._train()
        except RunError as error:
            self.end = type(error).__name__
        except SystemExit as leave:
            self.end = ExitCode(leave.code).name  # type: ignore[arg-type]

    def ask_to_stop(self, stop: Stop) -> None:
        if not stop.by_signal:
            self.shutdown.stop(stop.reason, stop.seconds_left)
            return
        self.shutdown._signalled(ReceivedSignal(signal.SIGTERM, self.scene.scheduler.now))

    def _ranks(self) -> Ranks:
        plan, fabric = self.scene.plan, self.scene.fabric
        return Ranks(
            world=World(self.number, plan.world, self.number, plan.world, "none"),
            device=CPU,
            degrees=MeshDegrees(shard=plan.world),
            mesh=None,  # type: ignore[arg-type]
            votes=fabric.groups["votes"].members[self.number],  # type: ignore[arg-type]
            saves=fabric.groups["saves"].members[self.number],  # type: ignore[arg-type]
            store=fabric.store,  # type: ignore[arg-type]
        )

    def _manager(self, ranks: Ranks) -> CheckpointEngine:
        config = self.scene.plan.config.checkpoint
        context = CheckpointContext(
            path=self.scene.folder.path,  # type: ignore[arg-type]
            identity=identity(self.scene.plan.world),
            fence=self.scene,  # type: ignore[arg-type]
            group=ranks.saves,
            record=self.record,
        )
        vars(context)["folder"] = self.scene.folder
        manager = CheckpointEngine(
            context,
            MODEL,
            OPTIMIZER,
            keep=Keep(config.keep_last),
            background=config.async_save,
        )
        count_saves(manager, self.scene, self.number)
        if self.scene.plan.in_memory:
            give_slots(manager, self.scene, self.number, ranks.votes)
        return manager

    def _train(self) -> str:
        scene, ranks, config = self.scene, self._ranks(), self.scene.plan.config
        checkpoints = self._manager(ranks)
        state = _resume(config, ranks, checkpoints, self.record, RunHistory())
        training = Training(
            config=config,
            ranks=ranks,
            model=MODEL,  # type: ignore[arg-type]
            optimizer=OPTIMIZER,
            shutdown=self.shutdown,
            checkpoints=checkpoints,
            tools=Tools(
                data=Data(partial(Feed, scene, self.number), state),  # type: ignore[arg-type]
                step_metrics=Metrics(scene.plan.late_numbers),  # type: ignore[arg-type]
                evaluation=Evaluation(config, {"": SimpleNamespace(directory=None)}),  # type: ignore[dict-item]
                faults=FaultInjector((), self.number, attempt=1),
                profiler=SimpleNamespace(begins_at=math.inf, tracing=False),  # type: ignore[arg-type]
                progress=Progress(),
                record=self.record,
            ),
            train_state=state,
            health=Health(state.losses),
        )
        try:
            return loop.train(training).name
        finally:
            self.stands = training.train_state

    def _train_own(self) -> str:
        config, ranks = self.scene.plan.config, self._ranks()
        rank_link = SimpleNamespace(
            progress=Progress(), record=lambda attempt, event: self.record(event), launch=None
        )
        checkpoints, steps = self._manager(ranks), config.train.max_steps
        todo, here = LoopPlan(steps, config.checkpoint.interval, seed=0), RunDirectory(NOWHERE)
        session = Session(
            rank_link,  # type: ignore[arg-type]
            Ownership(ATTEMPT),
            Home(here, here),
            ranks,
            self.shutdown,
            SimpleNamespace(code=None),  # type: ignore[arg-type]
        )
        session.standing = STANDING  # type: ignore[assignment]
        watch = Looks(gather(MODEL, OPTIMIZER, {}, {}), HeldObjects(MODEL, OPTIMIZER, {}, {}))
        survivor = Survivor(todo, session, checkpoints, None, watch)
        try:
            for _ in survivor:
                dist.all_reduce(torch.ones(()))
                survivor._before_optimizer(OPTIMIZER)
        finally:
            self.stands = survivor.train_state
        return ExitCode.COMPLETED.name


def count_saves(manager: CheckpointEngine, scene: Scene, rank: int) -> None:
    """Each save of a rank has a number, by which the ranks' parts in it are told."""
    start = manager._saver.start

    def counted(train_state: TrainState) -> RunningSave:
        scene.saves[rank] += 1
        return start(train_state)

    manager._saver.start = counted  # type: ignore[method-assign]


def identity(world: int) -> Identity:
    return Identity(world, {"ranks": world}, 0, "", {})


def simulate(edges: Edges, plan: Plan) -> Outcome:
    """Run one schedule, while `edges` are installed."""
    scene = Scene(plan)
    edges.enter(scene)
    storage_waits().configure(plan.config.resilience.patience)
    for step in plan.found:
        state = TrainState(step, cursor=step * BATCH)
        scene.folder.manifests[step] = Manifest(state, identity(plan.world), 0, 0.0, {})
        scene.folder.link = step
    ranks = [Rank(scene, number) for number in range(plan.world)]
    for rank in ranks:
        scene.scheduler.start(rank.run, rank.number)
    begins = scene.scheduler.now
    for stop in plan.stops:
        scene.scheduler.at(begins + stop.time, partial(ranks[stop.rank].ask_to_stop, stop))
    if plan.superseded_at is not None:
        scene.scheduler.at(begins + plan.superseded_at, lambda: setattr(scene, "current", False))
    violation = scene.scheduler.run()
    if scene.scheduler.error is not None:
        raise scene.scheduler.error
    recorded = ranks[0].recorded
    return Outcome(
        str(violation) if violation else find_violation(scene, ranks),
        scene.scheduler.turns,
        scene.fabric.met,
        Counter([ranks[0].end]),
        Counter(event.name for event in recorded),
        scene.watched.kept,
    )


def find_violation(scene: Scene, ranks: list[Rank]) -> str:
    """What is wrong although all ranks came to an end; empty if nothing is."""
    ends, states = {rank.end for rank in ranks}, {repr(rank.stands) for rank in ranks}
    if len(ends) > 1:
        return f"ends: the ranks end with {[rank.end for rank in ranks]}"
    if len(states) > 1:
        return f"states: the ranks stand at {[rank.stands for rank in ranks]}"
    recorded, latest = ranks[0].recorded, scene.folder.link
    failures = sum(isinstance(event, CheckpointFailed) for event in recorded)
    if failures > len(scene.failed):
        return f"phantom: {failures} saves are said to have failed, {len(scene.failed)} have"
    match recorded[-1:]:
        case [Completed(step)] if latest != step:
            return f"lost: completed {step} steps, `latest` is {latest}"
        # A save that was not waited for any longer may have ended after all.
        case [Stopped(step=step, lost_steps=lost)] if lost < step - (latest or 0):
            return f"lost: stopped after step {step}, {lost} lost, `latest` is {latest}"
    (end,) = ends
    if end == "CheckpointWriteError" and not scene.failed:
        return "unfounded: no save was made to fail"
    if end == "SupersededError" and scene.current:
        return "unfounded: no other attempt owns the run"
    return ""


@contextmanager
def quiet() -> Iterator[None]:
    """While it is open, nothing is logged."""
    before, logs._sink = logs._sink, logs._Sink()
    logs._sink.console_level = logging.CRITICAL
    try:
        yield
    finally:
        logs._sink = before
