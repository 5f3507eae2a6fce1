"""`CheckpointManager`: saves in the background, commits, and finds the way back.

Every method is called on every rank, in the same order. The process group of its context is used
for nothing else: the background half of a save talks on it while training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import wait

from torch import nn
from torch.optim import Optimizer

from kempner.checkpoint.format.train_state import TrainState
from kempner.checkpoint.store import retention
from kempner.checkpoint.store.selection import choose, choose_to_go_back
from kempner.checkpoint.tensors.background import BackgroundSaver, RunningSave
from kempner.checkpoint.tensors.context import CheckpointContext
from kempner.checkpoint.tensors.restore import Restorer
from kempner.checkpoint.tensors.save import SaveFailedError, SaveJob
from kempner.run.process.exit_codes import DataError
from kempner.run.process.logs import logger
from kempner.run.record.attempts import SupersededError
from kempner.run.record.events.checkpoint import CheckpointFailed, Resumed
from kempner.run.record.save_times import Durations


class CheckpointManager:
    """Saves and restores a model and its optimizer below the folder of `context`.

    `keep` says which checkpoints stay. Without `background` a save is waited for at once.
    `durations` is what is known of earlier saves.
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
    ) -> None:
        self._context, self._folder, self._background = context, context.folder, background
        self._restorer = Restorer(context, model, optimizer)
        self._saver = BackgroundSaver(context, model, optimizer)
        self._pruner = retention.Pruner(context.folder, keep, context.fence)
        self._in_flight: RunningSave | None = None
        self._failed_in_a_row = 0
        self.committed_step: int | None = None
        """Step of the newest commit of this run that this rank knows of."""
        self.durations = durations
        """How long saves take; rank 0 knows, of this attempt and those before."""

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

    def save(self, train_state: TrainState) -> None:
        """Start to save the state as of `train_state`; the previous save is waited for.

        Where that has failed, nothing is started: the ranks count failures in their next vote, and
        must see this one before there is another.
        """
        failures = self._failed_in_a_row
        self.join()
        if self._failed_in_a_row > failures:
            return
        self._in_flight = self._saver.start(train_state)
        if not self._background:
            self.join()

    def release_staging(self) -> None:
        """Wait until the copy of the state is out; call it before anything writes the state."""
        if self._in_flight is not None:
            wait([self._in_flight.job.staged])  # its failure, if any, is the save's, and join tells

    def poll(self) -> None:
        """Take note of a save that has ended; never waits."""
        if self._in_flight is not None and self._in_flight.done.done():
            self.join()

    @property
    def in_flight(self) -> tuple[int, float] | None:
        """The step of the save under way and its age in seconds, or None."""
        if self._in_flight is None:
            return None
        job = self._in_flight.job
        return job.train_state.step, job.age

    def join(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and take note of how it ended.

        After `timeout` seconds it stays in flight. A failure is logged and counted; raises
        `SupersededError` if a newer attempt owns the run.
        """
        if self._in_flight is None:
            return
        if wait([self._in_flight.done], timeout).not_done:
            return
        save, self._in_flight = self._in_flight, None
        error = save.done.exception()
        if error is None:
            self.committed_step, self._failed_in_a_row = save.job.train_state.step, 0
            if (took := save.done.result()) is not None:  # on rank 0, which has committed
                self.durations = self.durations.with_another(took)
                self._pruner.request()
            return
        if not isinstance(error, SaveFailedError):
            raise error
        if error.superseded:
            raise SupersededError("; ".join(error.reasons.values()))
        self._failed_in_a_row += 1
        self._report_failure(save.job, error)

    @property
    def settled_failures(self) -> int:
        """Saves that failed since the last commit; 0 while another one is under way."""
        return self._failed_in_a_row if self._in_flight is None else 0

    def close(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and, `timeout` seconds at most, for deletions."""
        self.join()
        self._saver.close()
        self._pruner.close(timeout)

    def _load_newest(
        self, choose: Callable[[], int | None], accept: Collection[str]
    ) -> TrainState | None:
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

    def _report_failure(self, job: SaveJob, error: SaveFailedError) -> None:
        if self._context.rank == 0:
            step = job.train_state.step
            reasons = {f"rank {rank}": why for rank, why in error.reasons.items()}
            logger().warning("checkpoint failed; the last one is intact", step=step, **reasons)
            self._context.record(CheckpointFailed(step, reasons))
            retention.discard(job.path)
