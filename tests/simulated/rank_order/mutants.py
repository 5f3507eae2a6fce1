"""kempner with control flow that depends on something local: what the fuzzer has to find.

Each exchanges one text in one function for what an engineer could have written, or had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.tensors.step_slots import Pins, StepSlots
from kempner.training import loop, vote
from kempner.training.loop import Evaluation
from simulated.checks.mutants import rewrite


@dataclass(frozen=True)
class Mutant:
    """In `owner`'s function `name` the text `old` has become `new`."""

    what: str
    owner: Any
    name: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """While it is open, kempner has this bug."""
        wrong = rewrite(self.owner, self.name, self.old, self.new)
        with patch.object(self.owner, self.name, wrong):
            yield


KNOWN_BEFORE = "run.checkpoints._failed.count"
"""What a rank had counted before it waited for the save in flight: as much as its pace allowed."""

MUTANTS = (
    Mutant("a save is left out by what this rank has counted", loop, "save_unless_suspicious",
           "agreed.failed_saves", KNOWN_BEFORE),
    Mutant("the final save is left out by what this rank has counted", vote,
           "secure_last_step", "agreed.failed_saves", KNOWN_BEFORE),
    Mutant("a look at the save raises what it finds", CheckpointEngine, "poll",
           "self.settle(timeout=0)",
           "self._in_flight is not None and self._in_flight.done.done() and self.join()"),
    Mutant("each rank chooses its final save", vote, "agree_on_next_decision",
           "decision = run.ranks.broadcast(move)", "decision = move"),
    Mutant("a rank without data leaves alone", loop, "train",
           "agreed.void or (", "batch is None or ("),
    Mutant("a rank that is asked to stop leaves alone", loop, "train",
           "and not agreed.stop:", "and not run.shutdown.should_shutdown():"),
    Mutant("a save is due again by what this rank has counted", loop, "save_is_due",
           "agreed.save_again if", "run.checkpoints.failures.due(time.monotonic()) if"),
    Mutant("an evaluation is cut short by what this rank was told", Evaluation, "_add_set",
           "if agreed.stop:\n            break", "if vote().stop:\n            break"),
    Mutant("what is saved depends on what this rank has seen committed", loop, "save_is_due",
           "return due and", "return due and run.checkpoints.in_flight is None and"),
    Mutant("a rank gives up by what it has counted", loop, "refuse_to_go_on_unsaved",
           "if agreed.failed_saves >= max_failures",
           "if checkpoints.failures.count >= max_failures"),
    Mutant("the final save is tried again by what this rank has counted", vote,
           "secure_last_step", "case Action.PAUSE:",
           "case Action.PAUSE if run.checkpoints.in_flight is None:"),
    Mutant("a step is agreed on that any of the ranks holds", StepSlots, "ask",
           "dist.ReduceOp.MIN", "dist.ReduceOp.MAX"),
    Mutant("what all ranks hold is overwritten", StepSlots, "take",
           "or self._is_needed(slot)", "or False"),
    Mutant("a rank that holds nothing does not ask", StepSlots, "ask",
           "or not self._allowed", "or not any(slot.step for slot in self.slots)"),
    Mutant("a step is sent by what this rank's buddy has", StepSlots, "hear",
           "if may_pin:", "if self.memory.pins.may_pin:"),
    Mutant("what the buddies have is overwritten", Pins, "pin",
           "self.steps[-1:]", "()"),
    Mutant("what is on its way to the buddies is overwritten", StepSlots, "_is_needed",
           "(self._agreed, *self._pinned)", "(self._agreed, *self._pinned[:1])"),
)  # fmt: skip
