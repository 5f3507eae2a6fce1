"""Programs that die in many ways: all that reads the run names the cause and the rank, with the
terminal closed.

And what holds for all of them: what was printed is kept, and nothing is left in their folder.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from deaths import (
    BEYOND_LIMIT,
    CHEAP,
    DEAR,
    LIMIT_OF_GROUP,
    SECRET,
    Death,
    kept_of,
    last_reason,
    options,
    untold,
    write_deaths,
)
from drilling import note
from harness import KEMPNER, wait_until
from patience import scaled

from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(scaled(400))


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(CHEAP, id="cheap"),
        pytest.param(DEAR, id="dear", marks=pytest.mark.drill),
        pytest.param(BEYOND_LIMIT, id="beyond_limit"),
    ],
)
def test_a_death_is_named_wherever_one_looks(
    tmp_path: Path, deaths: Sequence[Death], request: pytest.FixtureRequest
) -> None:
    within = []
    if deaths is BEYOND_LIMIT:
        group = request.getfixturevalue("limited")(LIMIT_OF_GROUP)
        within = ["sh", "-c", f'echo $$ > {group.path}/cgroup.procs; exec "$@"', "sh"]
    folder, run = tmp_path / "project", RunDirectory(tmp_path / "project" / "runs" / "dies")
    folder.mkdir()
    deaths = write_deaths(folder, deaths)
    there = {path.name for path in folder.iterdir()}
    command = [*KEMPNER, "supervise", *options(deaths, "dies"), "--nproc=2", "--", "bash", "die.sh"]
    cores = resource.getrlimit(resource.RLIMIT_CORE)[1]
    terminal, far = os.openpty()
    supervisor = subprocess.Popen(
        [*within, *command],
        cwd=folder,
        env={**os.environ, "SECRET_TOKEN": SECRET},
        stdin=far,
        stdout=far,
        stderr=far,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (cores, cores)),
    )
    os.close(far)
    try:
        wait_until(run.attempt(2).exists, "the second attempt", 60)
        os.close(terminal)
        assert supervisor.wait(scaled(300)) == 1
    finally:
        supervisor.kill()
        supervisor.wait()

    assert untold(run, deaths, tmp_path / "then") == []
    assert deaths[-1].named in last_reason(run)
    assert deaths[-1].named in (folder / "hook.txt").read_text()
    for attempt, death in enumerate(deaths, 1):
        assert kept_of(run, attempt, 0) == "rank 0 has ***\n"
        assert kept_of(run, attempt, 1).startswith("rank 1 has ***\n")
        note("deaths", kind=death.kind)
    left = {path.name for path in folder.iterdir()} - there
    assert left <= {"runs", "mapped", "hook.txt"}


@pytest.mark.parametrize("start", ["import expert", "raise ValueError('no 9')"])
def test_the_same_exception_before_the_first_step_is_final_at_the_second(
    tmp_path: Path, start: str
) -> None:
    (tmp_path / "dies.py").write_text(start)
    command = [*KEMPNER, "supervise", "--run.name=dies", "--", sys.executable, "dies.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "It fails before the first step every time: a restart would not help" in done.stderr
    attempts = [p.name for p in (tmp_path / "runs" / "dies" / "attempts").iterdir() if p.is_dir()]
    assert sorted(attempts) == ["1", "2"]
