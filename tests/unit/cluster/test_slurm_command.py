"""What a command of Slurm is asked with, and what its answer is worth."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kempner.cluster.slurm import command as module
from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import (
    LONGEST_PAUSE,
    UNCLEAR_WITHIN,
    AnswerKind,
    CommandAnswer,
    SlurmError,
    SlurmMissingError,
    SlurmRefusedError,
    SlurmSilentError,
    SlurmUnclearError,
    ask,
    client_environment,
    judge,
    next_pause,
    patiently,
    probe_environment,
    see_step_end,
    start_step,
    step_environment,
    submission_environment,
    tell,
)

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"

JOB = {
    "PATH": "/usr/bin",
    "MUNGE_SOCKET": "/run/munge",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_JOB_ID": "7",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_GPUS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_CPU_BIND": "cores",
    "SLURM_TIME_FORMAT": "relative",
    "SQUEUE_FORMAT": "%i",
    "SBATCH_ACCOUNT": "mine",
}


def test_commands_run_with_a_fixed_environment() -> None:
    assert client_environment(JOB) == {
        "PATH": "/usr/bin",
        "MUNGE_SOCKET": "/run/munge",
        "SLURM_CONF": "/etc/slurm.conf",
        "LC_ALL": "C",
        "SLURM_TIME_FORMAT": "standard",
        "TZ": "UTC",
    }


def test_a_probe_inherits_nothing_but_the_job_and_a_step_all_but_its_amounts() -> None:
    assert set(JOB) - set(probe_environment(JOB)) == {
        "SLURM_RESTART_COUNT", "SLURM_GPUS", "SLURM_NTASKS", "SLURM_CPU_BIND",
        "SLURM_TIME_FORMAT", "SQUEUE_FORMAT", "SBATCH_ACCOUNT",
    }  # fmt: skip
    assert set(JOB) - set(step_environment(JOB, in_step=False)) == {"SLURM_GPUS", "SLURM_NTASKS"}
    leaked = {**JOB, "SLURM_STEP_ID": "-5"}
    assert step_environment(leaked, in_step=False)["SLURM_CPU_BIND"] == "cores"
    assert step_environment(JOB, in_step=True) == probe_environment(JOB)
    kept = {"PATH", "MUNGE_SOCKET", "SLURM_CONF", "SQUEUE_FORMAT", "SBATCH_ACCOUNT"}
    assert set(submission_environment(JOB)) == kept


@pytest.mark.parametrize(
    ("binds", "kept"),
    [
        ("gres/gpu:per_task:1", None),
        ("gres/gpu:per_task:4+gres/shard:per_task:2", None),
        ("gres/gpu:closest", "gres/gpu:closest"),
        ("gres/gpu:per_task:1+gres/nic:single:2", "gres/nic:single:2"),
    ],
)
def test_what_slurm_makes_of_gpus_per_task_does_not_reach_a_step(
    binds: str, kept: str | None
) -> None:
    environ = step_environment({"SLURM_TRES_BIND": binds}, in_step=False)
    assert environ.get("SLURM_TRES_BIND") == kept


LEAKED = {
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x3",
    "SLURM_CPU_BIND_VERBOSE": "quiet",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPU_BIND_LIST": "0x3",
}


PREFER = {"SLURM_CPU_BIND_PREFER": "prefer"}


@pytest.mark.parametrize(
    ("environ", "kept"),
    [
        (LEAKED, None),
        ({**LEAKED, "SLURM_CPU_BIND": "quiet,prefer,mask_cpu:0x3", **PREFER}, None),
        ({**LEAKED, "SLURM_CPU_BIND": "cores"}, "cores"),
        ({"SLURM_CPU_BIND": "cores"}, "cores"),
        ({"SLURM_CPU_BIND": "mask_cpu:0x3"}, "mask_cpu:0x3"),
    ],
)
@pytest.mark.parametrize("what", ["CPU", "MEM"])
def test_the_binding_of_another_steps_task_does_not_reach_a_step(
    environ: dict[str, str], kept: str | None, what: str
) -> None:
    named = {name.replace("_CPU_", f"_{what}_"): value for name, value in environ.items()}
    given = step_environment(named, in_step=False)
    assert given.get(f"SLURM_{what}_BIND") == kept
    assert kept is not None or given == {}


@pytest.mark.parametrize(
    ("answer", "worth"),
    [
        (CommandAnswer(0, ""), AnswerKind.SILENCE),
        (CommandAnswer(1, ""), AnswerKind.SILENCE),
        (CommandAnswer(0, "JobId=7 JobSt"), AnswerKind.SILENCE),
        (CommandAnswer(1, "JobId=7 JobSt"), AnswerKind.SILENCE),
        (CommandAnswer(None, ""), AnswerKind.SILENCE),
        (CommandAnswer(-15, "", "Terminated"), AnswerKind.SILENCE),
        (CommandAnswer(1, "", AWAY), AnswerKind.SILENCE),
        (CommandAnswer(0, "", AWAY), AnswerKind.SILENCE),
        (CommandAnswer(1, "", "Unexpected message received for job 2"), AnswerKind.SILENCE),
        (CommandAnswer(1, "", "Zero Bytes were transmitted or received"), AnswerKind.SILENCE),
        (CommandAnswer(1, "", "Socket timed out on send/recv operation"), AnswerKind.SILENCE),
        (CommandAnswer(1, "", "sacct: error: Problem talking to the database"), AnswerKind.SILENCE),
        (CommandAnswer(1, "", "Invalid job id specified for job 7"), AnswerKind.REFUSAL),
        (
            CommandAnswer(0, "", "slurm_load_jobs error: Invalid job id specified"),
            AnswerKind.REFUSAL,
        ),
        (CommandAnswer(1, "Access/permission denied", ""), AnswerKind.REFUSAL),
        (
            CommandAnswer(1, "", "Requested operation is presently disabled for job 2"),
            AnswerKind.REFUSAL,
        ),
        (CommandAnswer(1, "", "Job is pending execution for job 3"), AnswerKind.REFUSAL),
        (CommandAnswer(1, "", "our site's own words"), AnswerKind.UNCLEAR),
        (CommandAnswer(0, "", "a plugin complains"), AnswerKind.SILENCE),
    ],
)
def test_only_a_refusal_is_no(answer: CommandAnswer, worth: AnswerKind) -> None:
    assert judge(answer) is worth


Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Makes a command of these lines of a shell."""

    def make(lines: str) -> str:
        path = tmp_path / "scontrol"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
        return str(path)

    return make


def line(text: str) -> str | None:
    return text.strip() if text.endswith("\n") else None


@pytest.mark.parametrize("code", [0, 1])
def test_the_answer_counts_not_the_exit_code(script: Script, code: int) -> None:
    assert ask([script(f"echo yes; exit {code}")], line) == "yes"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("printf ye", SlurmSilentError),
        ("", SlurmSilentError),
        ("echo Access/permission denied >&2; exit 1", SlurmRefusedError),
        ("echo what is this >&2; exit 1", SlurmUnclearError),
        ("kill -TERM $$", SlurmSilentError),
    ],
)
def test_what_is_no_answer_is_an_error(script: Script, lines: str, error: type[SlurmError]) -> None:
    with pytest.raises(error):
        ask([script(lines)], line)


def test_a_command_that_outstays_its_time_is_ended_with_what_it_started(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMAND_WITHIN", 1.0)
    beating = f"(trap '' TERM; while :; do date +%N >'{tmp_path}/beat'; sleep 0.05; done)"
    with pytest.raises(SlurmSilentError, match="no answer within"):
        tell([script(beating)])
    beat = (tmp_path / "beat").read_text()
    subprocess.run(["sleep", "0.3"], check=True)
    assert (tmp_path / "beat").read_text() == beat


def test_a_command_that_may_not_be_executed_is_missing_unless_it_was_not_before(
    script: Script, tmp_path: Path
) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(SlurmMissingError, match="is not on the PATH of this host"):
        tell([absent])
    path = Path(script("exit 0"))
    path.chmod(0o644)
    with pytest.raises(SlurmMissingError, match="may not be executed on this host"):
        tell([str(path)])
    path.chmod(0o755)
    tell([str(path)])
    path.chmod(0o644)
    with pytest.raises(SlurmSilentError, match="cannot be started: Permission denied"):
        tell([str(path)])


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ESTALE])
def test_a_fork_that_fails_is_tried_again(
    script: Script, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    command, real, left = script("echo yes"), subprocess.Popen, [1, 2]

    def scarce(*arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", scarce)
    assert patiently(lambda: ask([command], line), within=60, pause=lambda _: None) == "yes"
    assert not left


class Clock:
    """Time that passes only in `wait`."""

    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


def failing(*errors: SlurmError) -> Callable[[], str]:
    left = [*errors]

    def once() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return once


SILENT, UNCLEAR = SlurmSilentError("silent"), SlurmUnclearError("unclear")


def test_silence_is_asked_again_with_longer_pauses_up_to_a_deadline() -> None:
    clock, told = Clock(), list[SlurmError]()
    got = patiently(failing(*[SILENT] * 8), 300.0, told.append, clock, clock.wait)
    assert got == "answer"
    assert clock.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert len(told) == 8
    assert next_pause(10**6) == LONGEST_PAUSE
    with pytest.raises(SlurmSilentError):
        patiently(failing(*[SILENT] * 99), 20.0, clock=(late := Clock()), pause=late.wait)
    assert late.now <= 20.0


def test_a_refusal_is_final_and_unclear_words_are_after_a_minute() -> None:
    clock = Clock()
    with pytest.raises(SlurmRefusedError):
        patiently(failing(SlurmRefusedError("x", "no")), 300.0, clock=clock, pause=clock.wait)
    assert clock.pauses == []
    with pytest.raises(SlurmUnclearError):
        patiently(failing(*[UNCLEAR] * 99), 3000.0, clock=clock, pause=clock.wait)
    assert UNCLEAR_WITHIN < clock.now < UNCLEAR_WITHIN + 2 * LONGEST_PAUSE
    mixed = [UNCLEAR, SILENT] * 20
    assert patiently(failing(*mixed), 3000.0, clock=clock, pause=clock.wait) == "answer"


CONFIG = """Configuration data as of 2026-11-22T09:25:30
KillWait                = 45 sec
SlurmctldTimeout        = 30 sec
SlurmdTimeout           = 90 sec
SLURM_VERSION           = 26.05.5

Slurmctld(primary) at login1 is UP
"""


@pytest.mark.parametrize("cut", [0, 20, 60, 100, 140])
def test_settings_are_read_only_if_all_are_there(cut: int) -> None:
    assert scontrol.read_settings(CONFIG[:cut], 0.0) is None


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("22.05.8", "22.05"), ("26.05.0-0rc1", "26.05"), ("25.11.2-Bright", "25.11"),
        ("", ""), ("unknown", ""), ("2.6.9", ""), ("slurm-wlm 24.11.5", ""),
    ],
)  # fmt: skip
def test_a_version_that_cannot_be_read_costs_nothing(version: str, found: str) -> None:
    settings = scontrol.read_settings(CONFIG.replace("26.05.5", version), 0.0)
    assert settings is not None
    assert (settings.series, settings.kill_wait) == (found, 45.0)
    without = scontrol.read_settings(CONFIG.replace("SLURM_VERSION", "Slurm"), 0.0)
    assert without is not None
    assert without.series == ""


def test_the_controllers_clock_is_taken_only_from_a_quick_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scontrol.time, "monotonic", lambda: 1000.0)
    quick, slow = (scontrol.read_settings(CONFIG, asked) for asked in (999.0, 990.0))
    assert quick is not None
    assert slow is not None
    assert (quick.kill_wait, quick.node_timeout) == (45.0, 90.0)
    assert quick.ahead == 1795339530.0 - 999.0  # that moment in UTC, whatever zone this host is in
    assert slow.ahead is None


def test_a_list_of_hosts_is_read_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert scontrol.hostnames("node[1-2]") == ["node1", "node2"]
    with pytest.raises(ValueError, match="not a Slurm host list"):
        scontrol.hostnames("node[1-")


AWAY_FROM_SRUN = "srun: error: Unable to confirm allocation for job 2: Unable to contact slurm"


@pytest.mark.parametrize(
    ("said", "code", "error"),
    [
        (f"{AWAY_FROM_SRUN} controller (connect failure)", 1, SlurmSilentError),
        ("srun: error: Unable to create step for job 1: Memory required", 1, SlurmUnclearError),
        ("srun: error: Unable to create step for job 1: Invalid job id", 1, SlurmUnclearError),
        (
            "srun: error: Unable to create step for job 1: Invalid generic resource (gres) "
            "specification",
            1,
            SlurmUnclearError,
        ),
        (
            "srun: error: Unable to create step for job 1: Job/step already completing or "
            "completed",
            1,
            SlurmUnclearError,
        ),
        (
            "srun: error: Unable to create step for job 1: More processors requested than "
            "permitted",
            1,
            SlurmUnclearError,
        ),
        (
            "srun: error: Unable to create step for job 1: Requested node configuration is not "
            "available",
            1,
            SlurmUnclearError,
        ),
        ("srun: error: node2: task 1: Exited with exit code 75", 75, None),
        ("srun: Job 1 step creation temporarily disabled, retrying", 0, None),
    ],
)
def test_a_step_that_was_never_started_is_not_one_that_failed(
    script: Script,
    capfd: pytest.CaptureFixture[str],
    said: str,
    code: int,
    error: type[SlurmError] | None,
) -> None:
    lines = f"echo '{said}' >&2; echo out; sleep 30 & exit {code}"  # a helper holds the pipe
    step = start_step([script(lines)], dict(os.environ))
    heard: list[bytes] = []
    if error is None:
        assert see_step_end(step, heard.append) == code
    else:
        with pytest.raises(error):
            see_step_end(step, heard.append)
    os.killpg(step.pid, signal.SIGKILL)
    assert capfd.readouterr().out == "out\n"
    assert b"".join(heard).decode() == f"{said}\n"


def test_a_step_outlives_who_heard_it(script: Script, tmp_path: Path) -> None:
    """The supervisor was killed: what srun says then does not end it, and with it the tasks."""
    lines = f"while ! [ -e {tmp_path}/gone ]; do sleep 0.05; done\n/bin/echo late >&2 && exit 3"
    step = start_step([script(lines)], dict(os.environ))
    assert step.stderr is not None
    step.stderr.close()
    (tmp_path / "gone").touch()
    assert step.wait() == 3


def test_a_want_of_descriptors_is_waited_for(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", full)
    with pytest.raises(SlurmError):
        start_step([script("exit 0")], dict(os.environ))
