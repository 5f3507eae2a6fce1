"""The background half of a save: wait for the copy, write, agree, commit.

Each rank writes its buffer to a file and computes checksums. Rank 0 gathers them, commits, and
broadcasts the outcome. A failure on any rank fails the save on all of them, with that rank's error.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format import shard_plan
from kempner.checkpoint.format.manifest import (
    FileEntry,
    Manifest,
    TrainState,
    encode_sidecar,
    sidecar_name,
    whole_sum,
)
from kempner.checkpoint.format.names import SHARED_OBJECTS, in_progress_name, objects_file
from kempner.checkpoint.format.shard_plan import base_file, data_file
from kempner.checkpoint.io.file_writer import BaseFiles, write_stream, yield_to_training
from kempner.checkpoint.registered.composite import plainly_named
from kempner.checkpoint.registered.objects import NOTHING, RegisteredObjects, pack
from kempner.checkpoint.store import commit
from kempner.checkpoint.tensors.file_buffer import FileBuffer, tensor_specs
from kempner.checkpoint.tensors.route import (
    FileLayout,
    Route,
    Routes,
    SharedBuffers,
    agree,
    combine,
    describe_difference,
    digests,
)
from kempner.checkpoint.tensors.staging import StagedCopy, Stager, room_to_lock
from kempner.checkpoint.tensors.state import Binding, capture
from kempner.checkpoint.tensors.step_slots import Slot, StepMemory, StepSlots, Verdict
from kempner.config.resilience import FailPoint
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import join_directory, write_durable
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.fail_points import fail_point
from kempner.run.process.retry import StorageUnavailableError
from kempner.run.record.attempts import SupersededError
from kempner.run.record.events import CheckpointCommitted
from kempner.run.record.save_times import SaveSeconds

T = TypeVar("T")

_NOTE = struct.Struct("<?6q16s")


class SaveFailedError(Exception):
    """A save failed, with a reason per failed rank; the same exception on all ranks. `passing`:
    only storage was at fault, so a later save may succeed. `refusal` is a sentence if no save of
    this state can ever succeed."""

    def __init__(
        self,
        reasons: Mapping[int, str],
        superseded: bool,
        passing: bool,
        refusal: str | None = None,
    ) -> None:
        super().__init__("; ".join(f"rank {rank}: {why}" for rank, why in reasons.items()))
        self.reasons = reasons
        self.superseded, self.passing, self.refusal = superseded, passing, refusal


class TornCopyError(Exception):
    def __init__(self, written: Collection[str]) -> None:
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        super().__init__(
            f"{min(written)}{more} changed outside of optimizer.step before the copy was complete; "
            "it is copied without a gap from now on"
        )


@dataclass(frozen=True)
class StagedState:
    """A copy of the state into `image`, complete or under way, with the file's `layout`. `held` has
    digests of the tensors that must be the same on every rank; `slot` is that of the image, if any;
    `base` is the image of the frozen tensors."""

    layout: FileLayout
    image: FileBuffer
    copy: StagedCopy
    held: Mapping[str, int]
    slot: Slot | None = None
    base: FileBuffer | None = None


@dataclass(frozen=True)
class SaveJob:
    """One rank's part in a save. `path` is the folder that becomes the checkpoint of `train_state`,
    `state` the copy of the state, `started` the start of the save (`time.monotonic`); `objects` are
    the files of registered objects: this rank's own, and on rank 0 that of all ranks. `base_files`
    writes frozen tensors."""

    context: CheckpointContext
    train_state: TrainState
    path: Path
    state: StagedState
    started: float
    objects: Mapping[str, bytes]
    base_files: BaseFiles
    make_room: Callable[[], None]

    @property
    def age(self) -> float:
        return time.monotonic() - self.started

    def run(self) -> SaveSeconds | None:
        """Write the copy to disk and commit it; the durations, on rank 0. Raises `SaveFailedError`
        on every rank if anything failed on any."""
        group, took = self.context.group, None
        wait([self.state.copy.done])
        staged_after = self.age
        _, error = _attempt(self.make_room) if self.context.rank == 0 else (None, None)
        if not _broadcast_from_rank_0(error is None, group):
            raise self._failed(error) from error
        note, error = _attempt(self._write_files)
        notes = _gather_on_rank_0(
            note or _Note(ok=False, plan=self.state.layout.digest, held=0), group
        )
        fail_point(FailPoint.COMMIT, self.train_state.step)
        if self.context.rank == 0 and _agreed(notes):
            took, error = _attempt(lambda: self._commit(notes, staged_after))
        if not _broadcast_from_rank_0(took is not None, group):
            raise self._failed(error) from error
        return took

    def _failed(self, error: Exception | None) -> SaveFailedError:
        mine = _Failure.of(error, self.state.layout.digest, self.state.held)
        return _gather_failures(mine, self.context.group)

    def _write_files(self) -> _Note:
        """Write this rank's file and its checksums, and on rank 0 the index files."""
        self.state.copy.done.result()
        join_directory(self.path)
        rank = self.context.rank
        name = data_file(rank)
        sums = write_stream(self.path / name, self.state.image.content)
        fail_point(FailPoint.WRITE, self.train_state.step)
        summed, base = {name: sums}, self.state.base
        if base is not None:
            frozen = base_file(rank, self.context.world)
            summed[frozen] = self.base_files.write(
                self.path, frozen, sidecar_name(rank), base.content
            )
        for written, content in self.objects.items():
            summed[written] = write_stream(self.path / written, memoryview(content))
        sidecar = encode_sidecar(summed)
        write_durable(self.path / sidecar_name(rank), sidecar)
        if rank == 0:
            for described, description in self.state.layout.described.items():
                write_stream(self.path / described, description)
        if torn := self.state.copy.settle():
            raise TornCopyError(torn)
        return _Note(
            ok=True,
            plan=self.state.layout.digest,
            held=combine(self.state.held),
            data_bytes=sums.bytes,
            base_bytes=summed[frozen].bytes if base is not None else -1,
            own_bytes=summed[own].bytes if (own := objects_file(rank)) in summed else -1,
            sidecar_bytes=len(sidecar),
            sidecar_sum=bytes.fromhex(whole_sum(sidecar)),
        )

    def _commit(self, notes: Sequence[_Note], staged_after: float) -> SaveSeconds:
        writing = self.age - staged_after
        files = _list_files(notes, self.state.layout.described_entries)
        if (shared := self.objects.get(SHARED_OBJECTS)) is not None:
            files[SHARED_OBJECTS] = FileEntry(len(shared), sums=sidecar_name(0))
        report = logger().warning
        return commit_files(
            self.context, self.train_state, self.path, files, staged_after, writing, report
        )


def commit_files(
    context: CheckpointContext,
    train_state: TrainState,
    path: Path,
    files: Mapping[str, FileEntry],
    staging: float,
    writing: float,
    report: Callable[[str], None],
) -> SaveSeconds:
    """Rank 0: commit the files of all ranks as a checkpoint, log and record it. `staging` and
    `writing` are the seconds that these took. Raises as `commit.commit`."""
    began = time.monotonic()
    attempt = context.fence.attempt.number
    manifest = Manifest(train_state, context.identity, attempt, time.time(), files)
    commit.commit(context.folder, path, manifest, context.fence, report)
    took = SaveSeconds(staging, writing, time.monotonic() - began)
    size = sum(entry.bytes for entry in files.values())
    event = CheckpointCommitted.of(train_state.step, size, took)
    logger().info("checkpoint committed", **event.to_fields())
    context.record(event)
    return took


@dataclass(frozen=True)
class _Note:
    """What a rank reports of its part; fixed size."""

    ok: bool
    plan: int
    held: int
    data_bytes: int = 0
    base_bytes: int = -1
    own_bytes: int = -1
    sidecar_bytes: int = 0
    sidecar_sum: bytes = b""

    def encode(self) -> Tensor:
        return torch.frombuffer(bytearray(_NOTE.pack(*astuple(self))), dtype=torch.uint8)

    @classmethod
    def decode(cls, packed: Tensor) -> _Note:
        return cls(*_NOTE.unpack(packed.numpy().data))


@dataclass(frozen=True)
class _Failure:
    plan: int
    held: Mapping[str, int]
    why: str | None
    superseded: bool
    refused: bool
    passing: bool

    @classmethod
    def of(cls, error: Exception | None, plan: int, held: Mapping[str, int]) -> _Failure:
        why = str(error) if error is not None else None
        superseded, refused = isinstance(error, SupersededError), isinstance(error, UsageError)
        storage = isinstance(error, OSError | StorageUnavailableError)
        return cls(plan, held, why, superseded, refused, storage)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Do this rank's part. An error is returned, since the other ranks wait for this one."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - raised again, on all ranks, by `SaveJob.run`
        return None, error


def _gather_on_rank_0(note: _Note, group: dist.ProcessGroup) -> list[_Note]:
    """The notes of all ranks, on rank 0; empty elsewhere, so that the others' traffic does not grow
    with the world."""
    mine = note.encode()
    if dist.get_rank(group) != 0:
        dist.gather(mine, group=group, group_dst=0)
        return []
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.gather(mine, gathered, group=group, group_dst=0)
    return [_Note.decode(numbers) for numbers in gathered]


def _agreed(notes: Sequence[_Note]) -> bool:
    """Whether every rank wrote its part, by the same plan and with the same shared state."""
    first = notes[0]
    return all(note.ok and (note.plan, note.held) == (first.plan, first.held) for note in notes)


def _list_files(notes: Sequence[_Note], described: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    files = dict(described)
    for rank, note in enumerate(notes):
        sidecar = sidecar_name(rank)
        files[data_file(rank)] = FileEntry(bytes=note.data_bytes, sums=sidecar)
        if note.base_bytes >= 0:
            files[base_file(rank, len(notes))] = FileEntry(bytes=note.base_bytes, sums=sidecar)
        if note.own_bytes >= 0:
            files[objects_file(rank)] = FileEntry(bytes=note.own_bytes, sums=sidecar)
        files[sidecar] = FileEntry(bytes=note.sidecar_bytes, xxh3_128=note.sidecar_sum.hex())
    return files


def _broadcast_from_rank_0(done: bool, group: dist.ProcessGroup) -> bool:
    """Rank 0's value of `done`, on every rank."""
    word = torch.tensor([done], dtype=torch.int64)
    dist.broadcast(word, group=group, group_src=0)
    return bool(word.item())


def _gather_failures(mine: _Failure, group: dist.ProcessGroup) -> SaveFailedError:
    """The error to raise on every rank, with the failures of all."""
    every: list[_Failure] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    reasons = {rank: each.why for rank, each in enumerate(every) if each.why is not None}
    refusal = next((each.why for each in every if each.refused), None)
    if not reasons and any(each.plan != mine.plan for each in every):
        reasons = {0: f"the ranks planned differently: {[each.plan for each in every]}"}
    elif not reasons:
        refusal = describe_difference([each.held for each in every])
        reasons = {0: refusal}
    superseded = any(each.superseded for each in every)
    failed = [each for each in every if each.why is not None]
    passing = bool(failed) and all(each.passing for each in failed)
    return SaveFailedError(reasons, superseded, passing, refusal)


@dataclass(frozen=True)
class RunningSave:
    """A save under way; `done` has the result of `SaveJob.run`."""

    job: SaveJob
    done: Future[SaveSeconds | None]


class BackgroundSaver:
    """Copies the state on one thread, and writes and commits the copy on another."""

    def __init__(
        self,
        context: CheckpointContext,
        model: nn.Module,
        optimizer: Optimizer,
        registered: RegisteredObjects = NOTHING,
        memory: StepMemory | None = None,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`make_room` is called on rank 0 before a save writes; it may raise `OSError`."""
        self._context, self._shared = context, SharedBuffers(model)
        self._make_room = make_room
        self._registered = registered
        self._slots = StepSlots(context, memory)
        self._routes = Routes(context, plainly_named(model), optimizer, self._slots)
        self._stager = Stager(self._routes.device)
        on_gpu = self._routes.device.type == "cuda"
        self._room = room_to_lock(context.local_ranks) if on_gpu else 0
        self._unprepared: Optimizer | None = optimizer if on_gpu else None
        self._writer = ThreadPoolExecutor(1, "checkpoint", initializer=yield_to_training)
        self._staged: StagedState | None = None
        self._saves = 0
        self.checked = False  # whether the contents have been checked; the same on all ranks

    def check(self, contents: bool) -> None:
        """Raise `UsageError`, on all ranks alike, if a checkpoint cannot hold the state. With
        `contents`, also compare the tensors that are not sharded between ranks, bit for bit."""
        alone = self._context.world == 1
        if contents and not alone:
            self._shared.share()
        agree(self._context, lambda: self._look(contents and not alone))
        self.checked = self.checked or contents

    def check_registered(self) -> None:
        """Raise `UsageError`, on all ranks alike, if the program changes objects that are not
        registered."""

        def look() -> dict[str, int]:
            self._registered.look()
            return {}

        agree(self._context, look)

    def hold(self, train_state: TrainState, verdict: Verdict) -> None:
        """Start to keep the state as of `train_state` in memory, if there is room."""
        if self._slots.memory is None:
            return
        self._learn_from_last_copy()
        self._share()
        self._slots.newest = train_state.step
        with suppress(UsageError):  # a save will raise it
            self._staged = self._keep(train_state.step, verdict)

    def start(self, train_state: TrainState) -> RunningSave:
        """Start to save the state as of `train_state`; the previous save must have ended. A state
        that a checkpoint cannot hold makes the save fail on all ranks."""
        self._saves += 1
        context, attempt = self._context, self._context.fence.attempt
        unique = hashlib.blake2b(f"{attempt.nonce}.{self._saves}".encode(), digest_size=4)
        name = in_progress_name(train_state.step, attempt.number, unique.hexdigest())
        started = time.monotonic()
        staged, objects = self._stage(train_state)
        path = context.folder.path / name
        base = self._routes.base_files
        job = SaveJob(context, train_state, path, staged, started, objects, base, self._make_room)
        if staged.slot is not None:
            staged.slot.busy = True
        return RunningSave(job, self._writer.submit(self._run, job))

    def release(self) -> None:
        """Wait for the end of the copy under way. Called before each update. Also plans and
        page-locks the file as soon as the optimizer has state: in the first step of a resumed run,
        in the second of a new one."""
        if self._unprepared is not None and self._unprepared.state:
            self._unprepared = None
            self._prepare()
        if self._staged is not None:
            self._staged.copy.settle()
        if self._slots.memory is not None:
            self._slots.ask()

    def _prepare(self) -> None:
        """Plan the file and start to page-lock it; only on a GPU."""
        with suppress(UsageError):  # the save will raise it
            self._routes.plan()
            for slot in self._slots.slots:
                self._stager.page_lock(slot.image, self._room)
            if not self._slots.slots:
                self._find()

    def forget(self) -> None:
        """Release the state's tensors, which are about to be replaced, and invalidate steps in
        memory."""
        self._learn_from_last_copy()
        self._slots.withdraw()
        self._routes.forget()

    def close(self) -> None:
        self._stager.close()
        self._writer.shutdown()

    def _stage(self, train_state: TrainState) -> tuple[StagedState, dict[str, bytes]]:
        """Start to copy the state, unless `hold` has done so, and encode the registered objects."""
        kept, step = self._staged, train_state.step
        self._learn_from_last_copy()
        self._share()
        self._slots.newest = step
        try:
            objects = self._pack()
            if kept is not None and kept.slot is not None and kept.slot.step == step:
                staged = kept
            else:
                staged = self._keep(step, lambda: train_state) or self._copy(step)
        except UsageError as error:
            nothing = StagedCopy(())
            nothing.done.set_exception(error)
            layout = self._routes.empty()
            return StagedState(layout, FileBuffer(layout.placed), nothing, {}), {}
        self._staged = staged
        return staged, objects

    def _keep(self, step: int, verdict: Verdict) -> StagedState | None:
        """Start to copy the state into a slot; None if there are no slots."""
        if self._slots.memory is None or self._registered:
            return None
        binding, layout = self._routes.plan()
        if not self._slots.slots or layout.has_base:
            return None
        slots, slot, held = self._slots, self._slots.take(), self._digests(binding)
        if slots.lacks_notes(layout.digest):
            self._writer.submit(slots.note, layout.digest, lambda: layout.described)
        publish = partial(slots.publish, slot, layout.digest, combine(held), verdict)
        route = self._routes.to(slot.image, binding, layout)
        self._stager.page_lock(slot.image, self._room)
        copy = route.stage(self._stager, step, publish)
        return StagedState(layout, slot.image, copy, held, slot)

    def _copy(self, step: int) -> StagedState:
        route = self._find()
        held = self._digests(route.binding)
        copy = route.stage(self._stager, step)
        return StagedState(route.layout, route.image, copy, held, base=route.base)

    def _share(self) -> None:
        """The collectives of a save; before anything that may fail on a single rank."""
        self._slots.hear()
        if self._context.world > 1:
            self._shared.share()

    def _digests(self, binding: Binding) -> dict[str, int]:
        """Digests of the buffers, which forward passes write on each rank, and which must be the
        same."""
        if self._context.world == 1:
            return {}
        return digests({key: binding.table[key] for key in binding.buffers})

    def _pack(self) -> dict[str, bytes]:
        """The files of the registered objects, in their present state."""
        registered, rank, files = self._registered, self._context.rank, {}
        registered.look()
        if registered.shared and rank == 0:
            files[SHARED_OBJECTS] = pack(registered.shared, "state")
        if registered.per_rank:
            files[objects_file(rank)] = pack(registered.per_rank, "per_rank")
        return files

    def _find(self) -> Route:
        """The route of the state into its file, after starting to page-lock the images."""
        route = self._routes.find()
        self._stager.page_lock(route.image, self._room)
        if route.base is not None:
            self._stager.page_lock(route.base, self._room)
        return route

    def _run(self, job: SaveJob) -> SaveSeconds | None:
        if self._saves == 1:  # a manager may save without having restored; later it must exist
            with suppress(OSError):  # the save will raise it
                job.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return job.run()
        finally:
            if job.state.slot is not None:
                job.state.slot.busy = False

    def _learn_from_last_copy(self) -> None:
        if self._staged is not None:
            self._routes.copy_at_once(self._staged.copy.settle())
            self._staged = None

    def _look(self, contents: bool) -> dict[str, int]:
        """A digest of each tensor that this rank holds: of its spec, and with `contents` of its
        values."""
        self._registered.check()
        table = capture(self._routes.model, self._routes.optimizer)
        self._routes.check_names(table)
        specs = tensor_specs(table, self._context.world)
        held = {spec.key: shard_plan.digest([spec]) for spec in specs}
        if contents:
            held |= digests(table)
        return held
