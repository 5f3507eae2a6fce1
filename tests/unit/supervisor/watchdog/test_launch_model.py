"""In no order of steps, deaths and messages is a job put back twice, brought back to life or
stranded; and the model that says so finds each of the mistakes that could be made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launch_model import Rules, World, explore

from kempner.cluster.slurm.job import JobState
from kempner.cluster.slurm.scontrol import RequeueDecision
from kempner.supervisor.watchdog.board import SupervisorStage
from kempner.supervisor.watchdog.watch import Act, Sight, decide_for_supervisor, next_act


def test_no_order_breaks_a_promise() -> None:
    states, broken = explore(Rules())
    assert states > 5000
    assert broken == {}


def test_with_three_faults_and_two_lost_answers_none_does() -> None:
    states, broken = explore(Rules(), World(faults=3, losses=2))
    assert states > 10000
    assert broken == {}


def _alive(sight: Sight) -> Sight:
    """As if a supervisor that lives always worked."""
    return replace(sight, left=1000.0) if sight.status is None else sight


def _never_settled(sight: Sight) -> Sight:
    return replace(
        sight, stage=max(SupervisorStage.FOLLOWS, min(sight.stage, SupervisorStage.FOLLOWS))
    )


def _started_by_now(sight: Sight) -> Sight:
    return replace(sight, stage=max(SupervisorStage.FOLLOWS, sight.stage))


def _patient_to_the_end(sight: Sight) -> Act:
    act = next_act(sight)
    return Act.ASK_FOR_RANKS if act is Act.REQUEUE and sight.ranks is not False else act


def _running_or_not(sight: Sight, restarts: int, job: JobState) -> RequeueDecision:
    return decide_for_supervisor(sight, restarts, replace(job, state="RUNNING"))


def _any_launch(sight: Sight, restarts: int, job: JobState) -> RequeueDecision:
    return decide_for_supervisor(sight, job.restarts, job)


MISTAKES = {
    "a supervisor that hangs is left to itself": Rules(act=lambda sight: next_act(_alive(sight))),
    "ranks are waited for to the end": Rules(act=_patient_to_the_end),
    "what is settled is not looked at": Rules(
        act=lambda sight: next_act(_never_settled(sight)),
        decide=lambda sight, *rest: decide_for_supervisor(_never_settled(sight), *rest),
    ),
    "one that refuses to start is started again": Rules(
        act=lambda sight: next_act(_started_by_now(sight))
    ),
    "a job that was cancelled is put back": Rules(decide=_running_or_not),
    "a later launch is put back": Rules(decide=_any_launch),
    "the job is not looked at directly before": Rules(looks_directly=False),
    "whether it went back is not looked at": Rules(checks_after=False),
    "what Slurm does not say is taken for no": Rules(unknown_is_gone=True),
    "the keeper leaves with its supervisor": Rules(keeper_waits=False),
    "a watchdog that died is not replaced": Rules(keeper_starts_again=False),
    "a watchdog that was stopped is not woken": Rules(keeper_wakes=False),
    "completion is not settled": Rules(settles_completion=False),
    "a requeue is settled before it is made": Rules(settles_after_requeue=False),
    "ranks do not look": Rules(ranks_look=False),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_planted_mistake_is_found(mistake: str) -> None:
    _, broken = explore(MISTAKES[mistake])
    assert broken
