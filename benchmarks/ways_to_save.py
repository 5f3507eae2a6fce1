"""The ways to save that `checkpoint.py` compares, each used as its documentation says.

Each has `save`, `guard` (entered before the weights move, left after) and `join`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity, TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.tensors import state
from kempner.run.record.attempts import Fence, begin_attempt
from kempner.run.record.run_dir import RunDirectory

STEP_ROWS = 64


@dataclass
class Subject:
    """A model in training, and the floor of its state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup
    folder: Path
    width: int
    floor: list[float] = field(default_factory=list)

    def step(self, guard: AbstractContextManager[object] | None = None) -> None:
        """One forward, backward and update."""
        self.model(torch.ones(STEP_ROWS, self.width)).square().mean().backward()
        with guard or nullcontext():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """What is saved."""
        return state.capture(self.model, self.optimizer)

    def measure_floor(self, buffers: list[Tensor]) -> None:
        """Time one copy of the state."""
        tensors = [state.local_part(t) for t in self.state().values()]
        start = time.perf_counter()
        torch._foreach_copy_(buffers, tensors)
        self.floor.append(time.perf_counter() - start)

    def folder_of(self, way: str, number: int) -> Path:
        """Where to save; of earlier saves the last is kept, as kempner keeps two."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / f"{way}-{number - 2}", ignore_errors=True)
        return self.folder / f"{way}-{number}"


class Nothing:
    """The control."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def save(self, number: int) -> None:
        """Save nothing."""

    def guard(self) -> AbstractContextManager[object]:
        """Nothing to wait for."""
        return nullcontext()

    def join(self) -> None:
        """Nothing to wait for."""


def open_manager(
    run: RunDirectory, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> CheckpointEngine:
    """kempner's manager, in an attempt of its own; called on every rank."""
    world = dist.get_world_size()
    box = [begin_attempt(run) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    assert box[0] is not None
    context = CheckpointContext(
        path=run.checkpoints,
        identity=Identity(world, {"fsdp": world}, 0, "", {}),
        fence=Fence(run.attempts, box[0]),
        group=group,
    )
    return CheckpointEngine(context, model, optimizer, keep=Keep(last=2))


class Ours(Nothing):
    """kempner's manager."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        run = RunDirectory(subject.folder / "ours")
        self.manager = open_manager(run, subject.model, subject.optimizer, subject.group)

    def save(self, number: int) -> None:
        self.manager.save(TrainState(number))

    @contextmanager
    def guard(self) -> Iterator[None]:
        self.manager.release_staging()
        yield

    def join(self) -> None:
        self.manager.join()
        assert self.manager.committed_step is not None


class StockSync(Nothing):
    """`torch.distributed.checkpoint.save`."""

    def save(self, number: int) -> None:
        path = self.subject.folder_of("sync", number)
        dcp.save(self.subject.state(), checkpoint_id=path, process_group=self.subject.group)


class StockAsync(Nothing):
    """`torch.distributed.checkpoint.async_save`, in a thread."""

    kind = AsyncCheckpointerType.THREAD
    future: Future[Any] | None = None

    def save(self, number: int) -> None:
        self.future = dcp.async_save(  # type: ignore[assignment]
            self.subject.state(),
            checkpoint_id=self.subject.folder_of(self.kind.name, number),
            process_group=self.subject.group,
            async_checkpointer_type=self.kind,
        )

    def join(self) -> None:
        if self.future is not None:
            self.future.result()


class StockProcess(StockAsync):
    """`torch.distributed.checkpoint.async_save`, in a process."""

    kind = AsyncCheckpointerType.PROCESS


class Meta(Nothing):
    """Meta's `torch_checkpointing`, asynchronous, with its configuration for CPUs.

    Without direct I/O: with it, version 0.1.1 fails on ext4 (its first write is not aligned).
    """

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        from torch_checkpointing import CheckpointManager as TheirManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        on_cpu = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        saver = AsyncCheckpointSaverConfig(staging_config=on_cpu)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = TheirManager.Config(save=saver, storage_config=storage).build()
        self.future: Future[Any] | None = None

    def save(self, number: int) -> None:
        path = self.subject.folder_of("meta", number)
        self.future = self.manager.save(str(path), {"state": self.subject.state()})

    def guard(self) -> AbstractContextManager[object]:
        return self.manager.lock()  # type: ignore[no-any-return]

    def join(self) -> None:
        if self.future is not None:
            self.future.result()


WAYS: dict[str, type[Nothing]] = {
    "nothing": Nothing,
    "ours": Ours,
    "stock sync": StockSync,
    "stock async": StockAsync,
    "stock process": StockProcess,
    "meta": Meta,
}
