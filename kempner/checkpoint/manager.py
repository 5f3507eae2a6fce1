"""`CheckpointEngine`: saves in the background, commits, and finds the way back.

Every method is called on every rank, in the same order. The process group of its context is used
for nothing else: the background half of a save talks on it while training goes on.

A save ends earlier on one rank than on another. So what a rank knows of it (`in_flight`,
`settled_failures`, `superseded`, `committed_step`, `durations`) is for votes and for rank 0's
choices: no rank may go another way because of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import wait

from torch import nn
from torch.optim import Optimizer

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.registered.composite import plainly_named
from kempner.checkpoint.registered.objects import NOTHING, RegisteredObjects
from kempner.checkpoint.store import retention
from kempner.checkpoint.store.commit import SaveFailures
from kempner.checkpoint.store.selection import choose, choose_to_go_back
from kempner.checkpoint.tensors.restore import StateRestorer
from kempner.checkpoint.tensors.save import BackgroundSaver, RunningSave, SaveFailedError, SaveJob
from kempner.checkpoint.tensors.step_slots import StepMemory, Verdict
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import DataError, UsageError
from kempner.run.record.attempts import SupersededError
from kempner.run.record.events import CheckpointFailed, Resumed, StorageWaited
from kempner.run.record.save_times import Durations


class CheckpointEngine:
    """Saves and restores a model and its optimizer below the folder of `context`.

    `keep` says which checkpoints stay. Without `background` a save is waited for at once.
    `durations` is what is known of earlier saves, `registered` what is saved beside model and
    optimizer, `memory` where steps are kept, if they are to be. Raises `UsageError`, on all ranks
    alike, if a checkpoint cannot hold the state; `check_state` does so for what appears later.
    """

    def __init__(
        self,
        context: CheckpointContext,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        keep: retention.Keep,
        background: bool = True,
        durations: Durations = Durations(),  # noqa: B008 - frozen
        registered: RegisteredObjects = NOTHING,
        memory: StepMemory | None = None,
    ) -> None:
        self._context, self._folder, self._background = context, context.folder, background
        self._restorer = StateRestorer(
            context,
            plainly_named(model),
            optimizer,
            registered,
            None if memory is None else memory.lent,
        )
        self._saver = BackgroundSaver(context, model, optimizer, registered, memory)
        self._pruner = retention.Pruner(context.folder, keep, context.fence)
        self._in_flight: RunningSave | None = None
        self._failed = SaveFailures()
        self._refusal: str | None = None
        self._superseded: SaveFailedError | None = None
        self.committed_step: int | None = None
        """Step of the newest commit of this run that this rank knows of."""
        self.durations = durations
        """How long saves take; rank 0 knows, of this attempt and those before."""
        self._saver.check(contents=False)

    def check_state(self) -> None:
        """Raise `UsageError`, on all ranks alike, if a checkpoint cannot hold the state as it is.

        To be called after the first step, since optimizers have no state before it; or else the
        first save does. What is not sharded must be the same on all ranks, bit for bit.
        """
        self._saver.check(contents=True)

    def check_registered(self) -> None:
        """Raise `UsageError`, on all ranks alike, if a program changes what is not registered.

        The save in flight is waited for. Raises as `join`.
        """
        self.join()
        self._saver.check_registered()

    def restore(self, accept: Collection[str] = ()) -> TrainState | None:
        """Load the newest checkpoint that verifies; None if the run has none.

        A damaged one is set aside, never deleted. Raises `DataError` if what there is cannot be
        used: damaged throughout, or made with another model, other data or another seed (unless
        `accept` names "data" or "seed"); `NotSharedError` on a rank that does not see what rank 0
        has chosen.
        """
        self._restorer.prepare_folder()
        if (train_state := self._load_newest(self._choose, accept)) is not None:
            self._context.record(Resumed(train_state.step))
            return train_state
        if link := self._context.broadcast_from_rank0(self._folder.latest):
            raise DataError(
                f"no checkpoint in {self._folder.path} verifies, although `latest` names step "
                f"{link}; to start over from step 0, remove that link"
            )
        return None

    def branch(self) -> list[int]:
        """The steps of the live branch that are committed, ascending; `latest` is the last one."""
        return self._context.broadcast_from_rank0(self._branch)

    def roll_back(self, to: int, accept: Collection[str] = ()) -> TrainState:
        """Load the newest checkpoint up to step `to` that verifies; `latest` names it afterwards.

        The save in flight is waited for. Where none of them verifies, the oldest later one is
        taken. Raises `DataError` if that does not verify either, and as `restore`.
        """
        self.join()
        train_state = self._load_newest(lambda: choose_to_go_back(self._branch(), to), accept)
        if train_state is None:
            raise DataError(
                f"no checkpoint in {self._folder.path} verifies, so that there is none to go back "
                "to after the loss diverged"
            )
        return train_state

    def save(self, train_state: TrainState, counted: int | None = None) -> None:
        """Start to save the state as of `train_state`; the previous save is waited for.

        `counted` is how many failed saves in a row the ranks have agreed on in their last vote.
        Where there are more by now, nothing is started: they must see this one before there is
        another. Without a vote every call starts a save. Raises as `join`, and `UsageError`, on all
        ranks alike, if a checkpoint cannot hold the state, or the last save found that out.
        """
        self.join()
        if self._refusal is not None:
            raise UsageError(self._refusal)
        # What this rank knew before it waited depends on its pace: no other rank would do the same.
        if counted is not None and self._failed.count > counted:
            return
        if not self._saver.checked:
            self.check_state()
        self._in_flight = self._saver.start(train_state)
        if not self._background:
            self.join()

    def hold(self, train_state: TrainState, verdict: Verdict) -> None:
        """Start to keep the state as of `train_state` in memory, where that was asked for.

        It outlives this process, and becomes a checkpoint should that die. `verdict` is asked, by
        the thread that copies, whether the state is worth it.
        """
        self._saver.hold(train_state, verdict)

    def release_staging(self) -> None:
        """Wait until the copy of the state is out; call it before anything writes the state."""
        self._saver.prepare()
        self._saver.settle()  # a failure is the save's, and join tells of it

    def poll(self) -> None:
        """Take note of a save that has ended; never waits."""
        self.settle(timeout=0)

    @property
    def in_flight(self) -> tuple[int, float] | None:
        """The step of the save under way and its age in seconds, or None."""
        if self._in_flight is None:
            return None
        job = self._in_flight.job
        return job.train_state.step, job.age

    def join(self) -> None:
        """Wait for the save in flight and take note of how it ended, as `settle` does.

        Raises `SupersededError`, on all ranks alike, if a newer attempt owns the run.
        """
        self.settle()
        if self._superseded is not None:
            raise SupersededError("; ".join(self._superseded.reasons.values()))

    def settle(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and take note of how it ended; a failure is counted.

        After `timeout` seconds it stays in flight: what the ranks know may differ then, and what
        they do next must not follow from it before they have voted.
        """
        if self._in_flight is None:
            return
        if wait([self._in_flight.done], timeout).not_done:
            return
        save, self._in_flight = self._in_flight, None
        error = save.done.exception()
        if error is None:
            self.committed_step = save.job.train_state.step
            self._note_recovery()
            if (took := save.done.result()) is not None:  # on rank 0, which has committed
                self.durations = self.durations.with_another(took)
                self._pruner.request()
            return
        if not isinstance(error, SaveFailedError):
            raise error
        if error.superseded:
            self._superseded = error
            return
        first, age = not self._failed.count, save.job.age
        self._failed = self._failed.with_another(time.monotonic(), age, str(error), error.passing)
        self._refusal = error.refusal
        self._report_failure(save.job, error, first)

    @property
    def failures(self) -> SaveFailures:
        """The saves that failed since the last commit; none while another one is under way."""
        return self._failed if self._in_flight is None else SaveFailures()

    @property
    def superseded(self) -> bool:
        """Whether this rank knows that a newer attempt owns the run."""
        return self._superseded is not None

    @property
    def settled_failures(self) -> int:
        """The number of saves in a row that have failed, by what is known without waiting."""
        return self.failures.count

    def close(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and, `timeout` seconds at most, for deletions."""
        self.settle()
        self._saver.close()
        self._pruner.close(timeout)

    def _load_newest(
        self, choose: Callable[[], int | None], accept: Collection[str]
    ) -> TrainState | None:
        self._saver.forget()  # or the optimizer's state would be in memory twice
        train_state = self._restorer.load_newest(choose, accept)
        if train_state is not None:
            self.committed_step = train_state.step
        return train_state

    def _branch(self) -> list[int]:
        self._pruner.settle()  # or a step that is named may be gone when it is read
        latest = self._folder.latest()
        return [s for s in self._folder.committed() if latest is None or s <= latest]

    def _choose(self) -> int | None:
        return choose(self._folder.committed(), self._folder.latest())

    def _report_failure(self, job: SaveJob, error: SaveFailedError, first: bool) -> None:
        if self._context.rank == 0:
            step = job.train_state.step
            reasons = {f"rank {rank}": why for rank, why in error.reasons.items()}
            say = logger().warning if first else logger().info  # once for all that follow
            say("checkpoint failed; the last one is intact", step=step, **reasons)
            self._context.record(CheckpointFailed(step, reasons))
            retention.discard(job.path)

    def _note_recovery(self) -> None:
        """A save has worked: tell of those before it that did not."""
        failed, self._failed = self._failed, SaveFailures()
        if failed.count and self._context.rank == 0:
            seconds = round(time.monotonic() - failed.since, 1)
            logger().warning("checkpoints can be written again", failed=failed.count, after=seconds)
            self._context.record(StorageWaited(failed.reason, seconds, failed.count + 1, rank=0))
