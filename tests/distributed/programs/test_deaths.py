"""Programs that die in many ways: all that reads the run names the cause and the rank, with the
terminal closed.

And what holds for all of them: what was printed is kept, and nothing is left in their folder.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from drilling import note
from harness import KEMPNER
from patience import scaled

from kempner.insight.report.summary import read_run
from kempner.insight.triage.first_failure import triage_run
from kempner.jobs.job import Job
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(scaled(200))

PYTHON = """
import os, sys, time
print("begins with", os.environ["SECRET_TOKEN"], flush=True)
if os.environ["RANK"] != "1":
    time.sleep(60)
{death}
"""


@dataclass(frozen=True)
class Death:
    """A kind: what rank 1 does in Python, or in a `shell`, and how its cause is `named`."""

    kind: str
    named: str
    python: str = ""
    shell: str = ""
    c: str = ""
    seconds: bool = False

    def command(self, folder: Path) -> Sequence[str]:
        """The program, made in `folder`."""
        if self.shell:
            waits = 'test "$RANK" = 1 || exec sleep 60\n'
            (folder / "run.sh").write_text(f"{waits}{self.shell}\n")
            return ("bash", "run.sh")
        if self.c:
            source, compiler = folder / "dies.cpp", shutil.which("g++")
            if compiler is None:
                pytest.skip("there is no compiler")
            source.write_text(self.c)
            subprocess.run([compiler, "-o", "dies", source.name], cwd=folder, check=True)
            return ("bash", "-c", 'test "$RANK" = 1 || exec sleep 60; exec ./dies')
        (folder / "dies.py").write_text(PYTHON.format(death=self.python))
        return (sys.executable, "dies.py")


RAISES = "def step():\n    raise ValueError('no such expert: 9')\nstep()"
WORKER = """
import torch
class Broken(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, at): raise ValueError(f"sample {at} is torn")
if __name__ == "__main__":
    list(torch.utils.data.DataLoader(Broken(), num_workers=1))
"""
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))"
CPP = '#include <stdexcept>\nint main() { throw std::runtime_error("no expert 9"); }\n'

DEATHS = [
    Death("exception", "ValueError: no such expert: 9 (dies.py:7 in step)", RAISES),
    Death("import", "ModuleNotFoundError: No module named 'expert'", "import expert"),
    Death("syntax", "SyntaxError", "exec(compile('def f(:', 'late.py', 'exec'))"),
    Death("exit", "exited with code 7", "os._exit(7)"),
    Death("segfault", "Segmentation fault (dies.py:6 in <module>)",
          "import ctypes; ctypes.string_at(0)"),
    Death("abort", "Fatal Python error: Aborted (dies.py:6 in <module>)", "os.abort()"),
    Death("killed", "killed by SIGKILL", "os.kill(os.getpid(), 9)"),
    Death("memory", "MemoryError", f"{LIMIT}; b'x' * (2 << 30)"),
    Death("complaint", "cannot open data.bin", shell="echo cannot open data.bin >&2; exit 4"),
    Death("no command", "trane: command not found", shell="trane --steps 9"),
    Death("cause of a cause", "KeyError: 'expert' (dies.py:7 in <module>)",
          "try:\n    {}['expert']\nexcept KeyError as e:\n    raise RuntimeError('bad') from e"),
    Death("C++", "no expert 9", c=CPP, seconds=True),
    Death("loader worker", "ValueError: sample 0 is torn", WORKER, seconds=True),
]  # fmt: skip
CASES = [
    pytest.param(death, id=death.kind, marks=[pytest.mark.drill] if death.seconds else [])
    for death in DEATHS
]


@pytest.mark.parametrize("death", CASES)
def test_a_death_is_named_wherever_one_looks(tmp_path: Path, death: Death) -> None:
    words = ("--run.name=dies", "--nproc=2", "--supervise.crash_grace=0.1")
    once = "--supervise.max_restarts_without_progress=0"
    command = [*KEMPNER, "supervise", *words, once, "--", *death.command(tmp_path)]
    there = {path.name for path in tmp_path.iterdir()}
    cores = resource.getrlimit(resource.RLIMIT_CORE)[1]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "SECRET_TOKEN": "correct-horse"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=scaled(120),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (cores, cores)),
    )
    assert done.returncode == 1, done.stderr
    assert death.named in done.stderr

    run = RunDirectory(tmp_path / "runs" / "dies")
    verdict, job = triage_run(run), Job(run.path)
    interruption = read_run(run).report.interruptions[0]
    assert verdict.where.rank == interruption.place.rank == 1, verdict
    assert death.named in verdict.told.raised
    assert death.named in f"{interruption.cause} {interruption.detail}"
    assert death.named in job.reason
    assert death.named in job.failure
    assert "rank 1" in job.reason
    assert interruption.place.steps_lost == 0

    if death.python:
        kept = [run.output(1, rank).read_text() for rank in (0, 1)]
        assert [text.splitlines()[0] for text in kept] == ["begins with ***"] * 2
    assert {path.name for path in tmp_path.iterdir()} - there <= {"runs", "__pycache__"}
    note("deaths", kind=death.kind, named=verdict.told.raised)


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
