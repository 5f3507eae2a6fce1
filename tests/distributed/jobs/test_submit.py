"""`kempner.submit` on this machine: a run that outlives its Python session, stops, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import ROOT, Run, wait_until
from patience import scaled

import kempner
from kempner.run.process.exit_codes import RunError, UsageError
from kempner.run.process.whereabouts import start_ticks

pytestmark = pytest.mark.timeout(300)

STEPS = 400
LONG = [f"--train.max_steps={STEPS}", "--checkpoint.interval=100"]

STARTS = """
import sys
import kempner
job = kempner.submit(sys.argv[1], *sys.argv[2:], cluster="local", tasks_per_node=2)
assert "torch" not in sys.modules
print(job.run_dir)
"""


@pytest.fixture
def submitted(run: Run) -> Iterator[Run]:
    """A run; a supervisor that a failed test left behind is killed."""
    yield run
    if run.record.submissions.is_dir():
        job = kempner.Job(run.record.path)
        if job.job_id and start_ticks(int(job.job_id)) is not None:
            os.killpg(int(job.job_id), signal.SIGKILL)


def test_a_run_outlives_its_session_is_cancelled_and_goes_on(
    submitted: Run, undisturbed: Callable[..., Run]
) -> None:
    reference, config = undisturbed(2, *LONG), str(submitted.config)
    start = [sys.executable, "-c", STARTS, config, *LONG]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    told = subprocess.run(start, env=environ, check=True, capture_output=True, text=True)
    job = kempner.Job(told.stdout.strip())
    assert job.run_dir == submitted.record.path
    wait_until(lambda: job.step >= 3, "step 3")
    assert not job.done()
    assert job.state in ("training", "saving")
    with pytest.raises(UsageError, match=r"is still in work \(\w+\): wait for it, or cancel it"):
        kempner.submit(config, *LONG, cluster="local")
    with pytest.raises(TimeoutError, match=r"is not done after 0\.1 s: "):
        job.wait(0.1)
    job.cancel()
    assert job.wait(scaled(60)) == "stopped"
    stopped = job.step
    assert submitted.latest() == stopped < STEPS
    assert submitted.events("stopped")[-1]["step"] == stopped

    again = kempner.submit(config, *LONG, cluster="local", tasks_per_node=2)
    assert again.state not in ("stopped", "failed")
    assert again.wait(scaled(120)) == "completed"
    assert again.done()
    assert again.step == STEPS
    assert [event["step"] for event in submitted.events("resumed")] == [stopped]
    assert submitted.steps() == reference.steps()
    assert submitted.taken() == reference.taken()
    assert again.log is not None
    assert f"run directory: {submitted.record.path}" in again.log.read_text()
    assert again.job_id != job.job_id


def test_the_example_of_the_page(tmp_path: Path) -> None:
    """`docs/submit.md` as it is: two ranks to the end."""
    page = (ROOT / "docs" / "submit.md").read_text()
    (example,) = (block.split("```")[0] for block in page.split("```python\n")[1:])
    surviving = (ROOT / "docs" / "examples" / "surviving.py").read_text()
    (tmp_path / "surviving.py").write_text(surviving)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    told = subprocess.run(
        [sys.executable, "-c", example],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1].split() == ["completed", "200"]


def test_a_command_that_knows_nothing_of_kempner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kempner.submit(["true"], name="fine", cluster="local").wait(scaled(60)) == "completed"
    command = [sys.executable, "-c", "raise KeyError('no batch')"]
    failed = kempner.submit(command, name="bad", cluster="local")
    assert failed.wait(scaled(60)) == "failed"
    assert failed.reason == "rank 0 exited with code 1 (crashed): KeyError: 'no batch'"
    assert failed.failure == failed.reason
    with pytest.raises(RunError, match=r"bad has failed: .* KeyError: 'no batch'"):
        failed.wait(check=True)
