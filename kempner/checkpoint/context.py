"""What the saves and loads of one attempt share, and how its ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from kempner.checkpoint.format.manifest import Identity
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.run.control.heartbeat import Waiting, untimed
from kempner.run.process.exit_codes import RunError
from kempner.run.process.retry import StorageUnavailableError, describe, storage_waits
from kempner.run.record.attempts import Fence
from kempner.run.record.events import LedgerEvent
from kempner.run.record.ledger import EventRecorder

T = TypeVar("T")


def record_nothing(event: LedgerEvent) -> None:
    """An `EventRecorder` without a ledger."""


@dataclass(frozen=True)
class CheckpointContext:
    """The checkpoint folder of a run, the attempt that writes to it, and its process group.

    `identity` is compared with that of a checkpoint to resume from, `fence` guards against a newer
    attempt. `group` is a Gloo group over all ranks that nothing else uses. `record` takes events
    for the ledger. `waiting` is entered while a load waits for other ranks. `known` is the step of
    the newest checkpoint in the ledger, so that one must exist; `known_here` says that it was in
    `path`, which may be unavailable for now. `local_ranks` share this node's memory."""

    path: Path
    identity: Identity
    fence: Fence
    group: dist.ProcessGroup
    record: EventRecorder = record_nothing
    waiting: Waiting = untimed
    known: int | None = None
    known_here: bool = True
    local_ranks: int = 1

    @cached_property
    def folder(self) -> CheckpointFolder:
        return CheckpointFolder(self.path)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    def broadcast_from_rank0(self, answer: Callable[[], T]) -> T:
        """The result of `answer` on rank 0, for questions about the file system that only one
        process may ask; retried while storage fails. A `RunError` on rank 0 is raised on every
        rank."""
        box: list[object] = [self._answer_or_error(answer) if self.rank == 0 else None]
        with self.waiting("the word of rank 0"):
            dist.broadcast_object_list(box, group_src=0, group=self.group)
        if isinstance(box[0], RunError):
            raise box[0]
        result: T = box[0]  # type: ignore[assignment]  # what rank 0's answer returned
        return result

    def gather(self, mine: T) -> list[T]:
        """The value of each rank, in rank order, on every rank."""
        gathered: list[T | None] = [None] * self.world
        with self.waiting("the others' part of a checkpoint"):
            dist.all_gather_object(gathered, mine, group=self.group)
        return gathered  # type: ignore[return-value]  # all of them have given theirs

    def _answer_or_error(self, answer: Callable[[], T]) -> T | RunError:
        try:
            return storage_waits().retry(answer, worked=True, path=self.path)
        except RunError as error:
            return error
        except OSError as error:
            return StorageUnavailableError(f"{self.path} cannot be used: {describe(error)}")
