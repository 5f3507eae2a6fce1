"""Step slots whose memory is watched: whatever the order of the ranks, they hold a step in common.

Once all ranks have held one step, there is one at every moment that all of them hold, until the run
goes back behind it: a rank that dies then loses the step that was being copied at most. Once the
buddies of all ranks have a copy, any one rank's memory can be lost: at every moment its buddy has a
step that all others hold.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.slots.memory import PINNED, SLOTS, SlotContents
from kempner.checkpoint.tensors.step_slots import Slot, StepMemory, StepSlots

if TYPE_CHECKING:
    from simulated.rank_order.edges import Scene

ARRIVES = 0.4
"""How likely a copy has arrived when a rank looks again."""

FAILS = 0.05
"""Share of the copies into a slot that fail on one rank."""


class Watched:
    """What is in the slots of all ranks."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._held = [set[int]() for _ in range(scene.plan.world)]
        self._copies = [set[int]() for _ in range(scene.plan.world)]
        self._common = self._copied = False
        self.kept = 0
        """How many steps were held, over all ranks."""

    def publish(self, rank: int, step: int) -> None:
        """A rank holds another step."""
        self._held[rank].add(step)
        self.kept += 1
        self._common = self._common or bool(set.intersection(*self._held))

    def withdraw(self, rank: int, step: int) -> None:
        """A rank is about to overwrite a step."""
        self._held[rank].discard(step)
        if self._common and not set.intersection(*self._held):
            self._scene.scheduler.violate(
                f"slots: rank {rank} overwrites step {step}, and no step is left that all ranks "
                f"hold: {self._held}"
            )
        self._check_copies(f"rank {rank} overwrites step {step}")

    def clear(self, rank: int) -> None:
        """The run goes back."""
        self._held[rank].clear()
        for copies in self._copies:
            copies.clear()
        self._common = self._copied = False

    def begin_copy(self, rank: int, step: int) -> None:
        """It takes the place of the older one of two."""
        self._copies[rank] = {max(self._copies[rank])} if self._copies[rank] else set()
        self._check_copies(f"the buddy of rank {rank} gets step {step}")

    def end_copy(self, rank: int, step: int) -> None:
        """It has arrived."""
        self._copies[rank].add(step)
        self._copied = self._copied or all(self._copies)

    def _check_copies(self, what: str) -> None:
        for lost, copies in enumerate(self._copies):
            others = [held for rank, held in enumerate(self._held) if rank != lost]
            if self._copied and not set.intersection(copies, *others):
                self._scene.scheduler.violate(
                    f"slots: {what}, and nothing is left to go on from without rank {lost}: "
                    f"{self._held}, copies {self._copies}"
                )


class Memory:
    """As much of a `SlotMemory` as is used."""

    def __init__(self, watched: Watched, rank: int) -> None:
        self._watched, self._rank = watched, rank
        self._step: int | None = None

    def publish(self, held: SlotContents) -> bool:
        self._step = held.train_state.step
        self._watched.publish(self._rank, self._step)
        return True

    def withdraw(self) -> None:
        if self._step is not None:
            self._watched.withdraw(self._rank, self._step)
        self._step = None


class Board:
    """As much of a `Board` as is used, with a buddy whose link has a pace of its own."""

    def __init__(self, scene: Scene, rank: int, slots: StepSlots) -> None:
        self._scene, self._rank, self._slots = scene, rank, slots
        self._on_its_way: int | None = None

    @property
    def may_pin(self) -> bool:
        if self._on_its_way is None:
            return True
        if self._scene.scheduler.random.random() < ARRIVES:
            self._scene.watched.end_copy(self._rank, self._on_its_way)
            self._on_its_way = None
        return self._on_its_way is None

    def pin(self, number: int) -> None:
        step = self._slots.slots[number].step
        assert step is not None  # all hold it, or it were not pinned
        self._on_its_way = step
        self._scene.watched.begin_copy(self._rank, step)

    def go_back(self) -> None:
        self._on_its_way = None


def give_slots(manager: CheckpointEngine, scene: Scene, rank: int, votes: object) -> None:
    """Have a rank's manager keep steps in watched memory."""
    slots = manager._saver._slots
    slots.memory = StepMemory(None, votes)  # type: ignore[arg-type]
    slots.memory.pins.board = Board(scene, rank, slots)  # type: ignore[assignment]
    slots._allowed = True
    image = SimpleNamespace(content=b"")
    slots.slots = [
        Slot(Memory(scene.watched, rank), image)  # type: ignore[arg-type]
        for _ in range(SLOTS + PINNED)
    ]
    withdraw, hold = slots.withdraw, manager._saver.hold

    def withdraw_all() -> None:
        scene.watched.clear(rank)
        withdraw()

    def hold_only(*arguments: object) -> None:
        scene.holding.add(rank)
        hold(*arguments)  # type: ignore[arg-type]
        scene.holding.discard(rank)

    slots.withdraw = withdraw_all  # type: ignore[method-assign]
    slots.lacks_notes = lambda plan: False  # type: ignore[method-assign]
    manager._saver.hold = hold_only  # type: ignore[method-assign]
