"""What the ranks do with the last steps when time is short: pure choices, as tables."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kempner.checkpoint.store.commit import LONGEST_PAUSE, SaveFailures
from kempner.run.process.exit_codes import CheckpointWriteError, StopReason
from kempner.run.record.events import CheckpointCommitted
from kempner.run.record.history import RunHistory
from kempner.run.record.save_times import REMEMBERED, Durations, SaveSeconds
from kempner.training.final_save import (
    Action,
    SaveInFlight,
    SaveSituation,
    SaveTimes,
    decide_final_save,
    tell_loss,
)
from kempner.training.vote import Ballot, LoopExit, Vote, VoteResult, refuse_to_go_on_unsaved

NOW = SaveSituation(
    step=37,
    committed=30,
    in_flight=None,
    save_times=SaveTimes(usual=10.0, long=10.0),
    warned_for=1.0,
    seconds_left=60.0,
    next_try=0.0,
    suspicious=False,
)
"""Seven steps since the last commit, saves take ten seconds, and a minute is left."""


@pytest.mark.parametrize(
    ("change", "action", "patience"),
    [
        ({}, Action.SAVE, None),
        ({"seconds_left": 12.0}, Action.SAVE, None),
        ({"seconds_left": 11.9}, Action.ABANDON, None),
        ({"seconds_left": -3.0}, Action.ABANDON, None),
        ({"seconds_left": None}, Action.SAVE, None),
        ({"save_times": SaveTimes(10.0, 600.0)}, Action.SAVE, None),
        ({"save_times": None, "seconds_left": 3.0}, Action.SAVE, None),
        ({"save_times": None, "seconds_left": 1.0}, Action.ABANDON, None),
        ({"committed": 37}, Action.DONE, None),
        ({"committed": 37, "seconds_left": -1.0}, Action.DONE, None),
        ({"step": 0, "committed": None}, Action.DONE, None),
        ({"committed": None}, Action.SAVE, None),
        ({"next_try": None}, Action.FAIL, None),
        ({"next_try": None, "seconds_left": 1.0}, Action.FAIL, None),
        ({"suspicious": True}, Action.DISCARD, None),
        ({"suspicious": True, "seconds_left": 1.0}, Action.DISCARD, None),
        ({"suspicious": True, "committed": 37}, Action.DONE, None),
        ({"suspicious": True, "in_flight": SaveInFlight(35, 0.0)}, Action.WAIT, 58.0),
        ({"in_flight": SaveInFlight(35, 0.0)}, Action.WAIT, 58.0),
        ({"in_flight": SaveInFlight(35, 0.0), "seconds_left": None}, Action.WAIT, None),
        ({"in_flight": SaveInFlight(37, 99.0)}, Action.WAIT, 58.0),
        ({"in_flight": SaveInFlight(37, 0.0), "next_try": None}, Action.WAIT, 58.0),
        ({"in_flight": SaveInFlight(37, 0.0), "seconds_left": 2.0}, Action.ABANDON, None),
        # Storage has refused: with a pause before each try, as long as there is time for one.
        ({"next_try": 4.0}, Action.PAUSE, 1.0),
        ({"next_try": 0.4, "seconds_left": None}, Action.PAUSE, 0.4),
        ({"next_try": 0.0}, Action.SAVE, None),
        ({"next_try": 4.0, "seconds_left": 14.0}, Action.SAVE, None),
        ({"next_try": 4.0, "seconds_left": 11.0}, Action.ABANDON, None),
    ],
)
def test_next_move(change: dict[str, object], action: Action, patience: float | None) -> None:
    move = decide_final_save(replace(NOW, **change))  # type: ignore[arg-type]
    assert (move.action, move.patience) == (action, patience)
    assert move.reason


@pytest.mark.parametrize(
    ("change", "enough"),
    [
        ({"seconds_left": 5.0}, 13.0),
        ({"seconds_left": 1.0}, 13.0),
        ({"seconds_left": 5.0, "save_times": SaveTimes(10.0, 40.0)}, 43.0),
        ({"seconds_left": 1.0, "save_times": None}, None),
        ({"seconds_left": 1.0, "in_flight": SaveInFlight(37, 4.0)}, 9.0),
        ({"seconds_left": 1.0, "in_flight": SaveInFlight(30, 4.0)}, 19.0),
        ({"seconds_left": 1.0, "in_flight": SaveInFlight(37, 14.0)}, None),
    ],
)
def test_the_warning_that_would_have_been_enough(
    change: dict[str, object], enough: float | None
) -> None:
    move = decide_final_save(replace(NOW, **change))  # type: ignore[arg-type]
    assert (move.action, move.lost, move.enough) == (Action.ABANDON, 7, enough)
    assert "the last 7 steps are lost" in tell_loss(move)
    assert ("a warning of" in tell_loss(move)) == (enough is not None)


def test_with_that_warning_the_save_is_made() -> None:
    """Who gets what `enough` names, has spent what was spent here when the ranks leave."""
    short = decide_final_save(replace(NOW, seconds_left=5.0))
    assert short.enough is not None
    left = short.enough - NOW.warned_for
    assert decide_final_save(replace(NOW, seconds_left=left)).action is Action.SAVE
    assert decide_final_save(replace(NOW, seconds_left=left - 0.1)).action is Action.ABANDON


def save(seconds: float) -> SaveSeconds:
    return SaveSeconds(stage=0.25 * seconds, write=0.5 * seconds, commit=0.25 * seconds)


@pytest.mark.parametrize(
    ("seconds", "median", "p95"),
    [
        ([], None, None),
        ([4.0], 4.0, 4.0),
        ([1.0, 9.0, 2.0], 2.0, 9.0),
        ([float(n) for n in range(1, 21)], 10.0, 19.0),
        ([100.0] * 30 + [1.0] * REMEMBERED, 1.0, 1.0),
    ],
)
def test_quantiles_are_of_the_last_saves(
    seconds: list[float], median: float | None, p95: float | None
) -> None:
    durations = Durations()
    for total in seconds:
        durations = durations.with_another(save(total))
    assert durations.quantile(0.5) == median
    assert durations.quantile(0.95) == p95
    assert len(durations.saves) <= REMEMBERED


def committed(step: int, took: SaveSeconds) -> dict[str, Any]:
    return {"event": "checkpoint_committed", **CheckpointCommitted.of(step, 0, took).to_fields()}


def test_the_ledger_gives_the_durations_back() -> None:
    events = [
        {"event": "attempt_started", "attempt": 1},
        {"event": "checkpoint_committed", "step": 5, "seconds": 3.0},
        committed(10, save(4.0)),
        {"event": "checkpoint_failed", "step": 20},
        committed(30, save(8.0)),
        {**committed(40, save(30000.0)), "suspended": True},
    ]
    assert RunHistory(events).durations == Durations((save(4.0), save(8.0)))


@pytest.mark.parametrize(
    ("votes", "result"),
    [
        ([Vote(), Vote()], VoteResult()),
        (
            [Vote(StopReason.SIGNAL, seconds_left=9.5), Vote()],
            VoteResult(StopReason.SIGNAL, seconds_left=9.5),
        ),
        (
            [Vote(StopReason.SIGNAL), Vote(StopReason.TIME_LIMIT), Vote(StopReason.PEER_STOPPED)],
            VoteResult(StopReason.TIME_LIMIT),
        ),
        ([Vote(seconds_left=90.0), Vote(seconds_left=2.0)], VoteResult(seconds_left=2.0)),
        ([Vote(seconds_left=-1.5), Vote(seconds_left=0.0)], VoteResult(seconds_left=-1.5)),
        ([Vote(failed_saves=2), Vote(void=True)], VoteResult(void=True, failed_saves=2)),
        ([Vote(void=True), Vote(void=True)], VoteResult(void=True, all_void=True)),
        ([Vote(diverged=True), Vote()], VoteResult(diverged=True)),
        ([Vote(), Vote(superseded=True)], VoteResult(superseded=True)),
        (
            [Vote(failed_saves=3, unsaved_for=1.5), Vote(save_again=True)],
            VoteResult(failed_saves=3, unsaved_for=1.5, save_again=True),
        ),
        ([Vote(unsaved_for=math.inf), Vote(unsaved_for=9.0)], VoteResult(unsaved_for=math.inf)),
        ([Vote(idle=5), Vote(idle=2)], VoteResult(idle=2)),
        (
            [Vote(), Vote(left_after=4), Vote()],
            VoteResult(parting=LoopExit(left=1, stayed=2, first=4, last=4)),
        ),
        (
            [Vote(left_after=0), Vote(left_after=3)],
            VoteResult(parting=LoopExit(left=1, stayed=None, first=0, last=3)),
        ),
    ],
)
def test_the_most_pressing_vote_counts(votes: list[Vote], result: VoteResult) -> None:
    encoded = [vote.encode(rank) for rank, vote in enumerate(votes)]
    greatest = torch.tensor(encoded).amax(0)
    assert Ballot(greatest, work=None).close() == result


class Refused:
    """Stands for the checkpoints of a run whose last save had no room."""

    failures = SaveFailures().with_another(0.0, 0.5, "no room", passing=True)


@pytest.mark.parametrize(
    ("failed", "seconds", "ends"),
    [
        (2, 1000.0, False),
        (3, 599.0, False),
        (3, 600.0, True),
        (3, math.inf, True),
        (90, 5.0, False),
    ],
)
def test_a_run_goes_on_unsaved_for_some_time(failed: int, seconds: float, ends: bool) -> None:
    agreed = VoteResult(failed_saves=failed, unsaved_for=seconds)
    with pytest.raises(CheckpointWriteError, match="no room") if ends else nullcontext():
        refuse_to_go_on_unsaved(Refused(), agreed, 3, 600.0)  # type: ignore[arg-type]


def test_saves_are_tried_again_in_seconds_not_steps() -> None:
    failures = SaveFailures()
    assert not failures.due(0.0)
    pauses = []
    for n in range(8):
        failures = failures.with_another(100.0 * n, 0.5, "no room", passing=True)
        pauses.append(failures.pause)
        assert not failures.pause or not failures.due(100.0 * n + failures.pause - 0.1)
        assert failures.due(100.0 * n + failures.pause)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, *[LONGEST_PAUSE] * 3]
    assert failures.lasting(705.0) == 705.0
    assert failures.with_another(706.0, 40.0, "slow", passing=True).pause == 40.0
    assert failures.with_another(706.0, 0.5, "a bug", passing=False).lasting(706.0) == math.inf
