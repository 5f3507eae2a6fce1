"""Step slots as a rank uses them: which slot is overwritten next, and which step all ranks hold.

A slot is overwritten only once every rank holds a newer step, so that at any time there is a step
that all ranks hold, whichever process dies. The ranks agree on it after each copy, in a collective
that overlaps their update. With a buddy they also agree on the step to send to it: that step, and
the one sent before, stay until the next has arrived everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.format.shard_plan import Placed, file_length
from kempner.checkpoint.slots.memory import (
    Board,
    Branch,
    LentSlots,
    Notes,
    SlotContents,
    SlotMemory,
)
from kempner.checkpoint.tensors.file_buffer import FileBuffer
from kempner.checkpoint.tensors.staging import room_to_lock
from kempner.run.output.logs import logger

Verdict: TypeAlias = Callable[[], TrainState | None]
"""The train state of a step, called once its state is copied; None if the step was not sound."""

SHARE = 0.5  # largest share of the memory that is free at the start for all slots of a node


@dataclass
class Pins:
    """The steps that a buddy has or is being sent, at most two; the same on all ranks. `since` as
    in `Branch`."""

    board: Board | None
    steps: tuple[int, ...] = ()
    since: int = 0

    @property
    def may_pin(self) -> bool:
        """Whether there is a buddy, and the last step has arrived there."""
        return self.board is not None and self.board.may_pin

    def pin(self, step: int, slot: int) -> None:
        """Have the step in a slot sent; the one before has arrived on all ranks."""
        self.steps = (*self.steps[-1:], step)
        assert self.board is not None  # else `may_pin` is False
        self.board.pin(slot)

    def go_back(self) -> None:
        if self.board is not None:
            self.board.go_back()
        self.since += 1
        self.steps = ()


@dataclass(frozen=True)
class StepMemory:
    """The memory for a rank's steps (None if it got none), and the `group` in which the ranks agree
    on what they hold."""

    lent: LentSlots | None
    group: dist.ProcessGroup

    @cached_property
    def pins(self) -> Pins:
        lent = self.lent
        return Pins(None if lent is None or lent.board is None else Board(lent.board))


@dataclass
class Slot:
    """An image in shared memory. `step` is the step that it holds; None if it is incomplete."""

    memory: SlotMemory
    image: FileBuffer
    step: int | None = None
    busy: bool = False  # whether a save is writing it to disk


@dataclass
class StepSlots:
    """The slots of this rank. The copying thread calls only `publish`."""

    context: CheckpointContext
    memory: StepMemory | None = None
    slots: list[Slot] = field(default_factory=list)
    newest: int = -1
    """The last step that was to be kept, whether or not that worked; the same on all ranks."""
    _agreed: int = -1
    _asked: tuple[torch.Tensor, dist.Work | None] | None = None
    _allowed: bool | None = None
    _noted: int | None = None

    def lay_out(self, placed: Sequence[Placed]) -> bool:
        """Create the slots for images of such a file; whether there is room. Collective at the
        first call, with the same result on all ranks."""
        if self.memory is None:
            return False
        if self._allowed is None:
            self._allowed = self._agree_on_room(file_length(placed))
        busy, self.slots, self._noted = any(slot.busy for slot in self.slots), [], None
        self.memory.pins.steps = ()
        if self._allowed and not busy:  # else an image that is being written would change
            assert self.memory.lent is not None  # else it is not allowed
            for descriptor in self.memory.lent.slots:
                memory = SlotMemory.grown(descriptor, file_length(placed))
                buffer = torch.frombuffer(memory.image, dtype=torch.uint8)
                self.slots.append(Slot(memory, FileBuffer(placed, buffer)))
        return bool(self.slots)

    def take(self) -> Slot:
        """The slot to overwrite next, emptied."""
        free = [slot for slot in self.slots if not (slot.busy or self._is_needed(slot))]
        slot = min(free, key=lambda slot: -1 if slot.step is None else slot.step)
        slot.memory.withdraw()
        slot.step = None
        return slot

    def publish(self, slot: Slot, plan: int, shared: int, verdict: Verdict) -> None:
        """Mark a slot as complete, if the step was sound."""
        train_state = verdict()
        if train_state is None or self.memory is None:
            return
        rank, world = self.context.rank, self.context.world
        nonce, length = self.context.fence.attempt.nonce, len(slot.image.content)
        branch = Branch(nonce, self.memory.pins.since)
        held = SlotContents(train_state, branch, rank, world, plan, shared, length, self._identity)
        if slot.memory.publish(held):
            slot.step = train_state.step

    def lacks_notes(self, plan: int) -> bool:
        """Whether this rank has to write the notes of a plan; True at most once per plan."""
        if self.context.rank != 0 or self._noted == plan:
            return False
        self._noted = plan
        notes = Notes.read(self._notes)
        return notes is None or notes.plan != plan

    def note(self, plan: int, files: Callable[[], dict[str, memoryview]]) -> None:
        Notes(plan, files()).write(self._notes)

    def ask(self) -> None:
        """Start the collective on whether all ranks hold the newest step and may pin it; called on
        each rank between a copy and the update after it."""
        self.hear()
        if self.memory is None or not self._allowed:
            return
        holds = any(slot.step == self.newest for slot in self.slots)
        mine = [holds, self.memory.pins.may_pin]
        answer, work = torch.tensor(mine, dtype=torch.int64), None
        if self.context.world > 1:
            least = dist.ReduceOp.MIN
            work = dist.all_reduce(answer, op=least, group=self.memory.group, async_op=True)
        self._asked = answer, work

    def hear(self) -> None:
        if self._asked is None:
            return
        answer, work = self._asked
        self._asked = None
        if work is not None:
            work.wait()
        all_hold, may_pin = answer.tolist()
        if all_hold:  # else every rank keeps the step before
            self._agreed = self.newest
            if may_pin:
                self._pin(self.newest)

    def withdraw(self) -> None:
        """Empty all slots, because of a rollback."""
        if self.memory is not None:
            self.memory.pins.go_back()
        for slot in self.slots:
            slot.memory.withdraw()
            slot.step = None
        self.newest = self._agreed = -1

    @property
    def _notes(self) -> int:
        assert self.memory is not None
        assert self.memory.lent is not None  # else nothing is kept
        return self.memory.lent.notes

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return self.context.identity.to_fields() if self.context.rank == 0 else {}

    def _is_needed(self, slot: Slot) -> bool:
        return slot.step is not None and slot.step in (self._agreed, *self._pinned)

    @property
    def _pinned(self) -> tuple[int, ...]:
        return () if self.memory is None else self.memory.pins.steps

    def _pin(self, step: int) -> None:
        if self.memory is None or step in self._pinned:
            return
        for number, slot in enumerate(self.slots):
            if slot.step == step:
                self.memory.pins.pin(step, number)

    def _agree_on_room(self, length: int) -> bool:
        lent = None if self.memory is None else self.memory.lent
        room = room_to_lock(self.context.local_ranks) + (0 if lent is None else lent.taken)
        need, refusal = 0 if lent is None else lent.images * length, ""
        if lent is None:
            refusal = "nothing that outlives a rank could keep them: that takes `kempner supervise`"
        elif need > SHARE * room:
            gib = 2**30
            refusal = f"a rank needs {need / gib:.2f} GiB of the {room / gib:.2f} GiB that it has"
        refusals = [reason for reason in self.context.gather(refusal) if reason]
        if refusals and lent is not None:
            lent.empty()
        if self.context.rank == 0 and refusals:
            logger().warning("steps are not kept in memory", reason=refusals[0])
        elif self.context.rank == 0:
            logger().info("each step is kept in memory", bytes=need)
        return not refusals
