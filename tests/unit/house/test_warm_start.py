"""A process that is forked from the template is as one that was started by its command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from harness import Run, rank_processes, wait_until
from patience import scaled
from warm.template import Template

pytestmark = pytest.mark.skipif(warm.ALL_COLD, reason="KEMPNER_TESTS_COLD=1: nothing is forked")

TEMPLATE = Template(())

PROGRAM = """
import gc, json, os, random, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
facts = {
    "argv": sys.argv, "name": __name__, "path": sys.path, "folder": os.getcwd(),
    "environment": dict(os.environ), "stdin": os.read(0, 1).decode(), "collects": gc.isenabled(),
    "session": os.getsid(0) == os.getpid(), "threads": status["Threads"],
    "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1], "mask": os.umask(0),
}
print(json.dumps(facts), flush=True)
print(random.random(), file=sys.stderr, flush=True)
sys.exit(3)
"""


def facts(cold: bool, folder: Path, module: bool) -> tuple[dict[str, Any], str]:
    """What such a process says of itself on standard output, and what on standard error."""
    warm.choose(cold=cold)
    (folder / "program.py").write_text(PROGRAM)
    program = ("-m", "program") if module else (str(folder / "program.py"),)
    environ = {**os.environ, "SAID": "\udce9", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    out, errors = folder / "out", folder / "errors"
    out.unlink(missing_ok=True)
    with open(errors, "wb") as output:
        process = warm.start([sys.executable, *program, "-x"], environ, output, folder, stdout=out)
        assert process.wait(scaled(60)) == 3, errors.read_text()
        assert process.poll() == 3
    return json.loads(out.read_text()), errors.read_text()


@pytest.mark.parametrize("module", [False, True])
def test_a_forked_process_is_as_one_that_was_started(tmp_path: Path, module: bool) -> None:
    started, drawn = facts(True, tmp_path, module)
    forked, drawn_too = facts(False, tmp_path, module)
    assert forked == started
    assert drawn_too != drawn
    assert forked["environment"]["SAID"] == "\udce9"


ENDS = {"": 0, "sys.exit()": 0, "sys.exit(75)": 75, "sys.exit('a word')": 1, "raise OSError(1)": 1}


@pytest.mark.parametrize("end", ENDS)
def test_a_brief_process_ends_as_any_other_does(tmp_path: Path, end: str) -> None:
    """Its buffers are written, its threads waited for, and what it has registered is called."""
    program = tmp_path / "ends.py"
    program.write_text(
        "import atexit, sys, threading, time\n"
        "atexit.register(print, 'exit')\n"
        "last = threading.Timer(0.05, lambda: print('thread'))\n"
        f"last.start()\nprint('main')\n{end}\n"
    )
    told = []
    for brief in (False, True):
        out, errors = tmp_path / f"out-{brief}", tmp_path / f"errors-{brief}"
        with open(errors, "wb") as output:
            process = TEMPLATE.fork([str(program)], os.environ, output, stdout=out, brief=brief)
            assert process.wait(scaled(60)) == ENDS[end], errors.read_text()
        said = errors.read_text().splitlines()
        told.append((out.read_text(), said[-1:]))
    assert told[0] == told[1] == ("main\nthread\nexit\n", told[0][1])


def test_a_process_that_goes_on_can_be_waited_for_and_killed(tmp_path: Path) -> None:
    warm.choose(cold=False)
    (tmp_path / "waits.py").write_text("import signal; signal.pause()")
    with open(tmp_path / "out", "wb") as output:
        process = warm.start([sys.executable, str(tmp_path / "waits.py")], os.environ, output)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(scaled(60)) == -signal.SIGTERM
    process.send_signal(signal.SIGTERM)  # to a process that has ended


def test_a_supervisor_has_its_spare_as_its_first_server_and_then_its_own(run: Run) -> None:
    job = run.supervise(1, "--train.max_steps=100000")
    supervisor = psutil.Process(job.process.pid)
    rank = psutil.Process(run.ready_pid(1, 0, job))
    (spare,) = [child for child in supervisor.children() if child.name() == "fork server"]
    assert rank.ppid() == spare.pid
    assert supervisor.cmdline() == spare.cmdline()  # the template's, of which both are forks
    spare.kill()
    rank.kill()
    run.ready_pid(2, 0, job)
    # What reads the rank's output is a fork of the supervisor itself.
    (server,) = [c for c in supervisor.children() if c.cmdline() != supervisor.cmdline()]
    assert set(rank_processes(job)) == {0}
    job.signal()
    assert job.wait() == 75, job.output()
    wait_until(lambda: not server.is_running(), "the server to be gone")
