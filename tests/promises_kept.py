"""Whether docs/promises.toml is whole, whether its tests are there, and whether they ran.

    python tests/promises_kept.py ANSWER FILE...

writes what pytest collects from these files, as JSON, to the file ANSWER.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli

ROOT = Path(__file__).resolve().parents[1]
PROMISES = ROOT / "docs" / "promises.toml"

Promise = Mapping[str, Any]

NO_TIME = "no time left"
"""Why a test is skipped that a run of limited length no longer begins: lengths.py."""

SECTIONS = {"A": 16, "B": 13, "C": 7, "D": 15, "E": 18, "F": 11, "G": 23, "H": 3, "I": 21, "J": 14}
IDS = tuple(f"{letter}{n}" for letter, count in SECTIONS.items() for n in range(1, count + 1))
"""Every promise that there must be an entry for."""

KINDS: Mapping[str, type] = {
    "id": str,
    "promise": str,
    "tests": list,
    "open": str,
    "out_of_scope": str,
    "drill": bool,
}


def read_promises(path: Path = PROMISES) -> list[Promise]:
    """The entries of promises.toml, whatever is in them."""
    promises: list[Promise] = tomli.loads(path.read_text())["promise"]
    return promises


# Is it whole?


def faults_of_the_list(promises: Sequence[Promise], ids: Sequence[str] = IDS) -> list[str]:
    """What is wrong with the entries themselves, a sentence each."""
    count = Counter(entry.get("id") for entry in promises)
    faults = [f"{name}: there is no such promise" for name in ids if not count[name]]
    faults += [f"{name}: there are {n} entries" for name, n in count.items() if n > 1]
    faults += [f"{name}: the id is unknown" for name in count if name not in ids]
    return faults + [f"{e.get('id')}: {fault}" for e in promises for fault in _faults_of(e)]


def _faults_of(entry: Promise) -> Iterable[str]:
    for key, value in entry.items():
        if key not in KINDS:
            yield f"`{key}` means nothing"
        elif not isinstance(value, KINDS[key]) or not value:
            yield f"`{key}` is empty, or of the wrong type"
    if "promise" not in entry:
        yield "it promises nothing"
    if not entry.keys() & {"tests", "open", "out_of_scope"}:
        yield "it has no `tests`, no `open` and no `out_of_scope`"
    if "out_of_scope" in entry and entry.keys() & {"tests", "open"}:
        yield "`out_of_scope` stands alone"


# Are its tests there?


@dataclass(frozen=True)
class Collected:
    """Tests by file and function: what `make check` runs, and what `make long` alone runs."""

    tests: Collection[str]
    drills: Collection[str]


def faults_of_the_tests(promises: Sequence[Promise], collected: Collected) -> list[str]:
    """Tests that are not there, and promises that nothing holds from day to day."""
    faults = []
    for entry in promises:
        named, only_drills = entry.get("tests", ()), entry.get("drill", False)
        for test in named:
            if test not in collected.tests and test not in collected.drills:
                faults.append(f"{entry['id']}: pytest does not find {test}")
        if only_drills and any(test in collected.tests for test in named):
            faults.append(f"{entry['id']}: `make check` runs a test of it, so leave `drill` out")
        if named and not only_drills and all(test in collected.drills for test in named):
            faults.append(f"{entry['id']}: `make check` runs none of its tests; say `drill = true`")
    return faults


def collect(promises: Sequence[Promise], answer: Path, root: Path = ROOT) -> Collected:
    """What pytest finds in the files that the promises name, asked in a process of its own.

    That writes it to the file `answer`. Raises `AssertionError` if one of them cannot be collected.
    """
    named = {test.partition("::")[0] for entry in promises for test in entry.get("tests", ())}
    files = sorted(file for file in named if (root / file).is_file())
    ours = ("KEMPNER_DRILLS", "PYTEST_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, __file__, str(answer), *files]
    done = subprocess.run(
        command, cwd=root, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Collected(**json.loads(answer.read_text()))


def function_of(test: str) -> str:
    """The id of a test without its parameters."""
    return test.partition("[")[0]


class _Listing:
    """Notes what is collected, and what is left out as a drill."""

    def __init__(self) -> None:
        self.tests, self.left_out = set[str](), set[str]()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.left_out |= {function_of(item.nodeid) for item in items}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests |= {function_of(item.nodeid) for item in session.items}


def main(answer: str, *files: str) -> int:
    listing = _Listing()
    quiet = ("--collect-only", "--quiet", "--quiet", "-p", "no:cacheprovider")
    status = pytest.main([*quiet, *files], plugins=[listing])
    collected = Collected(sorted(listing.tests), sorted(listing.left_out - listing.tests))
    Path(answer).write_text(json.dumps(asdict(collected)))
    return status


# Did they run?


def watch(config: pytest.Config, path: Path = PROMISES) -> None:
    """With KEMPNER_REQUIRE_SLURM=1 a session in which a test of a promise is skipped fails."""
    if os.environ.get("KEMPNER_REQUIRE_SLURM") == "1" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_NoSkips(read_promises(path)))


@dataclass(eq=False)  # a plugin is known by identity
class _NoSkips:
    """Sees the reports of all workers, and fails the session as a whole."""

    promises: Sequence[Promise]
    broken: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped or NO_TIME in str(report.longrepr):
            return
        for entry in self.promises:
            if function_of(report.nodeid) in entry.get("tests", ()):
                self.broken.append(
                    f'{entry["id"]} is promised ("{entry["promise"]}"), but its test '
                    f"{report.nodeid} was skipped: {_reason(report)}"
                )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.broken and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for sentence in self.broken:
            terminalreporter.write_line(sentence, red=True)


def _reason(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"it is expected to fail {report.wasxfail}".strip()
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
