"""The status of a real run agrees, at each stage, with what is done to it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from harness import KEMPNER, Job, Run, rank_processes, wait_until
from patience import scaled

from kempner.insight.attempts import InterruptionKind
from kempner.insight.status.activity import Activity
from kempner.insight.status.job import JobWatch
from kempner.insight.status.runs import RunFollower
from kempner.insight.status.summary import Status

ON_THE_WAY = {Activity.HEALTH_CHECK, Activity.STARTING, Activity.LOADING}


class Onlooker:
    """Looks at a run all the time, and remembers what it saw it do, one after the other."""

    def __init__(self, run: Run) -> None:
        self._follower = RunFollower(run.record, JobWatch(None, wait=True), patient=False)
        self.seen: list[Activity] = []

    def look(self) -> Status:
        status = self._follower.read()
        if self.seen[-1:] != [status.doing.activity]:
            self.seen.append(status.doing.activity)
        return status

    def wait(self, job: Job | None, activity: Activity, attempt: int) -> Status:
        """Look until the run does that, in this attempt."""

        def there() -> Status | None:
            status = self.look()
            now = status.attempt is not None and status.attempt.number == attempt
            return status if now and status.doing.activity is activity else None

        found: Status = wait_until(there, f"{activity} in attempt {attempt}", job=job)
        return found


def test_status_follows_a_run_through_all_that_happens_to_it(run: Run) -> None:
    job = run.supervise(2, "--train.max_steps=100000")
    onlooker = Onlooker(run)
    status = onlooker.wait(job, Activity.TRAINING, attempt=1)
    assert set(onlooker.seen) <= {Activity.NOT_STARTED, *ON_THE_WAY, Activity.TRAINING}
    assert (status.facts.live.alive, status.ends, status.progress.total) == (True, (), 100000)
    assert status.attempt is not None
    assert status.attempt.ranks == 2
    run.reach(12, job)
    # A commit is a folder before it is the newest checkpoint.
    wait_until(lambda: onlooker.look().facts.checkpoint, "a checkpoint", job=job)
    status = onlooker.look()
    assert status.progress.step is not None
    assert 12 <= status.progress.step <= max(run.steps())
    assert status.facts.checkpoint is not None
    assert status.facts.checkpoint.step in run.committed()
    there = lambda: sorted(rank for group in onlooker.look().ranks.groups for rank in group.ranks)  # noqa: E731
    wait_until(lambda: there() == [0, 1], "where the ranks are", job=job)

    del onlooker.seen[:]
    rank_processes(job)[1].kill()
    status = onlooker.wait(job, Activity.TRAINING, attempt=2)
    (end,) = status.ends
    assert (end.attempt, end.kind, end.rank) == (1, InterruptionKind.FAILURE, 1)
    assert end.cause == "rank 1 was killed by SIGKILL"
    (ended,) = run.events("attempt_ended")
    assert end.time == ended["time"]
    between = set(onlooker.seen) - {Activity.TRAINING, Activity.SAVING, Activity.EVALUATING}
    assert between <= {Activity.RESTARTING, *ON_THE_WAY}
    assert between & ON_THE_WAY
    told = as_json(run)
    assert (told["state"], told["attempt"]["number"], told["alive"]) in (
        ("training", 2, True),
        ("saving", 2, True),
    )
    assert [one["cause"] for one in told["interruptions"]] == [end.cause]

    del onlooker.seen[:]
    job.signal()
    assert job.wait() == 75
    status = onlooker.look()
    (stopped,) = run.events("stopped")
    assert status.doing.activity is Activity.STOPPED
    assert (status.doing.reason, status.progress.step) == ("signal", stopped["step"])
    assert status.facts.checkpoint is not None
    assert status.facts.checkpoint.step == stopped["step"]
    assert status.ranks.groups == ()
    assert set(onlooker.seen) <= {Activity.STOPPING, Activity.STOPPED}

    last = stopped["step"] + 10
    run.complete(2, f"--train.max_steps={last}")
    status = onlooker.look()
    assert status.state == "completed"
    assert (status.progress.step, status.progress.total) == (last, last)
    assert [one.kind for one in status.ends] == [InterruptionKind.FAILURE, InterruptionKind.STOP]
    assert as_json(run)["state"] == "completed"


def as_json(run: Run) -> dict[str, Any]:
    """What the command says, from another process."""
    command = [*KEMPNER, "status", str(run.record.path), "--json"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=scaled(60))
    (told,) = json.loads(done.stdout)
    found: dict[str, Any] = told
    return found
