"""Saves, loads and deletions of a simulated attempt, with kempner's own commit and retention."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder, in_progress_name
from kempner.checkpoint.store import commit, retention, selection
from kempner.checkpoint.store.commit import SaveFailures
from kempner.checkpoint.store.retention import Keep
from kempner.run.process.exit_codes import DataError
from kempner.run.record.attempts import Fence, SupersededError
from kempner.run.record.events import CheckpointCommitted, Resumed
from kempner.run.record.save_times import SaveSeconds
from simulated.engine import Process, Steps
from simulated.storage import Died

if TYPE_CHECKING:
    from simulated.ranks import Ranks
    from simulated.world import World

MANY = 100
"""Checkpoints that a load may find damaged; there are always fewer."""

_NO_READERS = SimpleNamespace(are_reading=lambda step: False)


class Saves:
    """What `CheckpointEngine` is to the ranks, in simulated time."""

    def __init__(self, ranks: Ranks, world: World) -> None:
        self._ranks, self._world = ranks, world
        self._fence = Fence(world.run.attempts, ranks.attempt)
        self._folder = CheckpointFolder(world.run.checkpoints)
        self._number = 0
        self._in_flight: tuple[TrainState, float] | None = None
        self._writer: Process | None = None
        self._waiting = False
        self._extra = self._asleep = 0.0
        self._superseded: SupersededError | None = None
        self._failed = SaveFailures()
        self.committed_step: int | None = None
        self.durations = self.learned = world.history.durations
        """What the ranks know, and what the supervisor makes of it."""

    @property
    def in_flight_step(self) -> int | None:
        """The step of the save under way."""
        return None if self._in_flight is None else self._in_flight[0].step

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return 0.0 if self._in_flight is None else self._world.engine.now - self._in_flight[1]

    @property
    def failures(self) -> SaveFailures:
        """The saves that failed since the last commit; none while another one is under way."""
        return self._failed if self._in_flight is None else SaveFailures()

    def delay(self, seconds: float) -> None:
        """What is being written takes longer."""
        self._extra += seconds

    def poll(self) -> None:
        """Raises `SupersededError` if a newer attempt owns the run."""
        if self._superseded is not None:
            raise self._superseded

    def begin(self) -> Steps:
        """Save the state as it is, once the save before is over."""
        failures = self._failed.count
        yield from self.join()
        if self._failed.count > failures:
            return
        self._in_flight = self._ranks.train_state, self._world.engine.now
        self._asleep = self._world.asleep(self._ranks)
        self._writer = Process(self._world.engine, self._ranks.life, self._write())

    def join(self, patience: float | None = None) -> Steps:
        """Wait for the save in flight, `patience` seconds at most."""
        until = None if patience is None else self._world.engine.now + patience
        while self._in_flight is not None:
            left = None if until is None else until - self._world.engine.now
            if left is not None and left <= 1e-6:
                return
            self._waiting = True
            yield left
            self._waiting = False
            yield from self._ranks.work(0.0)
        self.poll()

    def restore(self) -> TrainState | None:
        """The state of the newest checkpoint that is not damaged; None at the first start."""
        self._world.act_as(self._ranks.attempt.number)
        if not self._folder.path.exists():
            self._folder.path.mkdir(parents=True)
        retention.sweep(self._folder, self._ranks.attempt.number)
        train_state = self._load(lambda: selection.head(self._folder))
        if train_state is None and self._folder.latest() is not None:
            raise DataError("no checkpoint verifies")
        self._world.oracle.restored(None if train_state is None else train_state.step)
        if train_state is not None:
            self._world.record(Resumed(train_state.step))
        return train_state

    def branch(self) -> list[int]:
        """The committed steps of the live branch, ascending."""
        tip = selection.head(self._folder)
        return [s for s in self._folder.committed() if tip is None or s <= tip]

    def load_up_to(self, to: int) -> TrainState | None:
        """Go back to the newest checkpoint up to `to` that is not damaged."""
        self._world.oracle.going_back(self._ranks.attempt.number, to)
        self._world.act_as(self._ranks.attempt.number)
        return self._load(lambda: selection.choose_to_go_back(self.branch(), to))

    def _load(self, choose) -> TrainState | None:  # type: ignore[no-untyped-def]
        tried = 0
        while (step := choose()) is not None:
            tried += 1
            self._world.oracle.looked(tried, MANY)
            manifest = (self._folder.step(step) / MANIFEST).read_bytes()
            if self._world.is_damaged(manifest):
                self._folder.set_aside(step, "damaged", self._ranks.attempt.number)
                continue
            self.committed_step = step
            commit.go_on_from(self._folder, step, self._fence, lambda sentence: None)
            return manifest.train_state
        return None

    def _write(self) -> Steps:
        assert self._in_flight is not None
        (train_state, started), setting = self._in_flight, self._world.setting
        failing, slow = self._world.take_save_faults()
        yield from self._phase("stage", setting.stage)
        staged = self._world.engine.now
        yield from self._phase("write", setting.write * slow)
        while self._extra:
            seconds, self._extra = self._extra, 0.0
            yield seconds
        yield from self._phase("commit", 0.0)
        written = self._world.engine.now
        try:
            failing = failing or self._world.engine.now < self._world.full_until
            if failing:
                raise OSError("no space left on device")
            self._commit(train_state)
        except SupersededError as error:
            self._superseded = error
            if (job := self._world.job_of(self._ranks)) is not None:
                self._world.oracle.superseded(job.id)
        except OSError as error:
            now, age = self._world.engine.now, self.age
            self._failed = self._failed.with_another(now, age, "no space", passing=True)
            if failing:
                self._world.oracle.save_failed()
            else:
                self._world.oracle.save_refused(self._ranks.attempt.number, str(error))
        except Died:
            self._ranks.die(0)
            return
        else:
            self._committed(train_state, SaveSeconds(staged - started, written - staged, 0.0))
        self._in_flight = None
        if self._waiting:
            self._ranks.main.wake()

    def _phase(self, name: str, seconds: float) -> Steps:
        if (fault := self._world.take_trap(name)) is not None:
            self._world.maybe_inject(self._ranks, fault)
        if seconds:
            yield seconds
        # A file of a rank that is gone or stopped is never written; only rank 0 does what follows.
        while self._ranks.stopped or (name != "commit" and self._ranks.gone - self._ranks.cut):
            yield 1.0

    def _commit(self, train_state: TrainState) -> None:
        self._world.act_as(self._ranks.attempt.number, committing=True)
        self._number += 1
        attempt = self._ranks.attempt
        name = in_progress_name(train_state.step, attempt.number, f"{self._number:08x}")
        written = self._folder.path / name
        try:
            written.mkdir()
            manifest = self._world.manifest(train_state, attempt.number)
            commit.commit(self._folder, written, manifest, self._fence, lambda sentence: None)
        except OSError:
            if written.exists():
                written.remove()
            raise
        finally:
            self._world.act_as(attempt.number)

    def _committed(self, train_state: TrainState, took: SaveSeconds) -> None:
        self.committed_step, self._failed = train_state.step, SaveFailures()
        self.durations = self.durations.with_another(took)
        slept = self._world.asleep(self._ranks) > self._asleep
        if not slept:
            self.learned = self.learned.with_another(took)
        event = CheckpointCommitted.of(train_state.step, 0, took)
        self._world.record(replace(event, suspended=slept))
        checkpoint = self._world.config.checkpoint
        try:
            retention.prune(
                self._folder,
                Keep(checkpoint.keep_last, checkpoint.keep_every),
                _NO_READERS,  # type: ignore[arg-type]
                self._fence.check,
            )
        except SupersededError:
            return
