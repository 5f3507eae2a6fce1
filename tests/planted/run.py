"""Do the tests notice when kempner has a bug? Usage: run.py [--only ID...] [--record FILE.jsonl]

`bugs.toml` has single decisions gone wrong, each with the tests that should catch it: see bugs.py.
What git tracks is copied once, and all tests that are named must pass there. Then each bug is
planted into the copy, its tests run up to the first that fails, and the file is put back.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import records  # noqa: E402
from patience import scaled  # noqa: E402
from planted.bugs import Bug, Length, length_of, place, read_bugs, read_sources  # noqa: E402

LIMIT = scaled(300.0)  # seconds for the tests of one bug
# Imported once, and not in each process that runs tests.
SLOW_TO_IMPORT = ("torch.distributed.fsdp", "torch.distributed.checkpoint", "hypothesis")
FOLDER = re.compile(r"/[^\s'\"]+/(?=[^/\s'\"]+)")  # of this machine, up to a file's own name
OUTCOMES: Mapping[int | None, str] = {0: "survived", 1: "caught"}  # by the exit code of pytest


@dataclass(frozen=True)
class Outcome:
    """`outcome` is "caught", "survived" or "unclear": not ended in time, or no test was run.
    `why` is what the test says: on a slow machine it may have failed for want of time."""

    id: str
    outcome: str
    test: str
    why: str
    seconds: float


class Tree:
    """A copy of what git tracks, into which bugs are planted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in filter(None, tracked.split("\0")):
            if (ROOT / name).exists():  # or it was deleted and that is not committed yet
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, path / name, follow_symlinks=False)
        self._sources = read_sources(path)
        self._moments = count(int(time.time()))
        self.environment = {**os.environ, "PYTHONPATH": str(path)}

    def place(self, bug: Bug) -> Path:
        """The file that the bug belongs to. Raises `SystemExit` unless there is exactly one."""
        return place(bug, self._sources)

    @contextmanager
    def planted(self, bug: Bug) -> Iterator[None]:
        """While it is open, the copy has the bug."""
        file = self.place(bug)
        text = bug.planted_in(self._sources[file])
        compile(text, str(file), "exec")
        self._write(file, text)
        try:
            yield
        finally:
            self._write(file, self._sources[file])

    def check_imports(self) -> None:
        """Raise `SystemExit` unless python takes kempner from the copy, wherever it starts."""
        say = [sys.executable, "-c", "import kempner; print(kempner.__file__)"]
        nested = [sys.executable, "-c", f"import subprocess; subprocess.run({say!r})"]
        for command in (say, nested):
            found = subprocess.check_output(command, cwd="/", env=self.environment, text=True)
            if Path(found.strip()) != self.path / "kempner" / "__init__.py":
                raise SystemExit(f"kempner comes from elsewhere: {found}")

    def test(self, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        """The exit code of pytest, None if it did not end in time; and what it printed."""
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            child = os.fork()
            if child == 0:
                self._become_pytest(tests, output.fileno())
            ended = os.pidfd_open(child)
            try:
                in_time = bool(select.select([ended], [], [], limit)[0])
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os.close(ended)
                self._end_what_is_left()
            output.seek(0)
            return (code if in_time else None), output.read()

    def _become_pytest(self, tests: Sequence[str], output: int) -> NoReturn:
        """In a forked process: as `python -m pytest` in the copy, but that torch is there."""
        code = 99
        try:
            os.setsid()
            for ours, its in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
                os.dup2(ours, its)
            os.chdir(self.path)
            os.environ |= self.environment
            sys.path[0] = str(self.path)
            result = pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests])
            assert Path(sys.modules["kempner"].__file__ or "").is_relative_to(self.path)
            sys.stdout.flush()
            code = result
        finally:
            os._exit(code)

    def _end_what_is_left(self) -> None:
        """Kill the processes of a test that did not come to its own end."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("PYTHONPATH") == str(self.path):
                    process.kill()

    def _write(self, file: Path, text: str) -> None:
        # A second of its own: Python compares time and size to know whether its cache is stale.
        file.write_text(text)
        moment = next(self._moments)
        os.utime(file, (moment, moment))


def run_without_bug(tree: Tree, bugs: Sequence[Bug]) -> float:
    """Seconds that all tests that are named take. Raises `SystemExit` unless they pass."""
    named = list(dict.fromkeys(test for bug in bugs for test in bug.tests))
    tests = [test for test in named if "::" not in test or test.partition("::")[0] not in named]
    began = time.monotonic()
    code, output = tree.test(tests, 12 * LIMIT)
    if code != 0:
        raise SystemExit(f"the tests do not pass without a bug (exit code {code}):\n{output}")
    return time.monotonic() - began


def run_with(tree: Tree, bug: Bug) -> Outcome:
    """Plant a bug and run its tests."""
    began = time.monotonic()
    with tree.planted(bug):
        code, output = tree.test(bug.tests, LIMIT)
    seconds = round(time.monotonic() - began, 1)
    outcome, test, why = OUTCOMES.get(code, "unclear"), "", ""
    if outcome == "caught":
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", output, re.MULTILINE)
        said = re.search(r"^E +(.*)", output, re.MULTILINE)
        test = failed[1] if failed else ""
        why = said[1][:200] if said else "a test did not end"
    elif outcome == "unclear":
        why = f"pytest ended with {code}: {output[-500:]}"
    return Outcome(bug.id, outcome, test, FOLDER.sub("...", why), seconds)


def record(file: Path, outcome: Outcome, planted: Path) -> None:
    """The row of a bug that was planted into this file of the project; bugs that are no longer in
    the list lose theirs."""
    command = f"python tests/planted/run.py --only {outcome.id}"
    row = asdict(outcome) | records.header(["/".join(planted.parts[:2])], command)
    records.write(file, [row], by=("id",), only={"id": [bug.id for bug in read_bugs()]})


def caught_by(outcomes: Iterable[Outcome]) -> Mapping[Length, int]:
    """How many bugs are caught by a test that each command runs; a longer one runs all of these."""
    caught = Counter(length_of(o.test) for o in outcomes if o.outcome == "caught" and o.test)
    return dict(zip(Length, accumulate(caught[length] for length in Length), strict=True))


def in_words(counts: Mapping[Length, int]) -> str:
    return "caught by " + ", ".join(f"`{key.value}`: {count}" for key, count in counts.items())


def main() -> int:
    """1 if a bug was not caught that is not known to survive, or one was that is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[], metavar="ID")
    parser.add_argument("--record", type=Path, metavar="FILE.jsonl")
    asked = parser.parse_args()
    began, outcomes = time.monotonic(), list[Outcome]()
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in SLOW_TO_IMPORT:
        importlib.import_module(module)
    bugs = read_bugs(asked.only)
    records.commit()  # remembered: it may be another one in hours
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Tree(Path(folder).resolve() / "tree")
        for bug in bugs:
            tree.place(bug)
        tree.check_imports()
        seconds = run_without_bug(tree, bugs)
        print(f"without a bug all named tests pass, in {seconds:.0f} s", flush=True)
        for bug in bugs:
            outcomes.append(run_with(tree, bug))
            print(f"{outcomes[-1].outcome:9} {bug.id}", flush=True)
            if asked.record is not None:
                record(asked.record, outcomes[-1], tree.place(bug).relative_to(tree.path))
    known = {bug.id: "survived" if bug.survives else "caught" for bug in bugs}
    for o in outcomes:
        remark = "" if o.outcome == known[o.id] else f"  <- {known[o.id]} by the list"
        print(f"{o.id:56}  {o.outcome:8} {o.seconds:6.1f} s  {o.test}{remark}")
    counts = dict(Counter(outcome.outcome for outcome in outcomes))
    print(f"\n{len(bugs)} bugs: {counts}, in {time.monotonic() - began:.0f} s")
    print(in_words(caught_by(outcomes)))
    return int(any(outcome.outcome != known[outcome.id] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
