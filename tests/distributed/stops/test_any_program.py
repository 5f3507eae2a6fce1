"""Programs that do not import kempner, in other languages than Python, under the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from harness import KEMPNER, PYTHON, Job, wait_until
from patience import slowed

from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(120)

COUNTER = f"""
# Counts, one step after the other, until there is a file `go-on` for a step at which it stands.
step=$(cat saved-$RANK 2>/dev/null || echo 0)
trap 'echo $step > saved-$RANK; exit 0' TERM
while [ $step -lt 40 ]; do
    step=$((step + 1))
    [ $1 = prints ] && echo "step $step of 40"
    [ $1$RANK = writes0 ] && echo $step > progress
    [ $1 = beats ] && echo $step > "$KEMPNER_HEARTBEAT_FILE"
    if [ $step -eq 20 ]; then
        [ $1 = beats ] && {PYTHON} -m kempner heartbeat --step 20
        while [ ! -e go-on ]; do sleep 0.1; done
    fi
done
echo "counted from $(cat saved-$RANK 2>/dev/null || echo 0)" >> done-$RANK
"""

HANGS_SOON = (
    f"--resilience.hang_timeout_min={slowed(2)}",
    f"--resilience.hang_timeout_max={slowed(3)}",
    f"--resilience.hang_timeout_max_of.start={slowed(60)}",
)


class AnyProgram:
    """A program of a user in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.jobs = folder, list[Job]()
        (folder / "counter.sh").write_text(COUNTER)

    def supervise(self, *command: str, options: tuple[str, ...] = (), nproc: int = 1) -> Job:
        log = self.folder / f"job-{len(self.jobs)}.out"
        ours = ("--run.name=any", "--launcher=local", f"--nproc={nproc}", *options)
        with log.open("wb") as out:
            words = [*KEMPNER, "supervise", *ours, "--", *command]
            self.jobs.append(Job(warm.start(words, os.environ, out, self.folder), log))
        return self.jobs[-1]

    def events(self, *names: str) -> list[dict[str, Any]]:
        ledger = RunDirectory(self.folder / "runs" / "any").ledger
        return [event for event in read_lines(ledger) if event["event"] in names]

    def told(self, command: str) -> dict[str, Any]:
        """What `kempner status` or `kempner report` says."""
        words = [*KEMPNER, command, "runs/any", "--json"]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, check=True)
        (one,) = json.loads(done.stdout)
        assert isinstance(one, dict)
        return one


@pytest.fixture
def own(tmp_path: Path) -> Iterator[AnyProgram]:
    """Whatever it leaves running is killed."""
    own = AnyProgram(tmp_path)
    yield own
    for job in own.jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()


@pytest.mark.parametrize(
    ("how", "option"),
    [
        ("prints", "--program.progress_pattern=step ([0-9]+) of"),
        ("writes", "--program.progress_file=progress"),
        ("beats", "--program.progress_seconds=600"),
    ],
)
def test_one_that_says_how_far_it_is_is_started_again_when_it_hangs(
    own: AnyProgram, how: str, option: str
) -> None:
    job = own.supervise("bash", "counter.sh", how, options=(*HANGS_SOON, option), nproc=2)
    (hang,) = wait_until(lambda: own.events("hang"), "the hang", job=job)
    assert "step 20 (step)" in hang["reason"]
    (own.folder / "go-on").touch()
    assert job.wait() == 0, job.output()
    assert [e["step"] for e in own.events("program_advanced")] == [20, 40]
    assert len(own.events("restarting")) == 1
    told, report = own.told("status"), own.told("report")
    assert (told["state"], told["step"], report["training"]["step"]) == ("completed", 40, 40)
    assert [end["kind"] for end in told["interruptions"]] == ["hang"]
    assert report["time"]["goodput"] is None  # it is unknown when its steps began
    assert report["time"]["seconds"]["train"] == 0 < report["time"]["seconds"]["unaccounted"]
    if how == "prints":
        assert job.output().count("step 40 of 40") == 1  # of rank 0 alone


def test_one_that_saves_and_exits_with_0_when_it_is_asked_to_stop_is_not_complete(
    own: AnyProgram,
) -> None:
    job = own.supervise("bash", "counter.sh", "beats", nproc=2)
    beat = RunDirectory(own.folder / "runs" / "any").heartbeat(1, 0)
    wait_until(lambda: beat.exists() and beat.read_text() == "20\n", "step 20", job=job)
    wait_until(lambda: own.told("status")["state"] == "training", "it is seen", job=job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert own.events("attempt_ended")[0]["exits"] == {"0": 0, "1": 0}
    assert own.told("status")["state"] == "stopped"

    (own.folder / "go-on").touch()
    kept = ("--checkpoint.in_memory=true",)
    job = own.supervise("bash", "counter.sh", "beats", options=kept, nproc=2)
    assert job.wait() == 0, job.output()
    assert "this program's steps are not kept" in job.output()
    assert (own.folder / "done-0").read_text() == "counted from 20\n"
    assert own.told("status")["state"] == "completed"


SAYS = """
import os, signal, subprocess, sys, time
def leave(*_):
    subprocess.run([sys.executable, "-m", "kempner", "heartbeat", "--complete"], check=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, leave)
open("there", "w").close()
time.sleep(1000)
"""


def test_one_that_says_that_it_is_complete_is(own: AnyProgram) -> None:
    job = own.supervise(sys.executable, "-c", SAYS)
    wait_until((own.folder / "there").exists, "the rank", job=job)
    job.signal()
    assert job.wait() == 0, job.output()
    assert own.told("status")["state"] == "completed"


LEAVES = "[ $RANK = 1 ] && exit 3; touch there-$KEMPNER_ATTEMPT; sleep 1000"


def test_one_that_fails_is_seen_rank_by_rank_and_given_up(own: AnyProgram) -> None:
    quick = ("--supervise.crash_grace=1", "--supervise.max_restarts_without_progress=1")
    job = own.supervise("bash", "-c", LEAVES, options=quick, nproc=2)
    assert job.wait() == 1, job.output()
    ended = own.events("attempt_ended")
    assert [e["exits"] for e in ended] == [{"1": 3, "0": -signal.SIGKILL}] * 2
    assert {e["culprit"] for e in ended} == {1}
    (verdict,) = own.events("gave_up")
    assert verdict["reason"].startswith("rank 1 exited with code 3. It fails before the first step")
    assert own.told("status")["state"] == "failed"
    assert own.told("report")["training"]["state"] == "given up"

    options = (*quick, "--program.fail_codes=[3]")
    job = own.supervise("bash", "-c", LEAVES, options=options, nproc=2)
    assert job.wait() == 1, job.output()
    assert "which program.fail_codes names" in own.events("gave_up")[-1]["reason"]
    assert len(own.events("attempt_started")) == 3
