"""What the ranks of an attempt do: lockstep, with a save in the background.

The order of moves is that of `kempner.training.loop`; what is decided in it is decided by the real
functions. All ranks share one program, because a collective ties every step of one to the others.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

from kempner.checkpoint.format.manifest import Rollback, TrainState
from kempner.data.order.batch_slices import Slicing
from kempner.run.control.protocol import Phase
from kempner.run.process.exit_codes import DataError, DivergedError, ExitCode, RunError
from kempner.run.record.attempts import Attempt
from kempner.run.record.events import RolledBack, StartedAnew
from kempner.training import anomalies, final_save, loop
from kempner.training import vote as last_votes
from kempner.training.anomalies import Health, Numbers, remembered
from kempner.training.final_save import Action, SaveInFlight, SaveSituation, SaveTimes
from simulated.crew import Crew, Hear
from simulated.engine import Process, Steps
from simulated.saves import Saves

if TYPE_CHECKING:
    from simulated.world import World

BATCHES = 10
"""Of an evaluation; after each there is a vote."""

EXIT = 0.5
"""Seconds for the processes to go."""


class Ranks(Crew):
    """One attempt."""

    def __init__(self, world: World, attempt: Attempt, hosts: list[int], hear: Hear) -> None:
        super().__init__(world, attempt, hosts, hear)
        self.health = Health()
        self.save_postponed = False
        self.saves = Saves(self, world)
        self._slices = Slicing(1, 1, 0, 1)
        self.main = Process(world.engine, self.life, self._live())

    def delay_saves(self, seconds: float) -> None:
        """What is being written takes longer."""
        self.saves.delay(seconds)

    def _live(self) -> Steps:
        setting = self.world.setting
        try:
            yield from self.enter(Phase.START)
            yield from self.work(setting.start)
            yield from self.enter(Phase.LOAD)
            yield from self.work(setting.load)
            self._resume()
            yield from self.enter(Phase.STEP)
            yield from self._train()
            code, sentence = yield from self._leave()
        except RunError as error:
            code, sentence = error.code, str(error)
        yield from self.enter(Phase.EXIT)
        yield from self.work(EXIT)
        for rank in self.living():
            self.end(rank, code, sentence)

    def _resume(self) -> None:
        train_state = self.saves.restore()
        if train_state is None:
            self.world.record(StartedAnew())
            train_state = TrainState()
        later = [r for r in remembered(self.world.history) if r not in train_state.rollbacks]
        self.train_state = replace(train_state, rollbacks=(*train_state.rollbacks, *later))
        self.health = Health(self.train_state.losses)
        self._skip()

    def _train(self) -> Steps:
        setting, config = self.world.setting, self.world.config
        while self.train_state.step < setting.max_steps or not self.health.sound:
            stop = self.asked_at is not None
            self.saves.poll()
            failures, now = self.saves.failures, self.world.engine.now
            unsaved, again = failures.lasting(now), failures.due(now)
            at_the_end = self.train_state.step == setting.max_steps
            diverged = self.health.trouble is not None or (at_the_end and not self.health.sound)
            yield from self.work(setting.step * self.world.slowness())
            if diverged and stop:
                return
            if diverged:
                yield from self._roll_back()
                continue
            self._make_step()
            verdict = SimpleNamespace(
                stop=stop,
                failed_saves=failures.count,
                unsaved_for=unsaved,
                save_again=again,
                superseded=False,
            )
            if loop.save_is_due(self._as_loop(), verdict):
                self.save_postponed = not self.health.sound
                if self.health.sound:
                    yield from self.enter(Phase.SAVE)
                    yield from self.saves.begin()
                    yield from self.work(setting.stall)
                    yield from self.enter(Phase.STEP)
            if self.train_state.step % setting.eval_interval == 0 and not stop:
                yield from self.enter(Phase.EVAL)
                for _ in range(BATCHES):
                    stop = self.asked_at is not None
                    yield from self.work(setting.evaluate / BATCHES)
                    if stop:
                        return
                yield from self.enter(Phase.STEP)
            if stop:
                return
        assert config.train.max_steps == setting.max_steps

    def _make_step(self) -> None:
        train_state = self.train_state
        step, cursor = train_state.step + 1, train_state.cursor
        train_state = replace(train_state, step=step, cursor=self._slices.next(cursor), tokens=step)
        loss = self.world.loss(step, cursor)
        self.health, _ = anomalies.observe(
            self.health, Numbers(train_state, loss, 1.0, 0.1), self.world.config.resilience
        )
        self.train_state = replace(train_state, losses=self.health.losses)
        self.world.stepped(self)

    def _roll_back(self) -> Steps:
        yield from self.saves.join()
        trouble = self.health.trouble or self.train_state
        committed = self.saves.branch()
        budget = self.world.config.resilience.max_rollbacks
        plan = anomalies.plan_rollback(committed, self.train_state.rollbacks, budget)
        if plan.to is None:
            raise DivergedError(plan.reason)
        yield from self.enter(Phase.LOAD)
        yield from self.work(self.world.setting.load)
        good = self.saves.load_up_to(plan.to)
        if good is None:
            raise DataError("none to go back to")
        rollback = Rollback(trouble.step, good.step, start=good.cursor, end=trouble.cursor)
        self.train_state = replace(good, rollbacks=(*self.train_state.rollbacks, rollback))
        self.health, self.save_postponed = Health(good.losses), False
        self._skip()
        self.world.record(RolledBack(**vars(rollback)))
        self.world.oracle.went_back(self.attempt.number, trouble.step)
        yield from self.enter(Phase.STEP)

    def _leave(self) -> Steps:  # type: ignore[misc]  # a generator with a result
        yield from self.enter(Phase.SAVE)
        stopping, tries, clock = self.asked_at is not None, last_votes.LAST_TRIES, self.world.engine
        while True:
            self.saves.poll()
            move = final_save.decide_final_save(
                SaveSituation(
                    step=self.train_state.step,
                    committed=self.saves.committed_step,
                    in_flight=self._save_in_flight(),
                    save_times=self._save_times(),
                    warned_for=0.0 if self.asked_at is None else clock.now - self.asked_at,
                    seconds_left=self._seconds_left(),
                    next_try=self._next_try(tries),
                    suspicious=not self.health.sound,
                )
            )
            if move.action is Action.WAIT:
                yield from self.saves.join(move.patience)
            elif move.action is Action.PAUSE:
                yield from self.work(move.patience or 0.0)
            elif move.action is Action.SAVE:
                tries -= 1
                yield from self.saves.begin()
            else:
                break
        if move.action is Action.FAIL:
            return ExitCode.CHECKPOINT_FAILED, "the last checkpoint could not be written"
        stopped = stopping or move.lost
        if move.action is Action.ABANDON and self.saves.durations.saves:
            self.world.abandoned(self, move.lost)
        return (ExitCode.STOPPED if stopped else ExitCode.COMPLETED), ""

    def _seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - self.world.engine.now

    def _next_try(self, tries: int) -> float | None:
        now, failures = self.world.engine.now, self.saves.failures
        agreed = SimpleNamespace(
            failed_saves=failures.count,
            unsaved_for=failures.lasting(now),
            seconds_left=self._seconds_left(),
        )
        patience = self.world.config.resilience.patience
        with (
            patch.object(last_votes, "time", SimpleNamespace(monotonic=lambda: now)),
            patch.object(last_votes, "storage_waits", lambda: SimpleNamespace(patience=patience)),
        ):
            return last_votes.next_try(self._as_loop(), agreed, tries)  # type: ignore[arg-type]

    def _save_in_flight(self) -> SaveInFlight | None:
        step = self.saves.in_flight_step
        return None if step is None else SaveInFlight(step, self.saves.age)

    def _save_times(self) -> SaveTimes | None:
        usual, long = (self.saves.durations.quantile(q) for q in (0.5, 0.95))
        return None if usual is None or long is None else SaveTimes(usual, long)

    def enter(self, phase: Phase) -> Steps:
        """Go into a phase, where a fault may wait."""
        self.phase = phase
        if (fault := self.world.take_trap(phase.value)) is not None:
            self.world.maybe_inject(self, fault)
        yield from self.work(0.0)

    def work(self, seconds: float) -> Steps:
        """Do something together: it takes that long, and as long as one of them does not go on."""
        if seconds:
            yield seconds
        while self.stuck or self.gone:
            yield None

    def _as_loop(self) -> SimpleNamespace:
        """What the real loop's decisions look at."""
        return SimpleNamespace(
            config=self.world.config,
            checkpoints=self.saves,
            train_state=self.train_state,
            save_postponed=self.save_postponed,
        )

    def _skip(self) -> None:
        skips = tuple((r.start, r.end) for r in self.train_state.rollbacks)
        self._slices = replace(self._slices, skips=skips)
        cursor = self._slices.first(self.train_state.cursor)
        self.train_state = replace(self.train_state, cursor=cursor)
