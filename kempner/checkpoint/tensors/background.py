"""Starts saves, which then go on in threads beside training."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from kempner.checkpoint.format.names import in_progress_name
from kempner.checkpoint.format.train_state import TrainState
from kempner.checkpoint.io.file_writer import yield_to_training
from kempner.checkpoint.tensors.context import CheckpointContext
from kempner.checkpoint.tensors.file_buffer import tensor_specs
from kempner.checkpoint.tensors.route import FileLayout, Route
from kempner.checkpoint.tensors.save import SaveJob
from kempner.checkpoint.tensors.staging import Stager
from kempner.checkpoint.tensors.state import Binding
from kempner.run.record.save_times import SaveSeconds


@dataclass(frozen=True)
class RunningSave:
    """A save under way. `done` ends as `SaveJob.run` does."""

    job: SaveJob
    done: Future[SaveSeconds | None]


class BackgroundSaver:
    """Copies the state on one thread, and writes and commits the copy on another."""

    def __init__(self, context: CheckpointContext, model: nn.Module, optimizer: Optimizer) -> None:
        self._context, self._model, self._optimizer = context, model, optimizer
        self._device = next(iter(model.parameters())).device
        self._stager = Stager(self._device)
        self._writer = ThreadPoolExecutor(1, "checkpoint", initializer=yield_to_training)
        self._route: Route | None = None
        self._saves = 0

    def start(self, train_state: TrainState) -> RunningSave:
        """Start to save the state as of `train_state`; the save before must have ended."""
        self._saves += 1
        context, attempt = self._context, self._context.fence.attempt
        unique = hashlib.blake2b(f"{attempt.nonce}.{self._saves}".encode(), digest_size=4)
        name = in_progress_name(train_state.step, attempt.number, unique.hexdigest())
        started = time.monotonic()
        route = self._find_route()
        staged = route.stage(self._stager, train_state.step)
        path = context.folder.path / name
        job = SaveJob(context, train_state, path, route.layout, staged, started)
        return RunningSave(job, self._writer.submit(job.run))

    def close(self) -> None:
        """End the threads, once a save that is under way has ended."""
        self._stager.close()
        self._writer.shutdown()

    def _find_route(self) -> Route:
        """The way of the state into its file; made anew when its tensors are not what they were."""
        if self._route is None or not self._route.binding.intact():
            binding = Binding(self._model, self._optimizer)
            specs = tensor_specs(binding.table, self._context.world)
            if self._route is None or self._route.layout.specs != specs:
                layout = FileLayout.of(specs, self._device, self._context.group)
            else:
                layout = self._route.layout
            self._route = Route.of(binding, layout)
        return self._route
