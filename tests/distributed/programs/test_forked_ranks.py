"""Ranks are forked from a server: whatever happens to that, the run goes on, and bit for bit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from harness import KEMPNER, ROOT, Job, Run, wait_until

from kempner.run.record.ledger import read_lines

pytestmark = [pytest.mark.timeout(600), pytest.mark.cold("this is about the fork server")]

LONG = ("--train.max_steps=200", "--checkpoint.interval=5")


def server_of(job: Job) -> psutil.Process:
    """The fork server of a supervisor: its one child that has no command line of a rank."""
    found = wait_until(lambda: servers(job), "a fork server", job=job)
    return found[0]


def servers(job: Job) -> list[psutil.Process]:
    children = psutil.Process(job.process.pid).children()
    return [c for c in children if "fork_server.server" in " ".join(c.cmdline())]


def said(run: Run, attempt: int) -> list[str]:
    return [line["event"] for line in read_lines(run.record.supervisor_log(attempt))]


def test_a_run_survives_the_death_and_the_silence_of_its_fork_server(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    job = run.supervise(2, *LONG, KEMPNER_FAULTS="slow rank 1 by 3 from step 2")
    ranks = [run.ready_pid(1, rank, job) for rank in range(2)]
    first = server_of(job)
    assert [psutil.Process(rank).ppid() for rank in ranks] == [first.pid] * 2
    first.kill()
    wait_until(lambda: "the fork server has ended" in said(run, 1), "its end in the log", job=job)
    assert [psutil.Process(rank).ppid() for rank in ranks] == [job.process.pid] * 2
    run.reach(max(run.steps(), default=0) + 3, job)
    assert run.attempt() == 1

    os.kill(ranks[1], signal.SIGKILL)  # no other process could tell how it ended
    run.ready_pid(2, 1, job)
    assert run.events("attempt_failed")[0]["raised"] == ""
    assert "killed by SIGKILL" in run.events("attempt_ended")[0]["reason"]
    second = next(server for server in servers(job))

    second.suspend()
    os.kill(run.ready_pid(2, 0, job), signal.SIGKILL)
    run.ready_pid(3, 0, job)
    assert not second.is_running() or second.status() == psutil.STATUS_ZOMBIE
    assert server_of(job).pid != second.pid
    assert job.wait() == 0, job.output()
    assert run.weights() == undisturbed(2, *LONG).weights()


@pytest.mark.parametrize(
    ("module", "forked"), [("torch", True), ("torch_and_a_thread", False)], ids=["safe", "unsafe"]
)
def test_a_program_of_ones_own_is_forked_where_that_is_safe(
    run: Run, tmp_path: Path, module: str, forked: bool
) -> None:
    (tmp_path / "torch_and_a_thread.py").write_text(
        "from threading import Event, Thread\nThread(target=Event().wait, daemon=True).start()\n"
    )
    program = tmp_path / "parents.py"
    program.write_text(
        "import os, sys, psutil\nprint('rank', os.environ['RANK'], psutil.Process().cmdline())\n"
    )
    settings = [
        f"--run.dir={tmp_path}",
        "--run.name=own",
        f"--supervise.fork_imports=['{module}']",
    ]
    command = [*KEMPNER, "supervise", *settings, "--", sys.executable, str(program)]
    job = run.start(command, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert job.wait() == 0, job.output()
    (line,) = [line for line in job.output().splitlines() if line.startswith("rank 0")]
    assert ("fork_server" in line) == forked
    assert ("2 threads run in the fork server" in job.output()) != forked
