"""Starts saves, which then go on in threads beside training."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kempner.checkpoint.format import shard_plan
from kempner.checkpoint.format.names import in_progress_name
from kempner.checkpoint.format.train_state import TrainState
from kempner.checkpoint.io.file_writer import yield_to_training
from kempner.checkpoint.tensors.context import CheckpointContext
from kempner.checkpoint.tensors.file_buffer import FileBuffer, tensor_specs
from kempner.checkpoint.tensors.replicas import SharedBuffers, agree, digests
from kempner.checkpoint.tensors.route import FileLayout, Route, Routes
from kempner.checkpoint.tensors.save import SaveJob
from kempner.checkpoint.tensors.staging import StagedCopy, Stager, room_to_lock
from kempner.checkpoint.tensors.state import capture
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.save_times import SaveSeconds


@dataclass(frozen=True)
class RunningSave:
    """A save under way. `done` ends as `SaveJob.run` does."""

    job: SaveJob
    done: Future[SaveSeconds | None]


class BackgroundSaver:
    """Copies the state on one thread, and writes and commits the copy on another."""

    def __init__(self, context: CheckpointContext, model: nn.Module, optimizer: Optimizer) -> None:
        self._context, self._shared = context, SharedBuffers(model)
        self._routes = Routes(context, unwrap(model), optimizer)
        self._stager = Stager(self._routes.device)
        on_gpu = self._routes.device.type == "cuda"
        self._room = room_to_lock(context.local_ranks) if on_gpu else 0
        self._unprepared: Optimizer | None = optimizer if on_gpu else None
        self._writer = ThreadPoolExecutor(1, "checkpoint", initializer=yield_to_training)
        self._copy: StagedCopy | None = None
        self._image: FileBuffer | None = None
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

    def start(self, train_state: TrainState) -> RunningSave:
        """Start to save the state as of `train_state`; the save before must have ended.

        What a checkpoint cannot hold makes the save fail, on all ranks.
        """
        self._saves += 1
        context, attempt = self._context, self._context.fence.attempt
        unique = hashlib.blake2b(f"{attempt.nonce}.{self._saves}".encode(), digest_size=4)
        name = in_progress_name(train_state.step, attempt.number, unique.hexdigest())
        started = time.monotonic()
        layout, self._copy, held = self._stage(train_state.step)
        path = context.folder.path / name
        job = SaveJob(context, train_state, path, layout, self._copy, started, held)
        return RunningSave(job, self._writer.submit(self._run, job))

    def prepare(self) -> None:
        """Plan the file and lock its pages beside training, once the optimizer has its state.

        Asked before each update, that is in the first step of a resumed run, and in the second of a
        new one, whose optimizer has no state before. Only on a GPU.
        """
        if self._unprepared is not None and self._unprepared.state:
            self._unprepared = None
            with suppress(UsageError):  # the save will say so
                self._find()

    def forget(self) -> None:
        """Let go of the state's tensors, which are about to be replaced."""
        self._learn_from_last_copy()
        self._routes.forget()

    def close(self) -> None:
        """End the threads, once a save that is under way has ended."""
        self._stager.close()
        self._writer.shutdown()

    def _stage(self, step: int) -> tuple[FileLayout, StagedCopy, dict[str, int]]:
        """Start to copy the state, and take digests of what forward passes write on each rank."""
        self._learn_from_last_copy()
        alone = self._context.world == 1
        if not alone:
            self._shared.share()
        try:
            route = self._find()
        except UsageError as error:
            nothing = StagedCopy(())
            nothing.done.set_exception(error)
            return self._routes.empty_layout(), nothing, {}
        copy = route.stage(self._stager, step)
        binding = route.binding
        held = {} if alone else digests({key: binding.table[key] for key in binding.buffers})
        return route.layout, copy, held

    def _find(self) -> Route:
        """The way of the state into its file, whose pages are locked before anything else."""
        before, route = self._image, self._routes.find()
        self._image = route.layout.image
        if self._image is not before:
            self._stager.page_lock(self._image, self._room)
        return route

    def _run(self, job: SaveJob) -> SaveSeconds | None:
        if self._saves == 1:  # a manager may save without having restored; later it must be there
            with suppress(OSError):  # the save will say so
                job.path.parent.mkdir(parents=True, exist_ok=True)
        return job.run()

    def _learn_from_last_copy(self) -> None:
        if self._copy is not None:
            self._routes.copy_at_once(self._copy.settle())
            self._copy = None

    def _look(self, contents: bool) -> dict[str, int]:
        """What this rank holds: a number for each tensor."""
        table = capture(self._routes.model, self._routes.optimizer)
        specs = tensor_specs(table, self._context.world)
        held = {spec.key: shard_plan.digest([spec]) for spec in specs}
        if contents:
            held |= digests(table)
        return held


def unwrap(model: nn.Module) -> nn.Module:
    """The module within `DistributedDataParallel`, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model
