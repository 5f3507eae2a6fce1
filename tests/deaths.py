"""Deaths of programs: about forty ways, how the cause is to be named, and where one looks for it.

One run dies of one after the other: each attempt of rank 1 by the next. What is told of each is
what is read of the run's directory as it was after that attempt.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner.insight.report.summary import read_run
from kempner.insight.status.job import JobWatch
from kempner.insight.status.runs import RunFollower
from kempner.insight.triage.first_failure import triage_run
from kempner.jobs.job import Job
from kempner.run.record.events import AttemptEnded
from kempner.run.record.run_dir import RunDirectory

SECRET = "correct-horse"
"""What the ranks print of themselves: the value of `SECRET_TOKEN`."""

BEGINS = 'import os, sys\nprint("begins with", os.environ["SECRET_TOKEN"], flush=True)\n'
DIES = """
echo rank $RANK has $SECRET_TOKEN
[ "$RANK" = 1 ] || exec sleep 1000
kind=$(sed -n "${KEMPNER_ATTEMPT}p" deaths/order)
[ -e "deaths/$kind.py" ] && exec PYTHON "deaths/$kind.py"
[ -e "deaths/$kind" ] && exec "deaths/$kind"
exec bash "deaths/$kind.sh"
"""


@dataclass(frozen=True)
class Death:
    """A kind: what rank 1 does in Python, in a `shell` or in `c`, and how its cause is `named`."""

    kind: str
    named: str
    python: str = ""
    shell: str = ""
    c: str = ""


STEP = "def step():\n    raise ValueError('no such expert: 9')\n"
IN_STEP = "ValueError: no such expert: 9 ({}.py:4 in step)"
LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_{0}, ({1}, {1}))\n"
NATIVE = "Fatal Python error: {}"

CHEAP = [
    Death("exception", IN_STEP.format("exception"), f"{STEP}step()"),
    Death("import", "ModuleNotFoundError: No module named 'expert'", "import expert"),
    Death("name", "ImportError: cannot import name 'nothing' from 'os'",
          "from os import nothing"),
    Death("syntax", "SyntaxError: ", "def f(:\n"),
    Death("late_syntax", "SyntaxError: ", "exec(compile('def f(:', 'late.py', 'exec'))"),
    Death("cause", "KeyError: 'expert' (cause.py:4 in <module>)",
          "try:\n    {}['expert']\nexcept KeyError as e:\n    raise RuntimeError('bad') from e"),
    Death("handled", "RuntimeError: no weights (handled.py:6 in <module>)",
          "try:\n    {}['expert']\nexcept KeyError:\n    raise RuntimeError('no weights')"),
    Death("group", "ExceptionGroup: two readers (2 sub-exceptions) (group.py:3 in <module>), "
          "the first is ValueError: shard 3 is torn",
          "raise ExceptionGroup('two readers', [ValueError('shard 3 is torn'), OSError('gone')])"),
    Death("assertion", "AssertionError: shapes differ (assertion.py:3",
          "assert len(sys.argv) > 9, 'shapes differ'"),
    Death("two_lines", "ValueError: the first line",
          "raise ValueError('the first line\\nand more')"),
    Death("recursion", "RecursionError: maximum recursion depth exceeded",
          "def f():\n    f()\nf()"),
    Death("system_exit", "the shard list is empty", "sys.exit('the shard list is empty')"),
    Death("exit", "exited with code 7", "os._exit(7)"),
    Death("logged", IN_STEP.format("logged"),
          f"{STEP}import logging\ntry:\n    step()\nexcept ValueError:\n"
          "    logging.exception('training failed')\n    sys.exit(9)"),
    Death("thread", "a thread had ended: " + IN_STEP.format("thread"),
          f"{STEP}import threading\nt = threading.Thread(target=step)\nt.start()\nt.join()\n"
          "sys.exit(8)"),
    Death("child", IN_STEP.format("child"),
          f"{STEP}import multiprocessing\np = multiprocessing.Process(target=step)\np.start()\n"
          "p.join()\nsys.exit(p.exitcode)"),
    Death("pool", IN_STEP.format("pool"),
          f"{STEP}from concurrent.futures import ProcessPoolExecutor\n"
          "with ProcessPoolExecutor(1) as pool:\n    pool.submit(step).result()"),
    Death("coroutine", "TimeoutError: no reader came (coroutine.py:5 in read)",
          "import asyncio\nasync def read():\n    raise TimeoutError('no reader came')\n"
          "asyncio.run(read())"),
    Death("command", "CalledProcessError: Command '['false']' returned non-zero exit status 1. ("
          "command.py:4 in <module>)", "import subprocess\nsubprocess.run(['false'], check=True)"),
    Death("library", "OSError: libexpert.so.9: cannot open shared object file",
          "import ctypes\nctypes.CDLL('libexpert.so.9')"),
    Death("memory", "MemoryError", LIMIT.format("AS", 1 << 30) + "b'x' * (2 << 30)"),
    Death("files", "OSError: [Errno 24] Too many open files",
          LIMIT.format("NOFILE", 20) + "kept = [open('/dev/null') for _ in range(30)]"),
    Death("full", "OSError: [Errno 28] No space left on device",
          "with open('/dev/full', 'w', buffering=1) as file:\n    file.write('step 3\\n')"),
    Death("segfault", NATIVE.format("Segmentation fault (segfault.py:3 in <module>)"),
          "import ctypes; ctypes.string_at(0)"),
    Death("overflow", NATIVE.format("Segmentation fault (overflow.py:5 in __repr__)"),
          "sys.setrecursionlimit(1 << 30)\nclass Endless:\n"
          "    def __repr__(self): return repr([self])\nrepr(Endless())"),
    Death("abort", NATIVE.format("Aborted (abort.py:3 in <module>)"), "os.abort()"),
    Death("arithmetic", NATIVE.format("Floating point exception (arithmetic.py:3"),
          "os.kill(os.getpid(), 8)"),
    Death("bus", NATIVE.format("Bus error (bus.py:"),
          "import mmap\nwith open('mapped', 'w+b') as f:\n    f.truncate(4096)\n"
          "    m = mmap.mmap(f.fileno(), 4096)\n    f.truncate(0)\n    m[0]"),
    Death("killed", "killed by SIGKILL", "os.kill(os.getpid(), 9)"),
    Death("terminated", "killed by SIGTERM", shell="kill -TERM $$; sleep 60"),
    Death("seconds", "killed by SIGXCPU",
          "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 9))\nwhile True: pass"),
    Death("complaint", "cannot open data.bin", shell="echo cannot open data.bin >&2; exit 4"),
    Death("code", "exited with code 3", shell="exit 3"),
    Death("no_command", "trane: command not found", shell="trane --steps 9"),
    Death("denied", "Permission denied", shell="deaths/order"),
    Death("unset", "EXPERTS: unbound variable", shell="set -u\necho $EXPERTS"),
    Death("unended", "syntax error", shell="bash -c 'if true; then'\nexit 6"),
    Death("awk", "expert 9 is not there",
          shell="exec awk 'BEGIN { print \"expert 9 is not there\"; exit 5 }'"),
]  # fmt: skip

DATASET = """
import torch
class Broken(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, at):
        {}
if __name__ == "__main__":
    list(torch.utils.data.DataLoader(Broken(), num_workers=1))
"""
DEAR = [
    Death("loader_worker", "ValueError: sample 0 is torn (loader_worker.py:8 in __getitem__)",
          DATASET.format("raise ValueError(f'sample {at} is torn')")),
    Death("worker_assertion", "AssertionError: no sample (worker_assertion.py:8 in __getitem__)",
          DATASET.format("assert at > 9, 'no sample'")),
    Death("worker_killed", "exited unexpectedly", DATASET.format("os._exit(6)")),
    Death("shapes", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5) ("
          "shapes.py:4 in <module>)", "import torch\ntorch.ones(2, 3) @ torch.ones(4, 5)"),
    Death("no_cuda", "(no_cuda.py:4 in <module>)", "import torch\ntorch.ones(1, device='cuda:77')"),
    Death("gloo", "(gloo.py:5 in <module>)",
          "import datetime, torch.distributed as dist\nsoon = datetime.timedelta(seconds=1)\n"
          "dist.init_process_group('gloo', 'tcp://127.0.0.1:9', soon, 2, 1)"),
    Death("weights", "UnpicklingError", "import io, torch\ntorch.load(io.BytesIO(b'no weights'))"),
    Death("terminate", "no expert 9",
          c='#include <stdexcept>\nint main() { throw std::runtime_error("no expert 9"); }\n'),
    Death("c_assertion", "Assertion `experts > 9' failed",
          c="#include <cassert>\nint main(int experts, char**) { assert(experts > 9); }\n"),
    Death("c_segfault", "killed by SIGSEGV", c="int main() { *(volatile int*)0 = 9; }\n"),
    Death("twice_freed", "free(): double free detected",
          c="#include <cstdlib>\nint main() { void* p = malloc(9); free(p); free(p); }\n"),
]  # fmt: skip
HOARDS = "hoard = [bytearray(1 << 26) for _ in range(40)]"
BEYOND_LIMIT = [
    Death("out_of_memory", "out of memory: the kernel killed it (oom_kill of", HOARDS),
    Death("child_out_of_memory", "out of memory: the kernel killed a process beside it (oom_kill o",
          f"import subprocess\nsubprocess.run([sys.executable, '-c', '{HOARDS}'], check=True)"),
]  # fmt: skip
"""In a control group with a limit of `LIMIT_OF_GROUP` bytes."""
LIMIT_OF_GROUP = 1 << 30


def write_deaths(folder: Path, deaths: Sequence[Death]) -> Sequence[Death]:
    """Make the programs in a folder; those of the deaths that can be had here."""
    (folder / "deaths").mkdir()
    compiler = shutil.which("g++")
    found = [death for death in deaths if compiler or not death.c]
    for death in found:
        program = folder / "deaths" / death.kind
        if death.c:
            program.with_suffix(".cpp").write_text(death.c)
            assert compiler is not None
            subprocess.run([compiler, "-o", program, program.with_suffix(".cpp")], check=True)
        elif death.python:
            program.with_suffix(".py").write_text(BEGINS + death.python)
        else:
            program.with_suffix(".sh").write_text(death.shell + "\n")
    (folder / "deaths" / "order").write_text("".join(f"{death.kind}\n" for death in found))
    (folder / "die.sh").write_text(DIES.replace("PYTHON", sys.executable))
    return found


def options(deaths: Sequence[Death], name: str) -> list[str]:
    """For a run of these: one attempt each, after the last of which it is given up."""
    return [
        f"--run.name={name}",
        "--supervise.crash_grace=0.1",
        f"--supervise.keep_attempts={len(deaths)}",
        f"--supervise.max_restarts_without_progress={len(deaths) - 1}",
        '--hooks.give_up=echo "$KEMPNER_REASON" > hook.txt',
    ]


def untold(run: RunDirectory, deaths: Sequence[Death], folder: Path) -> list[str]:
    """What is not named where one looks, after each of the attempts; `folder` is for copies."""
    interruptions = {one.attempt: one for one in read_run(run).report.interruptions}
    found = []
    for attempt, death in enumerate(deaths, 1):
        if attempt not in interruptions:
            return [*found, f"{death.kind}: there was no attempt {attempt}"]
        one, then = interruptions[attempt], _as_after(run, attempt, folder)
        verdict, job = triage_run(then), Job(then.path)
        status = RunFollower(then, JobWatch(None, wait=False), patient=True).read()
        told = {
            "report": f"{one.cause} {one.detail}",
            "triage": verdict.first_error.raised,
            "status": json.dumps(status.to_json(), ensure_ascii=False),
            "Job.reason": job.reason,
            "Job.failure": job.failure,
        }
        plain = {where: text.replace('\\"', '"') for where, text in told.items()}
        found += [f"{death.kind}: {w}: {t}" for w, t in plain.items() if death.named not in t]
        ranks = (one.place.rank, verdict.where.rank, one.place.steps_lost)
        found += [f"{death.kind}: {ranks}"] if ranks != (1, 1, None) else []
        found += [f"{death.kind}: {w} has a secret" for w, t in told.items() if SECRET in t]
    return found


def _as_after(run: RunDirectory, attempt: int, folder: Path) -> RunDirectory:
    """The run's directory, with what the ledger had by the end of an attempt."""
    then = RunDirectory(folder / str(attempt) / run.path.name)
    then.path.mkdir(parents=True)
    then.attempts.mkdir()
    for path in [*run.path.iterdir(), *map(run.attempt, range(1, attempt + 1))]:
        if path not in (run.ledger, run.attempts):
            (then.path / path.relative_to(run.path)).symlink_to(path)
    kept = []
    for line in run.ledger.read_text().splitlines(keepends=True):
        kept.append(line)
        event = json.loads(line)
        if (event["event"], event["attempt"]) == ("attempt_failed", attempt):
            break
    then.ledger.write_text("".join(kept))
    return then


def kept_of(run: RunDirectory, attempt: int, rank: int) -> str:
    """What a rank has printed, in a file for its owner alone."""
    path = run.output(attempt, rank)
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_text()


def last_reason(run: RunDirectory) -> str:
    """Why the last attempt ended."""
    ends = [json.loads(line) for line in run.ledger.read_text().splitlines()]
    return str([end["reason"] for end in ends if end["event"] == AttemptEnded.name][-1])
