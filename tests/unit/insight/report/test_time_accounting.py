"""Each category of a run's wall time against what was planted, and the sum against the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from planted_run import BEGIN, PlantedRun

from kempner.insight.attempts import InterruptionKind
from kempner.insight.report.page.document import decimate
from kempner.insight.report.series import collect
from kempner.insight.report.summary import read_run
from kempner.insight.report.timeline import Category, Pieces, overlaps
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.lease import Lease
from kempner.run.record.run_dir import RunDirectory


def quiet(run: PlantedRun) -> None:
    run.begin()
    run.steps(10)
    run.complete()


def saves_and_evaluations(run: PlantedRun) -> None:
    run.begin()
    for _ in range(5):
        run.steps(10)
        run.save(0.5)
        run.steps(3)
        run.evaluate(4.0)
    run.steps(2)
    run.complete()


def evaluation_at_the_end(run: PlantedRun) -> None:
    run.begin()
    run.steps(10)
    run.evaluate(4.0)
    run.complete()


def killed_rank(run: PlantedRun) -> None:
    run.train_and_save(beyond=7)
    run.fail()
    run.go_on_from(20, again=7)
    run.steps(20)
    run.complete()


def killed_twice_before_the_front(run: PlantedRun) -> None:
    run.train_and_save(beyond=9)
    run.fail()
    run.go_on_from(20, again=4)
    run.fail()
    run.go_on_from(20, again=9)
    run.steps(5)
    run.complete()


def hang(run: PlantedRun) -> None:
    run.train_and_save(beyond=5)
    run.hang(300.0)
    run.go_on_from(20, again=5)
    run.steps(5)
    run.complete()


def lost_node_noticed_late(run: PlantedRun) -> None:
    """Nothing comes for long, and then the ranks are given up."""
    run.train_and_save(beyond=1)
    run.spend("hung", 58.0)
    run.fail(cut_off=2.0)
    run.go_on_from(20, again=1)
    run.steps(5)
    run.complete()


def time_limit_and_queue(run: PlantedRun) -> None:
    run.begin()
    run.steps(20)
    run.stop()
    run.spend("stop", 1.0)
    run.tell("requeued", step=20, job="7")
    run.spend("queue", 3600.0)
    run.begin()
    run.steps(20)
    run.complete()


def supervisors_that_take_their_time(run: PlantedRun) -> None:
    """The queue ends with the batch script; a restart by the same supervisor begins with itself."""
    run.begin(supervisor=4.0)
    run.steps(20)
    run.save()
    run.steps(7)
    run.fail()
    run.go_on_from(20, again=7)
    run.steps(13)
    run.stop()
    run.tell("requeued", step=40, job="7")
    run.spend("queue", 600.0)
    run.begin(supervisor=7.0)
    run.steps(20)
    run.complete()


def stopped_and_started_by_hand(run: PlantedRun) -> None:
    run.begin()
    run.steps(20)
    run.stop("interrupt")
    run.spend("idle", 900.0)
    run.begin()
    run.steps(20)
    run.stop("interrupt")
    run.begin(supervisor=4.0)  # in the same instant
    run.steps(20)
    run.complete()


def slow_storage(run: PlantedRun) -> None:
    """A wait counts as far as training waits: a file that a save retries holds no step up."""
    run.begin()
    run.steps(10)
    run.spend("storage", 40.0)
    wait = {"what": "data: I/O error", "tries": 9}
    run.tell("storage_waited", seconds=40.0, rank=2, **wait)
    run.steps(10)
    run.tell("storage_waited", seconds=15.0, rank=0, **wait)
    run.steps(10)
    run.complete()


def storage_under_a_save(run: PlantedRun) -> None:
    """Saves hold training up for as long as storage stalls; slow ones are saves."""
    run.begin()
    for _ in range(3):
        run.steps(10)
        run.save(0.5)
    run.steps(10)
    run.stalled_save(steps=4, stalled=60.0)
    run.save(0.5)
    run.steps(10)
    run.save(4.0)
    run.steps(10)
    run.complete()


def storage_at_the_start(run: PlantedRun) -> None:
    run.attempt = 1
    run.tell("attempt_started", ranks=4)
    run.spend("start", 10.0)
    run.spend("storage", 30.0)
    run.tell("storage_waited", seconds=30.0, tries=3, what="away", rank=0)
    run.spend("load", 2.0)
    run.tell("ready_to_train", step=0, device="cpu", reached={"load": 10.0, "compile": 12.0})
    run.steps(10)
    run.complete()


def unexplained(run: PlantedRun) -> None:
    """Something stood still, and no record says why."""
    run.begin()
    run.steps(10)
    run.spend("unaccounted", 500.0)
    run.steps(10)
    run.complete()


def logged_now_and_then(run: PlantedRun) -> None:
    """Of ten steps one is logged; the ledger says which one the rank died in."""
    run.begin(warm_up=0.0)
    run.steps(20, log_every=10)
    run.save(0.0)
    run.steps(16, log_every=10)
    run.fail()
    run.step = 20
    run.begin(warm_up=0.0)
    run.steps(16, "recomputed", log_every=10)
    run.steps(24, log_every=10)
    run.complete()


def never_ready(run: PlantedRun) -> None:
    """The ranks fail before the first step."""
    run.attempt = 1
    run.tell("attempt_started", ranks=4)
    run.spend("start", 30.0)
    run.fail(cut_off=0.0)
    run.begin()
    run.steps(5)
    run.complete()


STORIES = [
    quiet,
    saves_and_evaluations,
    evaluation_at_the_end,
    killed_rank,
    killed_twice_before_the_front,
    hang,
    lost_node_noticed_late,
    time_limit_and_queue,
    supervisors_that_take_their_time,
    stopped_and_started_by_hand,
    slow_storage,
    storage_under_a_save,
    storage_at_the_start,
    unexplained,
    logged_now_and_then,
    never_ready,
]


@pytest.mark.parametrize("story", STORIES)
def test_every_category_is_what_was_planted(
    tmp_path: Path, story: Callable[[PlantedRun], None]
) -> None:
    run = PlantedRun(tmp_path / "run")
    story(run)
    found = run.report()
    assert found.time.wall == pytest.approx(run.now - BEGIN, abs=0.01)
    for category in Category:
        planted = run.planted[category.key]
        assert found.time.seconds[category.key] == pytest.approx(planted, abs=0.02), category.key
    assert sum(found.time.seconds.values()) == pytest.approx(found.time.wall, abs=1e-6)
    held = found.time.wall - run.planted["queue"] - run.planted["idle"]
    assert found.time.goodput == pytest.approx(run.planted["train"] / found.time.wall, abs=1e-3)
    assert found.time.while_held == pytest.approx(run.planted["train"] / held, abs=1e-3)
    assert sum(found.time.gpu_hours.values()) == pytest.approx(held * run.ranks / 3600, rel=1e-3)


def test_what_an_interruption_cost(tmp_path: Path) -> None:
    run = PlantedRun(tmp_path / "run")
    killed_rank(run)
    [one] = run.report().interruptions
    assert (one.kind, one.place.rank, one.place.node, one.attempt) == (
        InterruptionKind.FAILURE,
        3,
        "n2",
        1,
    )
    assert (one.place.step, one.place.steps_lost) == (27, 7)
    assert one.cost.made_again_seconds == pytest.approx(7 * 2.0 + 0.7, abs=0.01)
    assert one.cost.restart_seconds == pytest.approx(2 + 20 + 5 + 3, abs=0.01)
    assert one.cost.stop_seconds == pytest.approx(1.5, abs=0.01)
    seconds = one.cost.made_again_seconds + one.cost.restart_seconds + one.cost.stop_seconds
    assert one.cost.gpu_hours == pytest.approx(4 * seconds / 3600)


def test_a_stop_is_no_failure_and_the_queue_costs_nothing(tmp_path: Path) -> None:
    run = PlantedRun(tmp_path / "run")
    time_limit_and_queue(run)
    report = run.report()
    [one] = report.interruptions
    assert (one.kind, one.cause, one.place.steps_lost) == (
        InterruptionKind.STOP,
        "stopped: time limit",
        0,
    )
    assert one.cost.away_seconds == pytest.approx(3600)
    assert one.cost.gpu_hours == pytest.approx(4 * (7 + 20 + 5 + 3) / 3600, rel=1e-3)
    assert report.saves.window_seconds == 90.0


def test_advice_follows_from_what_was_measured(tmp_path: Path) -> None:
    """Young: sqrt(2 x 0.5 s x time between failures), in steps of 90 s."""
    run = PlantedRun(tmp_path / "run", step_takes=90.0)
    killed_rank(run)
    report = run.report()
    held = report.time.wall
    steps = round((2 * 0.5 * held) ** 0.5 / 90.0)
    assert any(f"every {steps:,} steps" in advice.what for advice in report.advice)
    needed = report.saves.needed_seconds
    assert needed == np.ceil(2 * 1.6 + 2 * 90.0 + 15)
    calm = PlantedRun(tmp_path / "calm")
    quiet(calm)
    assert calm.report().advice == []


def test_a_few_minutes_say_nothing_about_how_often_to_save(tmp_path: Path) -> None:
    run = PlantedRun(tmp_path / "run")
    killed_rank(run)
    [warning] = run.report().advice
    assert "before the end of the job is enough" in warning.what
    for event in run.ledger:
        event.pop("job", None)
    assert run.report().advice == []  # no Slurm, and so no warning before a job's end


def test_an_attempt_that_never_resumed_loses_nothing(tmp_path: Path) -> None:
    """Stopped after step 46, preempted again while it started, resumed at 46; then a real loss."""
    run = PlantedRun(tmp_path / "run")
    run.begin()
    run.steps(46)
    run.stop("preemption")
    run.attempt += 1
    run.tell("attempt_started", ranks=4, job="7", restarts=1)
    run.spend("start", 12.0)
    run.tell("stop_requested", reason="preemption", sentence="", seconds_left=30.0)
    run.tell("attempt_ended", code=75, reason="stopped", culprit=None, exits={}, seconds=0.1)
    run.begin()
    run.steps(4)
    run.save()
    run.steps(3)
    run.fail()
    run.attempt += 1
    run.tell("attempt_started", ranks=4, job="7", restarts=1)
    run.spend("start", 12.0)
    run.fail(cut_off=0.0)
    run.go_on_from(50, again=3)
    run.complete()
    found = run.report().interruptions
    assert [one.place.steps_lost for one in found] == [0, 0, 3, 0]
    again = [one.cost.made_again_seconds for one in found]
    assert again == pytest.approx([0, 0, 3 * 2.0 + 0.7, 0], abs=0.01)


def test_a_run_that_goes_on_is_told_up_to_now(tmp_path: Path) -> None:
    run = PlantedRun(tmp_path / "run")
    run.begin()
    run.steps(10)
    lease = Lease.acquire(run.write(), 45.0)
    report = run.report()
    assert (report.training.state, report.interruptions) == ("in progress", [])
    assert report.time.seconds["train"] == pytest.approx(20, abs=0.01)
    lease.release()
    report = run.report()
    assert report.training.state == "ended without a message"
    assert [one.kind for one in report.interruptions] == [InterruptionKind.SILENT]


def test_lines_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    run = PlantedRun(tmp_path / "run")
    quiet(run)
    before = run.report().time.seconds
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3\n[]\n"x"\n\xff\xfe\n{"step": true, "loss": 1, "time": 2}\n')
        file.write(b'{"step": 1' + b"0" * 400 + b', "loss": 1, "time": 2}\n')
        file.write(b'{"step": 1e999, "loss": 1, "time": 2}\n{"step": NaN, "loss": 1, "time": 2}\n')
        file.write(json.dumps({"step": None, "loss": "x", "time": []}).encode())
    with (run.path / "ledger.jsonl").open("a") as file:
        file.write('{"event": "nonsense", "time": 1e12, "attempt": 1}\n{"event"\n')
    assert read_run(RunDirectory(run.path)).report.time.seconds == before


def test_no_run_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run"):
        read_run(RunDirectory(tmp_path))
    (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(UsageError, match="not been started"):
        read_run(RunDirectory(tmp_path))


def test_a_plot_keeps_the_lowest_and_the_highest_of_each_stretch() -> None:
    rng = np.random.default_rng(0)
    x, y = np.arange(100_000.0), rng.normal(size=100_000)
    y[[777, 50_001]] = 99.0, -99.0
    y[5] = np.nan
    few, values = decimate(x, y, buckets=100)
    assert len(few) <= 200
    assert {99.0, -99.0} <= set(values)
    assert (np.diff(few) > 0).all()
    assert np.isin(values, y).all()


def test_shares_of_columns_come_to_the_whole() -> None:
    bounds = np.linspace(0.0, 10.0, 4)
    pieces = Pieces.of([(0.0, 4.0, Category.TRAIN), (4.0, 9.0, Category.HUNG)])
    shares = pieces.shares(bounds)
    assert shares.sum() == pytest.approx(9.0)
    assert shares[:, Category.TRAIN] == pytest.approx([10 / 3, 4 - 10 / 3, 0])
    assert overlaps(bounds, [(1.0, 3.0), (2.0, 5.0)]) == pytest.approx([10 / 3 - 1, 5 / 3, 0])


def test_series_of_a_step_made_twice() -> None:
    lines = [
        b'{"step": 1, "attempt": 1, "loss": 5.0, "time": 1.0}',
        b'{"step": 2, "attempt": 1, "loss": 4.0, "time": 2.0}',
        b'{"step": 2, "attempt": 2, "loss": 4.5, "time": 9.0}',
        b'{"step": 2, "attempt": 2, "eval_loss": 4.4, "eval_sets": {"code": {"loss": 1.5}}}',
    ]
    steps, held_out = collect(lines)
    last = steps.last_of_each_step()
    assert (list(last.step), list(last.loss)) == ([1, 2], [5.0, 4.5])
    assert {name: list(one.loss) for name, one in held_out.items()} == {"": [4.4], "code": [1.5]}
