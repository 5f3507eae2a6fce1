"""`kempner.submit` on a login machine: queued, cancelled, submitted again, all from Python."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from harness import Run
from patience import scaled
from submitting import LONG, Project, assert_like

import kempner

pytestmark = pytest.mark.timeout(300)

SUBMITS = """
import sys
import kempner
from kempner.run.process.exit_codes import UsageError
what, config, *overrides = sys.argv[1:]
at = {"nodes": 2, "gpus_per_node": 1, "cpus_per_task": 2, "slurm_partition": "low"}
if what == "submit":
    job = kempner.submit(config, *overrides, timeout_min=10, **at)
    print(kempner.__file__, job.job_id, job.state.value)
elif what == "cancel":
    job = kempner.Job(config)
    job.cancel()
    print(job.wait(WAIT).value, job.step)
elif what == "refused":
    try:
        kempner.submit(config, *overrides, **at)
    except UsageError as error:
        print(error)
else:
    print(kempner.Job(config).wait(WAIT).value)
"""


@pytest.fixture
def ask(project: Project) -> Callable[..., str]:
    """What a Python session on the login machine prints."""
    (project.folder / "ask.py").write_text(f"WAIT = {scaled(200)}\n{SUBMITS}")

    def run(*arguments: str) -> str:
        command = (sys.executable, "ask.py", *arguments)
        at = {"cwd": project.folder, "timeout": 200, "OMP_NUM_THREADS": "1"}
        told = project.cluster.run("login1", *command, **at)
        return told.stdout.strip()

    return run


def test_a_job_is_cancelled_and_submitted_again_from_python(
    project: Project, ask: Callable[..., str], undisturbed: Run
) -> None:
    config, run = str(project.run.config.relative_to(project.folder)), str(project.run.record.path)
    home, job, state = ask("submit", config, *LONG).split(maxsplit=2)
    assert home == kempner.__file__
    assert state in ("queued", "starting")
    project.reach(job, 5)
    project.slow()  # or it may be complete before Python has started again
    assert project.cluster.job(job)["TimeLimit"] == "00:10:00"
    assert "is still in work (" in ask("refused", config, *LONG)
    stopped, step = ask("cancel", run).split()
    project.hurry()
    assert stopped == "stopped"
    assert project.cluster.job(job)["JobState"] == "CANCELLED"
    assert project.run.latest() == int(step)

    _, again, state = ask("submit", config, *LONG).split(maxsplit=2)
    assert state in ("queued", "starting")
    project.reach(again, int(step) + 1)
    project.warn(again)
    assert ask("wait", run) == "completed"  # past the requeue
    assert int(step) in [event["step"] for event in project.events("resumed")]
    assert_like(project.run, undisturbed)
    project.assert_states(again, "REQUEUED", "COMPLETED")
