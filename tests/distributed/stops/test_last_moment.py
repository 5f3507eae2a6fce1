"""A signal between the last word of a run and the end of its processes changes nothing."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import KEMPNER, Run

from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory

pytestmark = [pytest.mark.timeout(300), pytest.mark.cold("Python itself is changed, as it starts")]

AT_THE_LAST_MOMENT = """
import os, signal, sys

class LastOfAll:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

sys.last_of_all = LastOfAll()
"""
"""Sends SIGTERM when the interpreter is torn down, after it has restored the default actions."""

LOOP = """
import torch
import torch.distributed as dist
from kempner import survive

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in survive(model, optimizer, steps=4, save_every=2):
    model(torch.rand(8, 4)).square().mean().backward()
    optimizer.step()
    print("step", step, flush=True)
"""


@pytest.fixture
def signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every interpreter of this test gets its signal as late as can be."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(AT_THE_LAST_MOMENT)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.usefixtures("signalled")
def test_a_completed_run_has_completed(run: Run) -> None:
    plain = subprocess.run([sys.executable, "-c", ""], check=False)
    assert plain.returncode == -15  # or this test would say nothing
    job = run.supervise(1, "--train.max_steps=4", "--scheduler.warmup_steps=1")
    assert job.wait() == 0, job.output()
    assert run.events("attempt_ended")[0]["exits"] == {"0": 0}


@pytest.mark.usefixtures("signalled")
def test_so_has_a_loop_that_prints_where_nobody_reads(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    code = tmp_path / "code"
    supervise = [*KEMPNER, "supervise", "--run.name=own", "--", sys.executable, "loop.py"]
    shell = f"({shlex.join(supervise)}; echo $? >'{code}') 2>&1 | true"
    subprocess.run(["bash", "-c", shell], cwd=tmp_path, check=True)
    assert int(code.read_text()) == 0
    events = list(read_lines(RunDirectory(tmp_path / "runs" / "own").ledger))
    assert [e["exits"] for e in events if e["event"] == "attempt_ended"] == [{"0": 0}]
