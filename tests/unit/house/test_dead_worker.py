"""A worker that dies in the middle of a test, as by its time limit, holds up and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness import ROOT, wait_until
from patience import scaled

TESTS = '''
"""Each starts what never ends, and dies as pytest-timeout has a worker die."""
import os, signal, sys, time
from pathlib import Path
import pytest, warm
from harness import wait_until

RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if (os.fork() == 0) and (os.setsid() or True) and os.fork():
    os._exit(0)  # an orphan in a session of its own
with open(sys.argv[1], "a") as told:
    told.write(f"{os.getpid()}\\\\n")
time.sleep(1000)
"""

@pytest.mark.parametrize("kind", KINDS)
def test_hangs(kind):
    told = Path(__file__).with_name(f"pids-{kind}")
    if kind == "forked":
        if not (pid := os.fork()):
            time.sleep(1000)
        told.write_text(f"{pid}\\n{pid}\\n")
    else:
        warm.choose(cold=kind == "cold")
        program = Path(__file__).with_name(f"rank_{kind}.py")
        program.write_text(RANK)
        with open(os.devnull, "wb") as nothing:
            warm.start([sys.executable, str(program), str(told)], os.environ, nothing)
    wait_until(lambda: told.exists() and told.read_text().count("\\n") == 2, "both are there")
    os._exit(1)

def test_fine():
    pass
'''


@pytest.mark.parametrize("kinds", [("warm", "cold"), ("forked",)])
def test_a_worker_that_dies_is_named_and_leaves_no_process(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    (tmp_path / "test_hangs.py").write_text(TESTS.replace("KINDS", repr(kinds)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "drills")))
    command = ("-m", "pytest", "-p", "conftest", "--numprocesses=2", "test_hangs.py")
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{len(kinds)} failed, 1 passed" in done.stdout
    for kind in kinds:
        assert f"crashed while running 'test_hangs.py::test_hangs[{kind}]'" in done.stdout
        for pid in (tmp_path / f"pids-{kind}").read_text().split():
            wait_until(
                lambda pid=pid: not psutil.pid_exists(int(pid)), f"{kind}: {pid} is gone", 10
            )
