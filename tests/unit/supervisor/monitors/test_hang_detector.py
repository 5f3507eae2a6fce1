"""A hang is told from a slow step, and the rank that is behind is named."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from kempner.config.resilience import HangTimeouts, ResilienceSection
from kempner.probe.activity import Stillness
from kempner.run.control.protocol import Connected, Moves, Phase, Report
from kempner.supervisor.control.program_reports import LastReport
from kempner.supervisor.monitors.base import (
    DurationStats,
    Hang,
    LongWork,
    PhaseDurations,
    RankConditions,
    Snapshot,
)
from kempner.supervisor.monitors.hangs import HangDetector

SECTION = ResilienceSection(
    hang_factor=10.0,
    hang_timeout_min=60.0,
    hang_timeout_max=600.0,
    hang_timeout_at_work=3600.0,
    hang_timeout_max_of=HangTimeouts(load=900.0),
)


def seen(
    *steps: int, phase: Phase = Phase.STEP, at: float = 0.0, waiting: str = ""
) -> dict[int, LastReport]:
    return {r: LastReport(Report(s, phase, 0.0, 0.0, waiting), at) for r, s in enumerate(steps)}


def snapshot(
    places: dict[int, LastReport], now: float, clock: float, usual: PhaseDurations
) -> Snapshot:
    """Of ranks that reported last from there; `clock` is the one that dates the reports."""
    return Snapshot.of(now, 3, places, clock, usual)


def usually(**seconds: float) -> dict[Phase, DurationStats]:
    """Habits whose 95th percentiles are these."""
    return {Phase(phase): DurationStats(long / 2, long / 2, 20) for phase, long in seconds.items()}


@pytest.mark.parametrize(
    ("phase", "usual", "patience"),
    [
        (Phase.STEP, usually(step=1), 60.0),
        (Phase.STEP, usually(step=20), 200.0),
        (Phase.STEP, usually(step=100), 600.0),
        (Phase.STEP, {}, 600.0),
        (Phase.EVAL, usually(step=1), 600.0),
        (Phase.EVAL, usually(step=1, eval=30), 300.0),
        (Phase.SAVE, usually(save=0.1), 60.0),
        (Phase.LOAD, {}, 900.0),
        (Phase.LOAD, usually(load=80), 800.0),
        (Phase.LOAD, usually(load=100), 900.0),
    ],
)
def test_patience_is_learned_from_the_run(
    phase: Phase, usual: PhaseDurations, patience: float
) -> None:
    watch, places = HangDetector(SECTION, 0.0), seen(3, 3, phase=phase)
    assert not watch.check(snapshot(places, 1.0, 1.0, usual))
    assert watch.patience(usual) == (patience, phase)
    assert not watch.check(snapshot(places, patience, patience, usual))
    (hang,) = watch.check(snapshot(places, patience + 1.5, patience + 1.5, usual))
    assert f" {patience + 0.5} s, longer than the {patience} s" in hang.sentence
    assert (hang.phase, hang.still) == (phase, patience + 0.5)


def test_what_hung_a_little_longer_is_not_said_to_be_as_long() -> None:
    watch, usual = HangDetector(SECTION, 0.0), usually(step=1)
    limit, _ = watch.patience(usual)
    watch.check(snapshot({}, 0.0, 0.0, usual))
    for beyond, words in (
        (0.04, f"{limit + 0.04:.2f} s, longer than the {limit:.2f} s"),
        (7.0, f"{limit + 7:.0f} s, longer than the {limit:.0f} s"),
    ):
        (hang,) = watch.check(snapshot({}, limit + beyond, limit + beyond, usual))
        assert words in hang.sentence


def test_of_several_phases_the_one_that_may_take_longest_counts() -> None:
    watch, usual = HangDetector(SECTION, 0.0), usually(step=1, eval=30, save=20)
    places = seen(3, phase=Phase.STEP) | {1: seen(3, phase=Phase.EVAL)[0]}
    watch.check(snapshot(places | {2: seen(3, phase=Phase.SAVE)[0]}, 1.0, 1.0, usual))
    assert watch.patience(usual) == (300.0, Phase.EVAL)


def test_ranks_that_slurm_cannot_start_do_not_hang() -> None:
    watch = HangDetector(SECTION, 0.0)
    for now in (1.0, 5000.0):
        assert not watch.check(
            replace(snapshot({}, now, now, {}), around=RankConditions(unstarted=True))
        )
    assert not watch.check(snapshot({}, 5600.0, 5600.0, {}))
    assert watch.check(snapshot({}, 5601.0, 5601.0, {}))


def test_ranks_that_never_report_are_a_hang_in_the_end() -> None:
    watch = HangDetector(SECTION, 0.0)
    assert not watch.check(snapshot({}, 600.0, 600.0, {}))
    (hang,) = watch.check(snapshot({}, 601.0, 601.0, {}))
    assert (hang.laggard, "none has reported" in hang.sentence) == (None, True)


def test_of_ranks_that_need_not_report_nothing_is_known() -> None:
    watch = HangDetector(SECTION, 0.0, must_report=False)
    assert not watch.check(snapshot({}, 10_000.0, 10_000.0, {}))
    assert not watch.check(snapshot(seen(1), 10_000.0, 10_000.0, {}))
    assert watch.check(snapshot(seen(1), 10_601.0, 10_601.0, {}))


def test_of_ranks_that_never_connect_nothing_is_learned() -> None:
    """Between two of their steps they may evaluate, or save."""
    usual, there = usually(step=1), {0: Connected(0, "node1", 7)}
    for joined, limit in (({}, 600.0), (there, 60.0)):
        watch = HangDetector(SECTION, 0.0, must_report=False)
        for now, hangs in ((1.0, False), (1.0 + limit, False), (1.5 + limit, True)):
            at = replace(snapshot(seen(1), now, now, usual), joined=joined)
            assert bool(watch.check(at)) is hangs


@pytest.mark.parametrize(
    ("places", "laggard"),
    [
        (seen(7, 6, 7, at=100.0), 1),
        (seen(7, 7, 7, at=100.0), None),
        (seen(6, 6, 7, at=100.0), None),
        (seen(7, 7, at=100.0) | {2: LastReport(Report(7, Phase.STEP, 0.0, 0.0), 10.0)}, 2),
        (seen(7, 6, at=100.0) | {2: LastReport(Report(7, Phase.STEP, 0.0, 0.0), 10.0)}, 2),
        # All are in the same step, and all but one wait in a collective.
        (seen(7, 7, 7, at=100.0, waiting="sum") | {1: seen(7, at=100.0)[0]}, 1),
        (seen(7, 7, 7, at=100.0, waiting="sum"), None),
        # One is still in a save, an evaluation, a phase of the start.
        (seen(7, 7, at=100.0, waiting="sum") | {2: seen(7, phase=Phase.SAVE, at=100.0)[0]}, 2),
        (seen(7, 7, at=100.0) | {2: seen(7, phase=Phase.EVAL, at=100.0)[0]}, 2),
        (
            seen(0, 0, phase=Phase.RENDEZVOUS, at=100.0)
            | {2: seen(0, phase=Phase.START, at=100.0)[0]},
            2,
        ),
    ],
)
def test_the_rank_behind_all_others_is_named(
    places: dict[int, LastReport], laggard: int | None
) -> None:
    watch, usual = (
        HangDetector(SECTION, 0.0),
        usually(step=1, save=1, eval=1, start=1, rendezvous=1),
    )
    assert not watch.check(snapshot(places, 0.0, 100.0, usual))
    (hang,) = watch.check(snapshot(places, 61.0, 101.0, usual))
    assert hang.laggard == laggard


@pytest.mark.parametrize(
    ("missing", "laggard", "words"),
    [
        ({2}, 2, "rank 2 has never connected"),
        ({1, 2}, None, "ranks 1, 2 have never connected"),
        ({0, 1, 2}, None, "none has reported yet"),
    ],
)
def test_who_never_connected_is_named(missing: set[int], laggard: int | None, words: str) -> None:
    detector = HangDetector(SECTION, 0.0)
    there = {
        r: last for r, last in seen(0, 0, 0, phase=Phase.RENDEZVOUS).items() if r not in missing
    }
    assert not detector.check(snapshot(there, 0.0, 0.0, {}))
    (hang,) = detector.check(snapshot(there, 601.0, 0.0, {}))
    assert hang.laggard == laggard
    assert words in hang.sentence


def test_a_rank_that_waits_for_storage_does_not_hang_nor_do_those_that_wait_for_it() -> None:
    """Each try of storage is a move; one that never returns is a hang like any other."""
    watch, usual = HangDetector(SECTION, 0.0), usually(step=1)

    def places(tries: int, at: float) -> dict[int, LastReport]:
        report = Report(7, Phase.STEP, 0, 0, "", "/data: Input/output error", Moves(tries))
        return seen(7, 7, at=at, waiting="the vote") | {2: LastReport(report, at)}

    for now in range(5, 1000, 5):
        assert not watch.check(snapshot(places(now // 5, now), now, now, usual))
    assert not watch.check(snapshot(places(199, 1050.0), 1050.0, 1050.0, usual))
    (hang,) = watch.check(snapshot(places(199, 1060.0), 1060.0, 1060.0, usual))
    assert hang.laggard == 2


def own(
    now: float, phase: Phase, waiting: tuple[str, ...], moves: int = 0, at: float | None = None
) -> Snapshot:
    """Of a program of the user's own after step 7: ranks that wait in these collectives."""
    at = now if at is None else at
    reports = {
        rank: LastReport(Report(7, phase, 0.0, 0.0, name, moves=Moves(stacks=moves)), at)
        for rank, name in enumerate(waiting)
    }
    there = {rank: Connected(rank, "node1", 7) for rank in reports}
    return Snapshot.of(now, len(reports), reports, now, usually(step=1), joined=there)


def lasts(phase: Phase, waiting: tuple[str, ...], moving: bool, step: int = 7) -> float:
    """Seconds until a standstill of a program of the user's own is a hang, up to a month."""
    hung = {step: 60.0}
    watch, now = HangDetector(SECTION, 0.0, must_report=False, hung=hung), 0.0
    for beat in range(40_000):
        found = watch.check(own(now, phase, waiting, moves=beat * moving))
        if any(isinstance(one, Hang) for one in found):
            return now
        now += 1.0 if now < 1000 else 60.0
    return inf


BUSY, STUCK = ("", "barrier"), ("all_reduce", "barrier")


@pytest.mark.parametrize(
    ("phase", "waiting", "moving", "limit"),
    [
        (Phase.EVAL, BUSY, False, inf),
        (Phase.EVAL, STUCK, True, inf),
        (Phase.EVAL, STUCK, False, 600.0),
        (Phase.STEP, BUSY, False, 60.0),
        (Phase.STEP, BUSY, True, 3600.0),
        (Phase.STEP, STUCK, False, 60.0),
        (Phase.EXIT, BUSY, True, 3600.0),
        (Phase.EXIT, BUSY, False, 600.0),
    ],
)
def test_a_program_at_work_is_told_from_one_that_hangs_by_its_stacks(
    phase: Phase, waiting: tuple[str, ...], moving: bool, limit: float
) -> None:
    assert lasts(phase, waiting, moving, step=3) == pytest.approx(limit, abs=60.0)


def test_that_a_rank_is_at_work_is_told_at_once_and_every_five_minutes() -> None:
    watch, told = HangDetector(SECTION, 0.0, must_report=False), []
    for now in range(700):
        for found in watch.check(own(float(now), Phase.STEP, BUSY, moves=now)):
            assert isinstance(found, LongWork)
            told.append((now, found.rank, found.waiting))
    assert told == [(61, 0, 1), (361, 0, 1), (661, 0, 1)]


def test_a_silent_evaluation_is_a_hang() -> None:
    watch = HangDetector(SECTION, 0.0, must_report=False)
    assert not watch.check(own(1.0, Phase.EVAL, BUSY))
    assert not watch.check(own(600.0, Phase.EVAL, BUSY, at=1.0))
    assert watch.check(own(602.0, Phase.EVAL, BUSY, at=1.0))


def test_the_second_standstill_after_a_step_may_last_longer() -> None:
    assert lasts(Phase.STEP, BUSY, moving=False) == pytest.approx(300.0, abs=2.0)


REST, WORK = Stillness(idle=60.0, still=60.0), Stillness(works=True)


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "limit"),
    [
        (WORK, REST, 3600.0),  # in a child, in other threads, in code that holds Python's lock
        (REST, WORK, 60.0),  # rank 1 waits for others: a loader's worker is no work
        (REST, REST, 60.0),
        (Stillness(), Stillness(), 60.0),  # not known
    ],
)
def test_work_that_no_stack_shows_is_seen_from_outside(
    of_rank_0: Stillness, of_rank_1: Stillness, limit: float
) -> None:
    around = RankConditions(still={0: of_rank_0, 1: of_rank_1})
    watch = HangDetector(SECTION, 0.0, must_report=False)
    ends = (
        now
        for now in range(4000)
        for found in watch.check(replace(own(float(now), Phase.STEP, BUSY), around=around))
        if isinstance(found, Hang)
    )
    assert next(ends) == pytest.approx(limit, abs=2.0)


def test_work_before_a_rank_has_connected_is_no_hang_of_those_that_have() -> None:
    """Rank 1 prepares data for hours, and rank 0 waits for it in its rendezvous."""
    around = RankConditions(still={0: WORK, 1: WORK})
    watch = HangDetector(SECTION, 0.0, must_report=False)
    for now in range(3500):
        alone = replace(own(float(now), Phase.RENDEZVOUS, ("",)), size=2, around=around)
        assert not any(isinstance(found, Hang) for found in watch.check(alone))


def test_work_in_bursts_ends_only_at_its_own_limit_at_the_defaults() -> None:
    section = ResilienceSection()
    seen = [Stillness(works=second % 45 < 5) for second in range(300)]  # bursts of five seconds
    watch = HangDetector(section, 0.0, must_report=False)
    now = 0
    while True:
        around = RankConditions(still={0: seen[now % 300], 1: REST})
        found = watch.check(replace(own(float(now), Phase.STEP, BUSY), around=around))
        if any(isinstance(one, Hang) for one in found):
            break
        now += 1
    assert now == pytest.approx(section.hang_timeout_at_work, abs=2.0)
