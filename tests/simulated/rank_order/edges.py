"""Where kempner's loop, vote and saves end: disk, tensors, data and metrics, all in memory.

What is exchanged here does in virtual time what the real one does, and fails where the plan says.
All that decides, and all that talks to other ranks, is kempner's own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import optimizer as optimizers

from kempner.checkpoint import manager
from kempner.checkpoint.format.manifest import FileSums, Manifest, TrainState
from kempner.checkpoint.format.names import Tip, parse_step, step_name
from kempner.checkpoint.store import retention, selection
from kempner.checkpoint.tensors import restore, save, staging
from kempner.checkpoint.tensors.load import LoadedBytes
from kempner.config.resilience import FailPoint
from kempner.data.serve.loader import StepBatch
from kempner.run.control import heartbeat
from kempner.run.process.durable_io import FileSystem
from kempner.run.process.exit_codes import DataError
from kempner.run.process.fail_points import set_fail_point
from kempner.run.record.attempts import Attempt, SupersededError
from kempner.training import evaluation, loop, session, vote
from kempner.training.anomalies import Numbers
from kempner.training.compute.forward_backward import sum_over_ranks
from kempner.training.groups import process_groups
from kempner.training.rank_link import shutdown
from simulated.rank_order.collectives import Distributed, Fabric
from simulated.rank_order.futures import Futures
from simulated.rank_order.plan import BATCH, Plan
from simulated.rank_order.scheduler import Clock, Scheduler
from simulated.rank_order.slots import FAILS, Watched

MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())
ATTEMPT = Attempt(1, "00000000")
_ONE = torch.ones(())


class Place(PurePosixPath):
    """A path at which nothing is."""

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """As on a disk; the result is not read."""


class Folder:
    """The checkpoints of a run, in memory."""

    path = Place("checkpoints")

    def __init__(self) -> None:
        self.manifests: dict[int, Manifest] = {}
        self.link: int | None = None
        self.tip = Tip()

    def step(self, step: int) -> Place:
        return self.path / step_name(step)

    def committed(self) -> list[int]:
        return sorted(self.manifests)

    def latest(self) -> int | None:
        return self.link

    def leftovers(self, before_attempt: int) -> list[Place]:
        return []

    def prepared(self) -> dict[Place, int]:
        return {}

    def point_latest(self, step: int, unique: str) -> None:
        self.link = step

    def set_aside(self, step: int, why: str, attempt: int) -> Place:
        del self.manifests[step]
        return self.path / f"{step_name(step)}.{why}-a{attempt}"


class Scene:
    """All that the ranks of one schedule have in common."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan.seed, plan.pause)
        self.fabric = Fabric(self.scheduler, plan.world)
        self.folder = Folder()
        self.saves = [0] * plan.world
        """How many each rank has begun."""
        self.folders: dict[int, Place] = {}
        """Into which each save goes, by its number."""
        self.failed: set[int] = set()
        """Those that were made to fail."""
        self.current = True
        """Whether this attempt owns the run."""
        self.watched = Watched(self)
        self.holding: set[int] = set()
        """The ranks that are about to copy a state only to keep it in memory."""

    @property
    def attempt(self) -> Attempt:
        """As a `Fence` has it."""
        return ATTEMPT

    def check(self) -> None:
        """As a `Fence` does."""
        if not self.current:
            raise SupersededError("attempt 1 must not commit any more: CURRENT names attempt 2")


class Feed:
    """Batches of one rank, which may be late. A batch is known by its number."""

    micro_steps = 1

    def __init__(self, scene: Scene, rank: int, train_state: TrainState) -> None:
        self._scene, self._rank, self._cursor = scene, rank, train_state.cursor
        self._skips = [(rollback.start, rollback.end) for rollback in train_state.rollbacks]
        self._step = train_state.step

    def take(self, give_up: Callable[[], bool]) -> StepBatch | None:
        scheduler = self._scene.scheduler
        scheduler.pause()
        self._step += 1
        for stuck in self._scene.plan.stuck:
            if (stuck.rank, stuck.step) == (self._rank, self._step):
                until = scheduler.now + stuck.seconds
                while scheduler.now < until:
                    if give_up():
                        return None
                    scheduler.sleep(1.0)
        while skip := next((s for s in self._skips if s[0] <= self._cursor < s[1]), None):
            self._cursor = skip[1]
        number = self._cursor // BATCH
        self._cursor += BATCH
        return StepBatch([number], [number], self._cursor)  # type: ignore[list-item]

    def close(self) -> None:
        """Nothing is open."""


class Metrics:
    """What steps came to, told at once or one step late."""

    log_samples = False

    def __init__(self, late: bool) -> None:
        self._late, self.recent = late, self
        self._pending: deque[Numbers] = deque()

    def start(self, train_state: TrainState) -> None:
        self._pending.clear()

    def send(
        self, train_state: TrainState, loss: Tensor, norm: Tensor, rate: float, printed: None
    ) -> None:
        self._pending.append(Numbers(train_state, loss.item(), norm.item(), rate))

    def arrivals(self, everything: bool) -> Iterator[Numbers]:
        while len(self._pending) > (self._late and not everything):
            yield self._pending.popleft()

    def tell(self, numbers: Numbers) -> None: ...

    def say(self, sentence: str) -> None: ...

    def end(self, sentence: str, completed: bool) -> None: ...

    def unseen(self) -> Callable[[], list[Numbers]]:
        pending = list(self._pending)
        return lambda: pending

    def evaluated(self, train_state: TrainState, loss: float) -> None: ...

    def close(self) -> None: ...


class Edges:
    """What stands in place of disk, tensors, threads and time while it is installed."""

    def __init__(self) -> None:
        self.scene: Scene | None = None
        self.distributed, self.futures, self.clock = Distributed(), Futures(), Clock()

    def enter(self, scene: Scene) -> None:
        """From now on it is about this schedule."""
        self.scene = scene
        self.distributed.fabric = scene.fabric
        self.futures.scheduler = self.clock.scheduler = scene.scheduler

    @property
    def _now(self) -> Scene:
        assert self.scene is not None
        return self.scene

    def add_gradient(self, micro: Sequence[int], step: int) -> Tensor:
        plan, rank = self._now.plan, self._now.scheduler.rank
        self._now.scheduler.sleep(plan.step_seconds)
        sum_over_ranks(torch.ones(()))
        wrong = any(number in plan.bad and number % plan.world == rank for number in micro)
        return sum_over_ranks(torch.full((1,), math.nan if wrong else 1.0))

    def update(self, *arguments: Any) -> Tensor:
        return sum_over_ranks(torch.ones(()))

    def eval_batches(
        self, corpus: object, *, max_batches: int, **options: Any
    ) -> Iterator[list[Any]]:
        for _ in range(max_batches):
            self._now.scheduler.pause()
            yield [SimpleNamespace(targets=_ONE)]

    @property
    def route(self) -> SimpleNamespace:
        """The way of a state into its file."""
        return SimpleNamespace(**vars(_ROUTE), stage=self.stage)

    def stage(
        self,
        stager: staging.Stager,
        step: int,
        complete: Callable[[], None] = lambda: None,
    ) -> staging.StagedCopy:
        """Copy nothing, for as long as that takes. What is only to be kept in memory may fail."""
        scene, copy = self._now, staging.StagedCopy(())
        if scene.scheduler.rank not in scene.holding:
            copy.done = stager.copy([], [], step, complete)
            return copy

        def keep() -> None:
            draw = scene.scheduler.random.random
            scene.scheduler.sleep(scene.plan.save_seconds * draw())
            if draw() > FAILS:
                complete()

        copy.done = stager._thread.submit(keep)
        return copy

    def pass_point(self, point: FailPoint, step: int | None) -> None:
        """A part of a save takes its time, and fails where the plan says."""
        scene = self._now
        scheduler, rank = scene.scheduler, scene.scheduler.rank
        number = scene.saves[rank]
        draw = scheduler.random.random
        longest = 10 if draw() < 0.05 else 1
        scheduler.sleep(longest * scene.plan.save_seconds * draw())
        if point is not FailPoint.COMMIT and scene.plan.failing.get(number) == (rank, point):
            scene.failed.add(number)
            raise OSError("no space left on device")

    def join_directory(self, path: Place) -> None:
        scene, rank = self._now, self._now.scheduler.rank
        number = scene.saves[rank]
        if scene.folders.setdefault(number, path) != path:
            scene.scheduler.violate(
                f"mismatch: save {number} of rank {rank} goes to {path}, that of another rank to "
                f"{scene.folders[number]}"
            )

    def commit(self, folder: Folder, path: Place, manifest: Manifest, *more: Any) -> None:
        scene = self._now
        scene.scheduler.pause()
        scene.check()
        number = scene.saves[0]
        if scene.plan.failing.get(number, (0, ""))[1] is FailPoint.COMMIT:
            scene.failed.add(number)
            raise OSError("`latest` cannot be replaced")
        step = manifest.train_state.step
        for left in selection.left_behind(folder.committed(), folder.latest(), step):
            del folder.manifests[left]
        folder.manifests[step] = manifest
        folder.link = step

    def prune(self, folder: Folder, keep: retention.Keep, *more: Any) -> dict[int, OSError]:
        self._now.scheduler.pause()
        for step in retention.expendable(folder.committed(), folder.latest(), keep):
            del folder.manifests[step]
        return {}

    def read(self, path: Place, worked: bool) -> Manifest:
        step = parse_step(path.name)
        assert step is not None
        self._load_part("manifest", step)
        return self._now.folder.manifests[step]

    def _load_part(self, part: str, step: int) -> None:
        self._now.scheduler.pause()
        rank, where = self._now.plan.damaged.get(step, (0, ""))
        if where == part and (part == "manifest" or rank == self._now.scheduler.rank):
            raise DataError("a block is not what its sum says")

    def open_contents(self, path: Place, manifest: Manifest, rank: int, world: int) -> str:
        self._load_part("contents", manifest.train_state.step)
        return "contents"

    def fill(
        self, table: object, path: Place, manifest: Manifest, contents: object, memory: object
    ) -> LoadedBytes:
        self._load_part("fill", manifest.train_state.step)
        return LoadedBytes()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While it is open, kempner's loop runs on this."""
        exchanged = [
            (manager, {"wait": self.futures.wait}),
            (retention, {"wait": self.futures.wait, "ThreadPoolExecutor": self.futures.executor}),
            (retention, {"prune": self.prune, "discard": lambda path: None}),
            (retention, {"bound": lambda *arguments: {}, "counted": lambda *arguments: []}),
            (retention, {"catch_up": lambda *arguments: None}),
            (retention, {"sweep": lambda folder, attempt: []}),
            (save, {"ThreadPoolExecutor": self.futures.executor}),
            (save, {"capture": lambda model, optimizer: {}}),
            (save.Routes, {"find": lambda routes: self.route}),
            (save.Routes, {"plan": lambda routes: (_ROUTE.binding, _LAYOUT)}),
            (save.Routes, {"to": lambda routes, *where: self.route}),
            (staging, {"wait": self.futures.wait, "ThreadPoolExecutor": self.futures.executor}),
            (save, {"wait": self.futures.wait, "join_directory": self.join_directory}),
            (save, {"write_stream": _write_stream, "write_durable": lambda path, content: None}),
            (save, {"commit": SimpleNamespace(commit=self.commit)}),
            (restore, {"probe_file_system": lambda folder: FileSystem()}),
            (restore, {"read": self.read, "reading": lambda folder, step: nullcontext()}),
            (restore, {"state": _STATE, "open_contents": self.open_contents, "fill": self.fill}),
            (
                loop,
                {
                    "StepGradient": lambda *_: SimpleNamespace(add=self.add_gradient),
                    "update": self.update,
                },
            ),
            (loop, {"weightless": lambda *sizes: []}),
            (evaluation, {"eval_batches": self.eval_batches, "token_sizes": lambda folder: None}),
            (evaluation, {"summed_loss": lambda *arguments: _ONE}),
            (session, {"set_rng": lambda *seeds: None}),
            (process_groups, {"say": lambda words: None}),
        ]
        timed = [loop, vote, shutdown, heartbeat, manager, save, save]
        exchanged += [(module, {"time": self.clock}) for module in timed]
        with ExitStack() as stack:
            for owner, names in exchanged:
                for name, value in names.items():
                    stack.enter_context(patch.object(owner, name, value))
            stack.enter_context(self.distributed.installed())
            # A rank that is given up in the middle of its loop leaves its hook behind.
            stack.enter_context(patch.dict(optimizers._global_optimizer_pre_hooks))
            for point in FailPoint:
                set_fail_point(point, lambda step, point=point: self.pass_point(point, step))
                stack.callback(set_fail_point, point, None)
            yield


def _write_stream(path: object, content: object) -> FileSums:
    return FileSums(0, ())


_LAYOUT = SimpleNamespace(
    described={},
    described_entries={},
    placed={},
    has_base=False,
    digest=7,
)


_ROUTE = SimpleNamespace(
    layout=_LAYOUT,
    image=SimpleNamespace(content=b""),
    base=None,
    binding=SimpleNamespace(table={}, buffers=frozenset()),
)
_STATE = SimpleNamespace(
    by_plain_names=lambda contents, model: contents,
    saved_optimizer_tensors=lambda contents: {},
    create_optimizer_state=lambda model, optimizer, saved: None,
    capture=lambda model, optimizer: {},
    check_shapes=lambda table, contents: None,
    adopt_numbers=lambda model, optimizer, table: None,
)
