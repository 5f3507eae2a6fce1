"""Starts saves, which then go on in threads beside training."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format import shard_plan
from kempner.checkpoint.format.names import SHARED_OBJECTS, in_progress_name, objects_file
from kempner.checkpoint.format.train_state import TrainState
from kempner.checkpoint.io.file_writer import yield_to_training
from kempner.checkpoint.registered.composite import plainly_named
from kempner.checkpoint.registered.objects import NOTHING, Registered, pack
from kempner.checkpoint.tensors.file_buffer import FileBuffer, tensor_specs
from kempner.checkpoint.tensors.replicas import SharedBuffers, agree, combine, digests
from kempner.checkpoint.tensors.route import Route, Routes
from kempner.checkpoint.tensors.save import SaveJob, StagedState
from kempner.checkpoint.tensors.staging import StagedCopy, Stager, room_to_lock
from kempner.checkpoint.tensors.state import Binding, capture
from kempner.checkpoint.tensors.step_slots import StepMemory, StepSlots, Verdict
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.save_times import SaveSeconds


@dataclass(frozen=True)
class RunningSave:
    """A save under way. `done` ends as `SaveJob.run` does."""

    job: SaveJob
    done: Future[SaveSeconds | None]


class BackgroundSaver:
    """Copies the state on one thread, and writes and commits the copy on another."""

    def __init__(
        self,
        context: CheckpointContext,
        model: nn.Module,
        optimizer: Optimizer,
        registered: Registered = NOTHING,
        memory: StepMemory | None = None,
    ) -> None:
        self._context, self._shared = context, SharedBuffers(model)
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
        self.checked = False
        """Whether the contents have been checked; the same on all ranks."""

    def check(self, contents: bool) -> None:
        """Raise `UsageError`, on all ranks alike, if a checkpoint cannot hold the state.

        With `contents`, what is not sharded is compared between the ranks as well, bit for bit.
        """
        alone = self._context.world == 1
        if contents and not alone:
            self._shared.share()
        agree(self._context, lambda: self._look(contents and not alone))
        self.checked = self.checked or contents

    def check_registered(self) -> None:
        """Raise `UsageError`, on all ranks alike, if a program changes what is not registered."""

        def look() -> dict[str, int]:
            self._registered.look()
            return {}

        agree(self._context, look)

    def hold(self, train_state: TrainState, verdict: Verdict) -> None:
        """Start to keep the state as of `train_state` in memory, if it has room for that."""
        if self._slots.memory is None:
            return
        self._learn_from_last_copy()
        self._share()
        self._slots.newest = train_state.step
        with suppress(UsageError):  # a save will say so
            self._staged = self._keep(train_state.step, verdict)

    def start(self, train_state: TrainState) -> RunningSave:
        """Start to save the state as of `train_state`; the save before must have ended.

        What a checkpoint cannot hold makes the save fail, on all ranks.
        """
        self._saves += 1
        context, attempt = self._context, self._context.fence.attempt
        unique = hashlib.blake2b(f"{attempt.nonce}.{self._saves}".encode(), digest_size=4)
        name = in_progress_name(train_state.step, attempt.number, unique.hexdigest())
        started = time.monotonic()
        staged, objects = self._stage(train_state)
        path = context.folder.path / name
        job = SaveJob(context, train_state, path, staged, started, objects, self._routes.base_files)
        if staged.slot is not None:
            staged.slot.busy = True
        return RunningSave(job, self._writer.submit(self._run, job))

    def prepare(self) -> None:
        """Plan the file and lock its pages beside training, once the optimizer has its state.

        Asked before each update, that is in the first step of a resumed run, and in the second of a
        new one, whose optimizer has no state before. Only on a GPU.
        """
        if self._unprepared is not None and self._unprepared.state:
            self._unprepared = None
            with suppress(UsageError):  # the save will say so
                self._routes.plan()
                for slot in self._slots.slots:
                    self._stager.page_lock(slot.image, self._room)
                if not self._slots.slots:
                    self._find()

    def settle(self) -> None:
        """Wait until the copy under way is complete, whether or not it worked."""
        if self._staged is not None:
            self._staged.copy.settle()
        self._slots.ask()

    def forget(self) -> None:
        """Let go of the state's tensors, which are about to be replaced, and of steps in memory."""
        self._learn_from_last_copy()
        self._slots.withdraw()
        self._routes.forget()

    def close(self) -> None:
        """End the threads, once a save that is under way has ended."""
        self._stager.close()
        self._writer.shutdown()

    def _stage(self, train_state: TrainState) -> tuple[StagedState, dict[str, bytes]]:
        """Start to copy the state, unless that was done to keep it, and copy what is no tensor."""
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
        """Start to copy the state into a slot; None where there are no slots."""
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
        """Start to copy the state into this rank's own memory."""
        route = self._find()
        held = self._digests(route.binding)
        copy = route.stage(self._stager, step)
        return StagedState(route.layout, route.image, copy, held, base=route.base)

    def _share(self) -> None:
        """What must come first, because all ranks take part in it: no rank may fail before."""
        self._slots.hear()
        if self._context.world > 1:
            self._shared.share()

    def _digests(self, binding: Binding) -> dict[str, int]:
        """Of what forward passes write on each rank, and all must hold alike."""
        if self._context.world == 1:
            return {}
        return digests({key: binding.table[key] for key in binding.buffers})

    def _pack(self) -> dict[str, bytes]:
        """The files of what the program has registered, as it is now."""
        registered, rank, files = self._registered, self._context.rank, {}
        registered.look()
        if registered.shared and rank == 0:
            files[SHARED_OBJECTS] = pack(registered.shared, "state")
        if registered.per_rank:
            files[objects_file(rank)] = pack(registered.per_rank, "per_rank")
        return files

    def _find(self) -> Route:
        """The way of the state into its file, whose pages are locked before anything else."""
        route = self._routes.find()
        self._stager.page_lock(route.image, self._room)
        if route.base is not None:
            self._stager.page_lock(route.base, self._room)
        return route

    def _run(self, job: SaveJob) -> SaveSeconds | None:
        if self._saves == 1:  # a manager may save without having restored; later it must be there
            with suppress(OSError):  # the save will say so
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
        """What this rank holds: a number for each tensor."""
        self._registered.check()
        table = capture(self._routes.model, self._routes.optimizer)
        self._routes.check_names(table)
        specs = tensor_specs(table, self._context.world)
        held = {spec.key: shard_plan.digest([spec]) for spec in specs}
        if contents:
            held |= digests(table)
        return held
