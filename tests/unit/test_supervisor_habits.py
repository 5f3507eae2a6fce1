"""How long the phases of a run take: learned, kept, and known at once after a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kempner.config.resilience import ResilienceSection
from kempner.run.ledger import Ledger, read_lines
from kempner.run.messages import Phase, Report
from kempner.supervisor.habits import LEARNED, Habits, Usual, learned, longer, to_fields
from kempner.supervisor.news import Sighting
from kempner.supervisor.pace import ENOUGH, Pace
from kempner.supervisor.stillness import Hang, Stillness

START, LOAD, COMPILE, STEP, EVAL, SAVE = (
    *(Phase.START, Phase.LOAD, Phase.COMPILE),
    *(Phase.STEP, Phase.EVAL, Phase.SAVE),
)


def seen(pace: Pace, *places: tuple[float, int, Phase]) -> Pace:
    """What becomes of one rank's places: since when, after which step, doing what."""
    for at, step, phase in places:
        pace.see({0: Sighting(Report(step, phase, 0.0, 0.0), at)}, at)
    return pace


def test_a_usual_time_is_median_and_spread() -> None:
    usual = Usual.of([2.0] * 18 + [10.0] * 2)
    assert usual == Usual(median=2.0, spread=8.0, count=20)
    assert usual.long == 10.0
    assert Usual.of([]) is None


def test_each_phase_is_learned_by_itself() -> None:
    pace = seen(
        Pace(),
        (4.0, 0, Phase.RENDEZVOUS),
        (7.0, 0, LOAD),
        (9.0, 0, COMPILE),
        (29.0, 1, STEP),
        (31.0, 2, STEP),
        (33.0, 2, EVAL),
        (63.0, 2, STEP),
        (65.0, 3, STEP),
    )
    took = {phase: usual.long for phase, usual in pace.learned().items()}
    assert took == {START: 4, Phase.RENDEZVOUS: 3, LOAD: 2, COMPILE: 20, STEP: 2, EVAL: 30}


def test_what_would_mislead_is_not_learned() -> None:
    places = [(1.0, 0, LOAD), (2.0, 0, STEP), (3.0, 0, SAVE), (4.0, 0, STEP)]
    learned = seen(Pace(unlike=(LOAD,)), *places).learned()
    assert set(learned) == {START, Phase.RENDEZVOUS, COMPILE}


def test_what_is_over_before_it_is_reported_took_less_than_that() -> None:
    pace = seen(Pace(), (3.0, 0, START), (4.5, 0, COMPILE), (5.0, 7, STEP), (6.0, 9, STEP))
    took = {phase: usual.long for phase, usual in pace.learned().items()}
    assert took == {START: 4.5, Phase.RENDEZVOUS: 4.5, LOAD: 4.5, COMPILE: 0.5, STEP: 0.5}
    # A rollback loads a checkpoint, and nothing else of what a start does.
    seen(pace, (7.0, 9, LOAD), (7.2, 5, STEP))
    assert pace.learned()[LOAD].count == 2
    assert pace.learned()[COMPILE].count == 1


def test_two_visits_that_cannot_be_told_apart_are_none() -> None:
    pace = seen(Pace(), (0.0, 10, EVAL), (50.0, 20, EVAL), (52.0, 20, STEP))
    assert pace.learned()[EVAL].long == 2.0


def test_a_restart_knows_what_the_ledger_tells(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first: Habits = {STEP: Usual(1.0, 0.5, 100), EVAL: Usual(20.0, 0.0, 2)}
    for habits in ({STEP: Usual(9.0, 0.0, 1)}, first):
        Ledger(path).record(LEARNED, attempt=1, ranks=4, phases=to_fields(habits))
    assert json.loads(path.read_text().splitlines()[0])["phases"]["step"]["median"] == 9.0
    assert learned(read_lines(path), ranks=4) == first
    assert learned(read_lines(path), ranks=3) == {}  # fewer ranks take longer


def test_what_is_not_sure_yet_allows_the_longer_time() -> None:
    before = {STEP: Usual(10.0, 0.0, 100), LOAD: Usual(60.0, 0.0, 1)}
    steps = [(float(n), n, STEP) for n in range(ENOUGH + 1)]
    pace = seen(Pace(before), (-2.0, 0, LOAD), *steps[:ENOUGH])
    assert (pace.usual()[STEP].long, pace.usual()[LOAD].long) == (10.0, 60.0)
    seen(pace, steps[ENOUGH])
    assert (pace.usual()[STEP].long, pace.usual()[LOAD].long) == (1.0, 60.0)
    # The next attempt goes by this one, not by the longest ever.
    assert (pace.learned()[STEP].long, pace.learned()[LOAD].long) == (1.0, 2.0)
    assert longer(before, {}) == before


def test_a_hang_right_after_the_first_steps_need_not_wait_for_the_ceiling() -> None:
    for before in (LOAD, COMPILE):
        pace = seen(Pace(), (5.0, 0, before), (7.0, 1, STEP))
        assert pace.usual()[STEP].long == 2.0
        assert STEP not in pace.learned()
        seen(pace, (7.5, 2, STEP))
        assert pace.usual()[STEP].long == 0.5
    assert seen(Pace({STEP: Usual(9.0, 0.0, 50)}), (5.0, 0, LOAD), (7.0, 1, STEP)).usual()[
        STEP
    ] == Usual(9.0, 0.0, 50)


def test_what_was_taken_for_a_hang_gets_more_time_the_next_time() -> None:
    section = ResilienceSection(hang_floor=10.0, hang_factor=4.0, hang_ceiling=900.0)
    habits: Habits = {LOAD: Usual(20.0, 0.0, 1), STEP: Usual(5.0, 0.0, 100)}
    limits = []
    for phase in (LOAD, LOAD, STEP, STEP):
        pace, watch = Pace(habits), Stillness(section, 0.0)
        place = {0: Sighting(Report(3, phase, 0.0, 0.0), 0.0)}
        pace.see(place, 0.0)
        watch.see(place, 0.0, 0.0, pace.usual())
        hang = watch.see(place, 800.0, 800.0, pace.usual())
        limits.append(watch.patience(pace.usual())[0])
        if hang is not None:
            pace.misjudged(hang.phase, hang.still)
        habits = pace.learned()
    assert limits == [80.0, 900.0, 20.0, 20.0]


class World:
    """Ranks that go through a schedule and report once a second, each at its own moment."""

    def __init__(self, chance: Random, ranks: int) -> None:
        self._offsets = [chance.random() for _ in range(ranks)]
        self._places: list[tuple[float, int, Phase]] = []
        self._at = 0

    def enter(self, at: float, step: int, phase: Phase) -> None:
        """From that moment on all ranks are there."""
        self._places.append((at, step, phase))

    def sightings(self, now: float) -> dict[int, Sighting]:
        """What each rank has reported last."""
        return dict(enumerate(self._report(now, offset) for offset in self._offsets))

    def _report(self, now: float, offset: float) -> Sighting:
        at = (now - offset) // 1.0 + offset
        recent = self._places[-8:]
        _, step, phase = next((p for p in reversed(recent) if p[0] <= at), recent[0])
        return Sighting(Report(step, phase, 0.0, 0.0), at)


class Healthy:
    """A run whose every phase varies fivefold, on a scale of its own each."""

    def __init__(self, chance: Random) -> None:
        scales = dict.fromkeys((START, Phase.RENDEZVOUS, LOAD, COMPILE), (1.0, 60.0))
        scales |= {STEP: (0.02, 60.0), EVAL: (1.0, 300.0), SAVE: (0.05, 200.0)}
        self._chance = chance
        self._least = {
            p: low * (high / low) ** chance.random() for p, (low, high) in scales.items()
        }

    def attempt(self, steps: int) -> Iterator[tuple[float, int, Phase]]:
        """How long each phase lasts, after which step."""
        for phase in (START, Phase.RENDEZVOUS, LOAD, COMPILE):
            yield self._lasts(phase), 0, phase
        for step in range(1, steps + 1):
            yield self._lasts(STEP), step, STEP
            if step % 100 == 0:
                yield self._lasts(SAVE), step, SAVE
                yield self._lasts(EVAL), step, EVAL

    def _lasts(self, phase: Phase) -> float:
        return self._least[phase] * self._chance.uniform(1, 5)


def watched(
    section: ResilienceSection, run: Healthy, world: World, steps: int, before: Habits
) -> Hang | Pace:
    """An attempt under the eyes of a supervisor that looks about as often as it matters."""
    pace, watch, now = Pace(before), Stillness(section, 0.0), 0.0
    saves: list[float] = []
    for lasts, step, phase in run.attempt(steps):
        world.enter(now, step, phase)
        if phase is SAVE:
            saves.append(lasts)
        for look in range(1, 7):
            at = now + lasts * look / 6
            sightings = world.sightings(at)
            pace.see(sightings, at)
            took = Usual.of(saves[:-1])
            usual = pace.usual() | ({SAVE: took} if took else {})
            if hang := watch.see(sightings, at, at, usual):
                return hang
        now += lasts
    return pace


@pytest.mark.parametrize("seed", range(8))
def test_healthy_runs_raise_no_alarm_in_a_thousand_steps(seed: int) -> None:
    chance = Random(seed)
    section, run = ResilienceSection(hang_floor=5.0), Healthy(chance)  # 300 s would hide much
    habits: Habits = {}
    for steps in (1000, 200):  # the second start knows what the first one learned
        ended = watched(section, run, World(chance, 3), steps, habits)
        assert isinstance(ended, Pace), ended.sentence
        kept = {"event": LEARNED, "ranks": 3, "phases": to_fields(ended.learned())}
        habits = learned([kept], ranks=3)


def test_the_same_runs_would_raise_alarms_with_less_patience() -> None:
    hasty, alarms = ResilienceSection(hang_floor=5.0, hang_factor=1.2), 0
    for seed in range(8):
        chance = Random(seed)
        run = Healthy(chance)
        alarms += isinstance(watched(hasty, run, World(chance, 3), 500, {}), Hang)
    assert alarms > 4
