"""What a submission asks for, what it refuses, and what its job is said to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT

import kempner
from kempner.insight.status.activity import Activity, ActivityNote
from kempner.insight.status.job import NO_ANSWER, JobStatus
from kempner.jobs.job import (
    Submission,
    decide,
    describe_failure,
    describe_unfinished,
    job_goes_on,
    last_submission,
    reserve,
)
from kempner.jobs.submit import Resources, sbatch, script
from kempner.run.process.exit_codes import RunError
from kempner.run.record.run_dir import RunDirectory

OWN = ["python", "own.py"]


@pytest.mark.parametrize(
    ("found", "works", "began", "cancelled", "said"),
    [
        (Activity.STOPPED, True, False, False, Activity.STARTING),  # the earlier submission stopped
        (Activity.DONE, True, False, False, Activity.STARTING),
        (Activity.DONE, False, False, False, Activity.DONE),
        (Activity.GIVEN_UP, False, False, False, Activity.GIVEN_UP),
        (Activity.STOPPED, False, False, False, Activity.FAILED),
        (Activity.NOT_STARTED, False, False, False, Activity.FAILED),
        (Activity.NOT_STARTED, False, False, True, Activity.STOPPED),
        (Activity.NOT_STARTED, True, False, False, Activity.STARTING),
        (Activity.HEALTH_CHECK, True, False, False, Activity.HEALTH_CHECK),
        (Activity.QUEUED, True, False, False, Activity.QUEUED),
        (Activity.STOPPED, True, True, True, Activity.STOPPED),
        (Activity.STOPPED, None, False, False, Activity.STOPPED),
    ],
)
def test_what_a_job_does(
    found: Activity, works: bool | None, began: bool, cancelled: bool, said: Activity
) -> None:
    assert decide(ActivityNote(found), works, began, cancelled).activity is said


@pytest.mark.parametrize(
    ("state", "held", "said"),
    [
        (Activity.TRAINING, "", "training"),
        (Activity.QUEUED, "", "queued"),
        (Activity.QUEUED, "its job is held", "its job is held"),
        (Activity.DONE, "", "completed, and its supervisor is about to end"),
    ],
)
def test_what_is_said_of_a_run_that_is_not_done(state: Activity, held: str, said: str) -> None:
    assert describe_unfinished(state, held) == said


@pytest.mark.parametrize(
    ("reason", "raised", "said"),
    [
        ("rank 0 exited with code 1", "KeyError: 3", "rank 0 exited with code 1: KeyError: 3"),
        ("rank 0 exited with code 1: KeyError: 3", "KeyError: 3", "rank 0 exited with code 1: Key"),
        ("it did not begin; its log says why", "kempner: no such file", "it did not begin: no suc"),
        ("it did not begin; its log says why", "", "it did not begin; its log says why"),
    ],
)
def test_how_a_failure_is_told(reason: str, raised: str, said: str) -> None:
    assert describe_failure(reason, raised).startswith(said)


@pytest.mark.parametrize(
    ("state", "goes_on"),
    [
        *(("PENDING", True), ("RUNNING", True), ("COMPLETING", True), ("REQUEUED", True)),
        *(("CANCELLED", False), ("COMPLETED", False), ("unknown to Slurm", False)),
        (NO_ANSWER, None),
    ],
)
def test_whether_a_slurm_job_goes_on(state: str, goes_on: bool | None) -> None:
    assert job_goes_on(JobStatus("7", state)) is goes_on


def test_the_command_of_sbatch() -> None:
    resources = Resources(8, gpus_per_node=4, cpus_per_task=8, mem_gb=1.5, timeout_min=60)
    given = {"partition": "gpu", "exclusive": True, "signal": None, "gres_flags": "none"}
    command = sbatch(resources, given, "7b", Path("/100%/log"), Path("b.sh"), ["7b.toml", "--a=1"])
    asked = ["--nodes=8", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=8"]
    asked += ["--mem=1536M", "--time=60", "--partition=gpu", "--exclusive", "--gres-flags=none"]
    head = ["sbatch", "--parsable", "--job-name=7b", "--output=/100%%/log"]
    assert command == [*head, *asked, "b.sh", "7b.toml", "--a=1"]
    assert Resources().options() == ["--nodes=1", "--ntasks-per-node=1"]


def test_the_batch_script_has_the_lines_of_the_shipped_one() -> None:
    shipped = (ROOT / "scripts/slurm/multinode.sh").read_text().splitlines()
    ours = script("/a b/python").splitlines()
    for line in ours:
        if line.startswith(("#SBATCH", "set", "trap")):
            assert line in shipped
    assert ours[-1] == "exec '/a b/python' -P -m kempner supervise --launcher srun \"$@\""


@pytest.mark.parametrize(
    ("program", "options", "sentence"),
    [
        (OWN, {"nodes": 2, "cluster": "local"}, "nodes=2 needs Slurm: on this machine leave nodes"),
        (OWN, {"nodes": 0}, "nodes=0 must be at least 1"),
        (OWN, {"cluster": "pbs"}, "cluster='pbs' is neither"),
        (OWN, {"partition": "gpu"}, "submit has no option partition: options of sbatch are slurm_"),
        (OWN, {"cluster": "slurm"}, "there is no sbatch on the PATH of this host"),
        (["./program"], {}, "give the run a name: submit"),
        ([], {}, "the command is empty"),
        (lambda: 1, {}, "a function cannot be submitted; give the path of a configuration, or a"),
        (3, {}, r"submit\(\): what is of type int cannot be submitted"),
    ],
)
def test_what_makes_no_sense_is_refused(
    program: Any,
    options: dict[str, Any],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match=sentence):
        kempner.submit(program, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_submission_that_slurm_refuses_leaves_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    refuses = tmp_path / "bin" / "sbatch"
    refuses.parent.mkdir()
    refuses.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified' >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", f"{refuses.parent}:{os.environ['PATH']}")
    for _ in range(2):  # the second time there is a folder of the first
        with pytest.raises(RunError, match=r"the job is not submitted: .*invalid partition"):
            kempner.submit(OWN, slurm_partition="nowhere")
    assert last_submission(RunDirectory(tmp_path / "runs" / "own")) is None


def test_the_last_submission_counts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    first, second = reserve(run), reserve(run)
    Submission(second, 3, "12").write(run)
    Submission(first, 0, "11").write(run)
    assert last_submission(run) == Submission(2, 3, "12")
    mine = Submission.of_process(reserve(run), 0, os.getpid())
    assert mine.process_lives() is True
    gone = Submission(9, 0, "", mine.machine, mine.pid, mine.started - 1)
    assert gone.process_lives() is False
    assert Submission(9, 0, "", "another", mine.pid, mine.started).process_lives() is None


def test_a_job_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run: give <run\.dir>/<run\.name>, or submit it"):
        kempner.Job(tmp_path / "nothing")


def test_submit_needs_no_torch() -> None:
    code = "import kempner, sys; kempner.submit, kempner.Job; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
