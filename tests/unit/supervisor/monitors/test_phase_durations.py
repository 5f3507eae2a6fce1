"""How long the phases of a run take: learned, kept, and known at once after a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kempner.config.resilience import ResilienceSection
from kempner.run.control.protocol import Phase, Report
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.supervisor.control.program_reports import LastReport
from kempner.supervisor.monitors.base import (
    ENOUGH,
    RECORD_EVERY,
    DurationStats,
    Hang,
    PhaseDurations,
    PhasesLearned,
    PhaseStats,
    Snapshot,
    learned,
    longer,
    to_event,
)
from kempner.supervisor.monitors.hangs import HangDetector

START, LOAD, COMPILE, STEP, EVAL, SAVE = (
    *(Phase.START, Phase.LOAD, Phase.COMPILE),
    *(Phase.STEP, Phase.EVAL, Phase.SAVE),
)


def seen(phase_stats: PhaseStats, *places: tuple[float, int, Phase]) -> PhaseStats:
    """What becomes of one rank's places: since when, after which step, doing what."""
    for at, step, phase in places:
        phase_stats.check(Snapshot(at, 1, {0: Report(step, phase, 0.0, 0.0)}))
    return phase_stats


def test_a_usual_time_is_median_and_spread() -> None:
    usual = DurationStats.of([2.0] * 18 + [10.0] * 2)
    assert usual == DurationStats(median=2.0, spread=8.0, count=20)
    assert usual.long == 10.0
    assert DurationStats.of([]) is None


def test_each_phase_is_learned_by_itself() -> None:
    phase_stats = seen(
        PhaseStats(),
        (4.0, 0, Phase.RENDEZVOUS),
        (7.0, 0, LOAD),
        (9.0, 0, COMPILE),
        (29.0, 1, STEP),
        (31.0, 2, STEP),
        (33.0, 2, EVAL),
        (63.0, 2, STEP),
        (65.0, 3, STEP),
    )
    took = {phase: usual.long for phase, usual in phase_stats.learned().items()}
    assert took == {START: 4, Phase.RENDEZVOUS: 3, LOAD: 2, COMPILE: 20, STEP: 2, EVAL: 30}


def test_what_would_mislead_is_not_learned() -> None:
    places = [(1.0, 0, LOAD), (2.0, 0, STEP), (3.0, 0, SAVE), (4.0, 0, STEP)]
    learned = seen(PhaseStats(unlike=(LOAD,)), *places).learned()
    assert set(learned) == {START, Phase.RENDEZVOUS, COMPILE}


def test_what_is_over_before_it_is_reported_took_less_than_that() -> None:
    phase_stats = seen(
        PhaseStats(), (3.0, 0, START), (4.5, 0, COMPILE), (5.0, 7, STEP), (6.0, 9, STEP)
    )
    took = {phase: usual.long for phase, usual in phase_stats.learned().items()}
    assert took == {START: 4.5, Phase.RENDEZVOUS: 4.5, LOAD: 4.5, COMPILE: 0.5, STEP: 0.5}
    # A rollback loads a checkpoint, and nothing else of what a start does.
    seen(phase_stats, (7.0, 9, LOAD), (7.2, 5, STEP))
    assert phase_stats.learned()[LOAD].count == 2
    assert phase_stats.learned()[COMPILE].count == 1


def test_two_visits_that_cannot_be_told_apart_are_none() -> None:
    phase_stats = seen(PhaseStats(), (0.0, 10, EVAL), (50.0, 20, EVAL), (52.0, 20, STEP))
    assert phase_stats.learned()[EVAL].long == 2.0


def test_a_restart_knows_what_the_ledger_tells(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first: PhaseDurations = {STEP: DurationStats(1.0, 0.5, 100), EVAL: DurationStats(20.0, 0.0, 2)}
    for phase_durations in ({STEP: DurationStats(9.0, 0.0, 1)}, first):
        Ledger(path).record(to_event(phase_durations, ranks=4), attempt=1)
    assert json.loads(path.read_text().splitlines()[0])["phases"]["step"]["median"] == 9.0
    assert learned(RunHistory.read(path), ranks=4) == first
    assert learned(RunHistory.read(path), ranks=3) == {}  # fewer ranks take longer


def test_starts_that_were_forked_do_not_hide_what_the_next_one_of_a_job_takes(
    tmp_path: Path,
) -> None:
    anew, forked = DurationStats(400.0, 0.0, 1), DurationStats(0.5, 0.0, 1)
    for start in (anew, forked, forked):
        took: PhaseDurations = {START: start, LOAD: start}
        Ledger(tmp_path / "ledger.jsonl").record(to_event(took, ranks=4), attempt=1)
    known = learned(RunHistory.read(tmp_path / "ledger.jsonl"), ranks=4)
    assert known == {START: anew, LOAD: forked}


def test_what_was_learned_is_told_every_ten_minutes_and_in_the_end() -> None:
    phase_stats, place = PhaseStats(), {0: Report(0, LOAD, 0.0, 0.0)}
    assert phase_stats.findings() == ()
    told = [at for at in range(0, 1300, 10) if phase_stats.check(Snapshot(float(at), 1, place))]
    assert told == [RECORD_EVERY + 10, 2 * (RECORD_EVERY + 10)]
    assert phase_stats.findings() == (PhasesLearned(phase_stats.learned()),)


def test_what_is_not_sure_yet_allows_the_longer_time() -> None:
    before = {STEP: DurationStats(10.0, 0.0, 100), LOAD: DurationStats(60.0, 0.0, 1)}
    steps = [(float(n), n, STEP) for n in range(ENOUGH + 1)]
    phase_stats = seen(PhaseStats(before), (-2.0, 0, LOAD), *steps[:ENOUGH])
    assert (phase_stats.usual()[STEP].long, phase_stats.usual()[LOAD].long) == (10.0, 60.0)
    seen(phase_stats, steps[ENOUGH])
    assert (phase_stats.usual()[STEP].long, phase_stats.usual()[LOAD].long) == (1.0, 60.0)
    # The next attempt goes by this one, not by the longest ever.
    assert (phase_stats.learned()[STEP].long, phase_stats.learned()[LOAD].long) == (1.0, 2.0)
    assert longer(before, {}) == before


def test_a_hang_right_after_the_first_steps_need_not_wait_for_the_ceiling() -> None:
    for before in (LOAD, COMPILE):
        phase_stats = seen(PhaseStats(), (5.0, 0, before), (7.0, 1, STEP))
        assert phase_stats.usual()[STEP].long == 2.0
        assert STEP not in phase_stats.learned()
        seen(phase_stats, (7.5, 2, STEP))
        assert phase_stats.usual()[STEP].long == 0.5
    assert seen(
        PhaseStats({STEP: DurationStats(9.0, 0.0, 50)}), (5.0, 0, LOAD), (7.0, 1, STEP)
    ).usual()[STEP] == DurationStats(9.0, 0.0, 50)


def test_what_was_taken_for_a_hang_gets_more_time_the_next_time() -> None:
    section = ResilienceSection(hang_timeout_min=10.0, hang_factor=4.0, hang_timeout_max=900.0)
    phase_durations: PhaseDurations = {
        LOAD: DurationStats(20.0, 0.0, 1),
        STEP: DurationStats(5.0, 0.0, 100),
    }
    limits = []
    for phase in (LOAD, LOAD, STEP, STEP):
        phase_stats, watch = PhaseStats(phase_durations), HangDetector(section, 0.0)
        place = {0: Report(3, phase, 0.0, 0.0)}
        phase_stats.check(Snapshot(0.0, 1, place))
        watch.check(Snapshot(0.0, 1, place, usual=phase_stats.usual()))
        hangs = watch.check(Snapshot(800.0, 1, place, usual=phase_stats.usual()))
        limits.append(watch.patience(phase_stats.usual())[0])
        for hang in hangs:
            phase_stats.note_false_hang(hang.phase, hang.still)
        phase_durations = phase_stats.learned()
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

    def last_reports(self, now: float) -> dict[int, LastReport]:
        """What each rank has reported last."""
        return dict(enumerate(self._report(now, offset) for offset in self._offsets))

    def _report(self, now: float, offset: float) -> LastReport:
        at = (now - offset) // 1.0 + offset
        recent = self._places[-8:]
        _, step, phase = next((p for p in reversed(recent) if p[0] <= at), recent[0])
        return LastReport(Report(step, phase, 0.0, 0.0), at)


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
    section: ResilienceSection, run: Healthy, world: World, steps: int, before: PhaseDurations
) -> Hang | PhaseStats:
    """An attempt under the eyes of a supervisor that looks about as often as it matters."""
    phase_stats, watch, now = PhaseStats(before), HangDetector(section, 0.0), 0.0
    saves: list[float] = []
    for lasts, step, phase in run.attempt(steps):
        world.enter(now, step, phase)
        if phase is SAVE:
            saves.append(lasts)
        for look in range(1, 7):
            at = now + lasts * look / 6
            last_reports = world.last_reports(at)
            phase_stats.check(Snapshot.of(at, 3, last_reports, at, {}))
            took = DurationStats.of(saves[:-1])
            usual = phase_stats.usual() | ({SAVE: took} if took else {})
            for hang in watch.check(Snapshot.of(at, 3, last_reports, at, usual)):
                return hang
        now += lasts
    return phase_stats


@pytest.mark.parametrize("seed", range(8))
def test_healthy_runs_raise_no_alarm_in_a_thousand_steps(seed: int) -> None:
    chance = Random(seed)
    section, run = ResilienceSection(hang_timeout_min=5.0), Healthy(chance)  # 300 s would hide much
    phase_durations: PhaseDurations = {}
    for steps in (1000, 200):  # the second start knows what the first one learned
        ended = watched(section, run, World(chance, 3), steps, phase_durations)
        assert isinstance(ended, PhaseStats), ended.sentence
        kept = to_event(ended.learned(), ranks=3)
        history = RunHistory([{"event": kept.name, **kept.to_fields()}])
        phase_durations = learned(history, ranks=3)


def test_the_same_runs_would_raise_alarms_with_less_patience() -> None:
    hasty, alarms = ResilienceSection(hang_timeout_min=5.0, hang_factor=1.2), 0
    for seed in range(8):
        chance = Random(seed)
        run = Healthy(chance)
        alarms += isinstance(watched(hasty, run, World(chance, 3), 500, {}), Hang)
    assert alarms > 4
