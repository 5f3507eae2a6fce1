"""`CheckpointManager`: saves in the background, commits, and finds the way back.

Every method is called on every rank, in the same order. The process group is used for nothing
else: the background half of a save talks on it while training goes on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from kempner.checkpoint.format.manifest import FileEntry, Identity, Manifest, Position, read
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder, in_progress_name
from kempner.checkpoint.io.file_writer import yield_to_training
from kempner.checkpoint.io.verify import Damage
from kempner.checkpoint.store import commit, retention
from kempner.checkpoint.store.compatibility import compare_identities
from kempner.checkpoint.store.read_marker import reading
from kempner.checkpoint.store.selection import choose, choose_to_go_back
from kempner.checkpoint.tensors import state
from kempner.checkpoint.tensors.dcp_reader import open_contents
from kempner.checkpoint.tensors.file_buffer import tensor_specs
from kempner.checkpoint.tensors.load import fill
from kempner.checkpoint.tensors.save import FileLayout, Route, SaveFailedError, write_and_commit
from kempner.checkpoint.tensors.staging import Stager
from kempner.run.control.heartbeat import Waiting, untimed
from kempner.run.process.exit_codes import DataError, RunError, UsageError
from kempner.run.process.logs import logger
from kempner.run.record.attempts import Fence, SupersededError
from kempner.run.record.events.base import LedgerEvent
from kempner.run.record.events.checkpoint import (
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointFailed,
    Resumed,
)
from kempner.run.record.save_times import Durations, SaveSeconds

T = TypeVar("T")


class Recorder(Protocol):
    """Takes an event for the run's ledger; only rank 0's calls need go anywhere."""

    def __call__(self, event: LedgerEvent) -> None: ...


@dataclass(frozen=True)
class _Save:
    position: Position
    path: Path
    started: float
    staged: Future[None]
    committed: Future[None]


class CheckpointManager:
    """Saves and restores a model and its optimizer below one folder.

    `identity` says what a checkpoint must have in common with the run, `fence` which attempt is
    writing, `group` is a Gloo group of its own over all ranks, `reached` is told how far the save
    of a step is, as `saver.Reached` says, `waiting` is entered while a load waits for other ranks.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        identity: Identity,
        fence: Fence,
        group: dist.ProcessGroup,
        keep_last: int,
        keep_every: int | None = None,
        background: bool = True,
        record: Recorder = lambda event: None,
        durations: Durations = Durations(),  # noqa: B008 - frozen
        reached: Callable[[str, int], None] = lambda part, step: None,
        waiting: Waiting = untimed,
    ) -> None:
        self._folder = CheckpointFolder(folder)
        self._model, self._optimizer = model, optimizer
        self._identity, self._fence, self._group = identity, fence, group
        self._background, self._record, self._reached = background, record, reached
        self._waiting = waiting
        self._rank = dist.get_rank(group)
        self._pruner = retention.Pruner(
            self._folder, retention.Keep(keep_last, keep_every), self._fence
        )
        self._device = next(iter(model.parameters())).device
        self._stager = Stager(self._device)
        self._writer = ThreadPoolExecutor(1, "checkpoint", initializer=yield_to_training)
        self._route: Route | None = None
        self._in_flight: _Save | None = None
        self._saves = 0
        self._failed_in_a_row = 0
        self.committed_step: int | None = None
        """Step of the newest commit of this run that this rank knows of."""
        self.durations = durations
        """How long saves take; rank 0 knows, of this attempt and those before."""

    def restore(self, accept: Collection[str] = ()) -> Position | None:
        """Load the newest checkpoint that verifies; None if the run has none.

        A damaged one is set aside, never deleted. Raises `DataError` if what there is cannot be
        used: damaged throughout, or made with another model, other data or another seed (unless
        `accept` names "data" or "seed"); `NotSharedError` on a rank that does not see what rank 0
        has chosen.
        """
        self._broadcast_from_rank0(self._prepare_folder)
        if (position := self._load_newest(self._choose, accept)) is not None:
            self._record(Resumed(position.step))
            return position
        if link := self._broadcast_from_rank0(self._folder.latest):
            raise DataError(
                f"no checkpoint in {self._folder.path} verifies, although `latest` names step "
                f"{link}; to start over from step 0, remove that link"
            )
        return None

    def branch(self) -> list[int]:
        """The steps of the live branch that are committed, ascending; `latest` is the last one."""
        return self._broadcast_from_rank0(self._branch)

    def roll_back(self, to: int, accept: Collection[str] = ()) -> Position:
        """Load the newest checkpoint up to step `to` that verifies; `latest` names it afterwards.

        The save in flight is waited for. Where none of them verifies, the oldest later one is
        taken. Raises `DataError` if that does not verify either, and as `restore`.
        """
        self.join()
        position = self._load_newest(lambda: choose_to_go_back(self._branch(), to), accept)
        if position is None:
            raise DataError(
                f"no checkpoint in {self._folder.path} verifies, so that there is none to go back "
                "to after the loss left the rails"
            )
        return position

    def save(self, position: Position) -> None:
        """Start to save the state as of `position`; the previous save is waited for.

        Where that has failed, nothing is started: the ranks count failures in their next vote, and
        must see this one before there is another.
        """
        failures = self._failed_in_a_row
        self.join()
        if self._failed_in_a_row > failures:
            return
        self._saves += 1
        attempt = self._fence.attempt
        unique = hashlib.blake2b(f"{attempt.nonce}.{self._saves}".encode(), digest_size=4)
        name = in_progress_name(position.step, attempt.number, unique.hexdigest())
        path = self._folder.path / name
        started = time.monotonic()
        route = self._find_route()
        staged = route.stage(self._stager, lambda part: self._reached(part, position.step))
        committed = self._writer.submit(self._write, path, route.layout, staged, position, started)
        self._in_flight = _Save(position, path, started, staged, committed)
        if not self._background:
            self.join()

    def release_staging(self) -> None:
        """Wait until the copy of the state is out; call it before anything writes the state."""
        if self._in_flight is not None:
            wait([self._in_flight.staged])  # its failure, if any, is the save's, and join tells

    def poll(self) -> None:
        """Take note of a save that has ended; never waits."""
        if self._in_flight is not None and self._in_flight.committed.done():
            self.join()

    @property
    def in_flight(self) -> tuple[int, float] | None:
        """The step of the save under way and its age in seconds, or None."""
        save = self._in_flight
        return None if save is None else (save.position.step, time.monotonic() - save.started)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and take note of how it ended.

        After `timeout` seconds it stays in flight. A failure is logged and counted; raises
        `SupersededError` if a newer attempt owns the run.
        """
        if self._in_flight is None:
            return
        if wait([self._in_flight.committed], timeout).not_done:
            return
        save, self._in_flight = self._in_flight, None
        error = save.committed.exception()
        if error is None:
            self.committed_step, self._failed_in_a_row = save.position.step, 0
            if self._rank == 0:
                self._pruner.request()
            return
        if not isinstance(error, SaveFailedError):
            raise error
        if error.superseded:
            raise SupersededError("; ".join(error.reasons.values()))
        self._failed_in_a_row += 1
        self._report_failure(save, error)

    @property
    def settled_failures(self) -> int:
        """Saves that failed since the last commit; 0 while another one is under way."""
        return self._failed_in_a_row if self._in_flight is None else 0

    def close(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and, `timeout` seconds at most, for deletions."""
        self.join()
        self._stager.close()
        self._writer.shutdown()
        self._pruner.close(timeout)

    def _find_route(self) -> Route:
        """The way of the state into its file; made anew when its tensors are not what they were."""
        if self._route is None or not self._route.binding.intact():
            binding = state.Binding(self._model, self._optimizer)
            specs = tensor_specs(binding.table, dist.get_world_size(self._group))
            if self._route is None or self._route.layout.specs != specs:
                layout = FileLayout.of(specs, self._device, self._group)
            else:
                layout = self._route.layout
            self._route = Route.of(binding, layout)
        return self._route

    def _write(
        self,
        path: Path,
        layout: FileLayout,
        staged: Future[None],
        position: Position,
        started: float,
    ) -> None:
        wait([staged])
        staged_at = time.monotonic()

        def commit(files: Mapping[str, FileEntry]) -> None:
            self._commit(path, position, files, started, staged_at)

        def reached(part: str) -> None:
            self._reached(part, position.step)

        write_and_commit(path, layout, staged, self._group, commit, reached)

    def _commit(
        self,
        path: Path,
        position: Position,
        files: Mapping[str, FileEntry],
        started: float,
        staged_at: float,
    ) -> None:
        written_at = time.monotonic()
        attempt = self._fence.attempt.number
        manifest = Manifest(position, self._identity, attempt, time.time(), files)
        commit.commit(self._folder, path, manifest, self._fence, logger().warning)
        took = SaveSeconds(
            staged_at - started, written_at - staged_at, time.monotonic() - written_at
        )
        self.durations = self.durations.with_another(took)
        size = sum(entry.bytes for entry in files.values())
        event = CheckpointCommitted.of(position.step, size, took)
        logger().info("checkpoint committed", **event.to_fields())
        self._record(event)

    def _report_failure(self, save: _Save, error: SaveFailedError) -> None:
        if self._rank == 0:
            step = save.position.step
            reasons = {f"rank {rank}": why for rank, why in error.reasons.items()}
            logger().warning("checkpoint failed; the last one is intact", step=step, **reasons)
            self._record(CheckpointFailed(step, reasons))
            retention.discard(save.path)

    def _load_newest(
        self, choose: Callable[[], int | None], accept: Collection[str]
    ) -> Position | None:
        """Load what `choose` names, and what it names next as long as that is damaged."""
        while (step := self._broadcast_from_rank0(choose)) is not None:
            with self._marked_as_read(step):
                manifest, damages = self._broadcast_from_rank0(partial(self._read_manifest, step))
                if manifest is not None:
                    damages = self._load(step, manifest, accept)
                    if not damages:
                        return manifest.position
            self._broadcast_from_rank0(partial(self._reject, step, damages))
        return None

    def _branch(self) -> list[int]:
        self._pruner.settle()  # or a step that is named may be gone when it is read
        latest = self._folder.latest()
        return [s for s in self._folder.committed() if latest is None or s <= latest]

    def _choose(self) -> int | None:
        return choose(self._folder.committed(), self._folder.latest())

    def _marked_as_read(self, step: int) -> AbstractContextManager[None]:
        return reading(self._folder, step) if self._rank == 0 else nullcontext()

    def _prepare_folder(self) -> None:
        try:
            self._folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the checkpoint folder {self._folder.path} cannot be made ({error.strerror}); "
                "set checkpoint.dir to one that can"
            ) from error
        for leftover, failure in retention.sweep(self._folder, self._fence.attempt.number):
            logger().warning("cannot delete a leftover", path=str(leftover), error=str(failure))

    def _read_manifest(self, step: int) -> tuple[Manifest | None, list[Damage]]:
        try:
            return read(self._folder.step(step)), []
        except DataError as error:
            return None, [Damage(MANIFEST, str(error))]

    def _load(self, step: int, manifest: Manifest, accept: Collection[str]) -> list[Damage]:
        """Fill the state; returns what is damaged, on all ranks alike, and empty if nothing is."""
        path = self._folder.step(step)
        judgement = compare_identities(manifest.identity, self._identity, accept)
        if judgement.refusals:
            raise DataError(f"cannot go on from {path}: {'; '.join(judgement.refusals)}")
        contents, damages = self._together(lambda: open_contents(path, manifest))
        if contents is None:
            return damages
        saved = state.saved_optimizer_tensors(contents)
        state.create_optimizer_state(self._model, self._optimizer, saved)
        table = state.capture(self._model, self._optimizer)
        state.check_shapes(table, contents)
        _, damages = self._together(lambda: fill(table, path, manifest, contents))
        if not damages:
            self.committed_step = step
            self._broadcast_from_rank0(partial(self._go_on_from, step, judgement.remarks))
        return damages

    def _together(self, work: Callable[[], T]) -> tuple[T | None, list[Damage]]:
        """Do this rank's part of a load; its result, or None if any rank found damage."""
        result, found = None, None
        try:
            result = work()
        except DataError as error:
            found = Damage(f"rank {self._rank}", str(error))
        gathered: list[Damage | None] = [None] * dist.get_world_size(self._group)
        with self._waiting("the others' part of a load"):
            dist.all_gather_object(gathered, found, group=self._group)
        damages = [damage for damage in gathered if damage is not None]
        return (None if damages else result), damages

    def _reject(self, step: int, damages: list[Damage]) -> None:
        aside = self._folder.set_aside(step, "damaged", self._fence.attempt.number)
        found = [str(damage) for damage in damages[:10]]
        logger().warning("checkpoint is damaged", step=step, kept_as=aside.name, damage=found)
        self._record(CheckpointDamaged(step, aside.name, tuple(found)))

    def _go_on_from(self, step: int, remarks: Collection[str]) -> None:
        if (named := self._folder.latest()) != step:
            logger().warning("`latest` names another step than the one in use", latest=named)
            self._fence.check()
            attempt = self._fence.attempt
            self._folder.point_latest(step, unique=f"a{attempt.number}-{attempt.nonce}")
        for remark in remarks:
            logger().warning(remark)

    def _broadcast_from_rank0(self, answer: Callable[[], T]) -> T:
        """What only one process may ask of the file system, asked by rank 0 for all.

        A `RunError` of rank 0 is raised on every rank.
        """
        box: list[object] = [_answer_or_error(answer) if self._rank == 0 else None]
        with self._waiting("the word of rank 0"):
            dist.broadcast_object_list(box, group_src=0, group=self._group)
        if isinstance(box[0], RunError):
            raise box[0]
        told: T = box[0]  # type: ignore[assignment]  # what rank 0's answer returned
        return told


def _answer_or_error(answer: Callable[[], T]) -> T | RunError:
    try:
        return answer()
    except RunError as error:
        return error
