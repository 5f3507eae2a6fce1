"""Runs of any attempts: the states' times are the run's time, and what is lost is the ledger's."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_run import PlantedRun

from kempner.insight.attempts import InterruptionKind
from kempner.insight.report.timeline import Category


@dataclass(frozen=True)
class AttemptPlan:
    """What happens in an attempt: in each of its `parts` a number of steps, and then a save, an
    evaluation or nothing; how it ends, and what follows. One without parts makes no step."""

    parts: Sequence[tuple[int, str]]
    end: str
    gap: str


PARTS = st.tuples(st.integers(1, 9), st.sampled_from(["", "save", "save", "evaluate"]))
PLANS = st.builds(
    AttemptPlan,
    st.one_of(st.just([]), st.lists(PARTS, min_size=1, max_size=5)),
    st.sampled_from(["fail", "hang", "stop", "stop in vain", "silent"]),
    st.sampled_from(["queue", "idle", "none"]),
)


class Story:
    """Plays plans, and knows what each of them has to come to."""

    def __init__(self, run: PlantedRun) -> None:
        self.run, self.front, self.committed = run, 0, 0
        self.lost: list[int | None] = []
        self.ready: list[bool] = []

    def play(self, plan: AttemptPlan, last: bool) -> None:
        """Of what follows the `last` one nothing can tell."""
        run = self.run
        run.step = self.committed
        if not plan.parts:
            self._never_begin(last)
            return
        self._resume()
        run.begin(warm_up=0.0)
        for steps, what in plan.parts:
            self._steps(steps)
            if what == "save":
                run.save()
                self.committed = run.step
                self._steps(1)
            elif what == "evaluate":
                run.evaluate(4.0)
                self._steps(1)
        self._end(plan, last)
        if not last:
            self._wait(plan)

    def finish(self) -> None:
        self._resume()
        self.run.step = self.committed
        self.run.begin(warm_up=0.0)
        self._steps(3)
        self.run.complete()

    def _steps(self, many: int) -> None:
        again = min(many, max(0, self.front - self.run.step))
        self.run.steps(again, "recomputed")
        self.run.steps(many - again)
        self.front = max(self.front, self.run.step)

    def _resume(self) -> None:
        """What was not known yet is known now."""
        self.lost = [self._reached - self.committed if one is None else one for one in self.lost]

    def _end(self, plan: AttemptPlan, last: bool) -> None:
        run, lost = self.run, self.run.step - self.committed
        self._reached = run.step
        self.ready.append(True)
        self.lost.append(None)
        if plan.end == "fail":
            run.fail(restart=2.0 if plan.gap == "none" and not last else None)
        elif plan.end == "hang":
            run.hang(300.0)
        elif plan.end.startswith("stop"):
            if plan.end == "stop":
                lost, self.committed = 0, run.step
            run.stop(lost=lost)
            self.lost[-1] = lost

    def _wait(self, plan: AttemptPlan) -> None:
        run = self.run
        goes_on = plan.end in ("fail", "hang") and (plan.gap == "none" or plan.end == "hang")
        if goes_on or plan.gap == "none":
            return
        if plan.gap == "queue" and plan.end != "silent":
            run.tell("requeued", step=run.step, job="7")
            run.spend("queue", 600.0)
        else:
            run.spend("idle", 90.0)

    def _never_begin(self, last: bool) -> None:
        run = self.run
        run.attempt += 1
        run.tell("attempt_started", ranks=run.ranks, nodes="n[1-2]", job="7", restarts=0)
        run.spend("start", 12.0)
        run.step = -1
        run.fail(cut_off=0.0, restart=None if last else 2.0)
        self.ready.append(False)
        self.lost.append(0)


@settings(max_examples=60)
@given(st.lists(PLANS, min_size=1, max_size=6), st.booleans())
def test_times_add_up_and_lost_steps_are_those_of_the_ledger(
    plans: Sequence[AttemptPlan], completes: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = PlantedRun(Path(folder) / "run")
        story = Story(run)
        for number, plan in enumerate(plans, 1):
            story.play(plan, last=number == len(plans) and not completes)
        if completes:
            story.finish()
        report = run.report()
    found = report.interruptions
    if not completes and plans[-1].end == "silent" and plans[-1].parts:
        story.lost = story.lost[: len(found)]  # nothing says that it has ended
    assert [one.place.steps_lost for one in found] == story.lost
    seconds = report.time.seconds
    assert sum(seconds.values()) == pytest.approx(report.time.wall, abs=1e-6)
    assert min(seconds.values()) >= 0.0
    assert {c.key: seconds[c.key] for c in Category} == pytest.approx(
        {c.key: run.planted[c.key] for c in Category}, abs=0.05
    )
    known = [one for one in found if one.kind is not InterruptionKind.STOP]
    assert len(known) + sum(plan.end.startswith("stop") for plan in plans if plan.parts) == len(
        found
    )
