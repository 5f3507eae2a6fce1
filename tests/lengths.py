"""Which tests `make test` runs, in which order, and until when.

    python tests/lengths.py [COSTS.jsonl]

chooses anew and writes `chosen.txt`; with a file that `cost.py` wrote, the costs are taken from it
first, and `costs.json` is written, too.

`make test` runs every test that is cheap, and of the dear ones as few as exercise every promise of
docs/promises.toml, on ranks or on the real Slurm where the promise has such a test, and as notice
every planted bug that a test notices for a few seconds. `make check` runs all, and `make long` the
drills.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from promises_kept import NO_TIME, Promise, function_of, read_promises
from records import commit, header, read

TESTS = Path(__file__).parent
ROOT = TESTS.parent
COSTS = TESTS / "costs.json"
CHOSEN = TESTS / "chosen.txt"

CHEAP = (1.0, 3.0)
"""CPU seconds and seconds below which a test, all of its cases together, is always run."""

WAITING = 1 / 6
"""What a second costs that a test only waits, in CPU seconds: others run meanwhile."""

WORTH_A_BUG = 10.0
"""What a test may cost, in CPU seconds, that is run because it notices a planted bug."""

ON_RANKS = ("tests/distributed/", "tests/slurm/", "tests/drills/")

UNMEASURED = (5.0, 20.0)
"""What a test on ranks is taken to cost, in CPU seconds and seconds, until it is measured."""

NEAREST_SECONDS = 600.0
"""How long, by the costs, the tests nearest to a change may take that are run whatever the time."""

Cost = tuple[float, float]
"""CPU seconds and seconds of a test function, all of its cases together."""


# Choosing


def choose(
    promises: Sequence[Promise], costs: Mapping[str, Cost], bugs: Iterable[Sequence[str]] = ()
) -> list[str]:
    """The dear tests that `make test` runs, sorted: a small set that exercises every promise, and
    notices what it can of the `bugs`, of each of which the tests are given that notice it.

    A greedy weighted set cover, after which every test is dropped that the others make superfluous.
    A test without a cost is cheap, and so always run.
    """
    wanted = [want for entry in promises if (want := witnesses(entry))]
    wanted += [want for tests in bugs if (want := _worth_it(tests, costs))]
    missing = [want for want in wanted if want <= costs.keys()]
    chosen: set[str] = set()
    while left := [want for want in missing if not want & chosen]:
        serves = Counter(test for want in left for test in want)
        chosen.add(min(serves, key=lambda test: (_price(costs[test]) / serves[test], test)))
    for test in sorted(chosen, key=lambda test: (-_price(costs[test]), test)):
        if all(want & (chosen - {test}) for want in missing):
            chosen.remove(test)
    return sorted(chosen)


def witnesses(entry: Promise) -> frozenset[str]:
    """The tests of which one must run: those on ranks or on Slurm, if the promise has any."""
    tests = [] if entry.get("drill") else entry.get("tests", [])
    return frozenset([test for test in tests if test.startswith(ON_RANKS)] or tests)


def _worth_it(tests: Sequence[str], costs: Mapping[str, Cost]) -> frozenset[str]:
    """Those that are not too dear to be run for what they notice."""
    functions = map(function_of, tests)
    return frozenset(t for t in functions if _price(costs.get(t, (0.0, 0.0))) <= WORTH_A_BUG)


def _price(cost: Cost) -> float:
    cpu, seconds = cost
    return cpu + WAITING * seconds


def dear(lines: Iterable[Mapping[str, Any]]) -> dict[str, Cost]:
    """The costs of the tests that are not cheap, from the lines that `cost.py` wrote."""
    sums: dict[str, Cost] = {}
    for line in lines:
        cpu, seconds = sums.get(test := function_of(line["test"]), (0.0, 0.0))
        sums[test] = (cpu + line["cpu"], seconds + line["seconds"])
    return {
        test: (round(cpu, 1), round(seconds, 1))
        for test, (cpu, seconds) in sorted(sums.items())
        if cpu >= CHEAP[0] or seconds >= CHEAP[1]
    }


def read_costs(known: Iterable[str] = ()) -> dict[str, Cost]:
    """The dear tests with what they cost when they were measured.

    Of the tests that are `known`, those on ranks that were never measured count as dear, too: a few
    that are run because nothing is known of them take minutes.
    """
    facts = json.loads(COSTS.read_text())
    tests, cheap = facts["tests"], frozenset(facts["cheap on ranks"])
    found = {test: (cpu, seconds) for test, (cpu, seconds) in tests.items()}
    new = (test for test in known if test.startswith(ON_RANKS) and test not in cheap)
    return dict.fromkeys(new, UNMEASURED) | found


def read_chosen() -> list[str]:
    return CHOSEN.read_text().split()


# The tests nearest to a change


def nearest(changed: Collection[str], sources: Mapping[str, str]) -> list[str]:
    """The test files that changed, then those that name a module that changed.

    `changed` are paths from the root; `sources` is the text of every test file by its path.
    """
    modules = [
        path.removesuffix(".py").replace("/", ".")
        for path in sorted(changed)
        if path.startswith("kempner/") and path.endswith(".py")
    ]
    imported = _imports_of(modules)
    own = [path for path in sorted(sources) if path in changed]
    return own + [
        path for path in sorted(sources) if path not in changed and imported.search(sources[path])
    ]


def _imports_of(modules: Sequence[str]) -> re.Pattern[str]:
    forms = [re.escape(module) for module in modules]
    forms += [
        rf"from {re.escape(package)} import [^\n]*\b{re.escape(name)}"
        for package, _, name in (module.rpartition(".") for module in modules)
    ]
    return re.compile(rf"(?:{'|'.join(forms)})\b") if forms else re.compile(r"(?!)")


def changed_since(base: str) -> list[str]:
    """The paths that differ from a commit."""
    command = ["git", "diff", "--name-only", base]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=-1, text=True).stdout.split()


# In pytest


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("kempner")
    group.addoption("--chosen", action="store_true", help="only the tests of `make test`")
    group.addoption("--rest", action="store_true", help="only those that `make test` leaves out")
    group.addoption("--nearest", metavar="COMMIT", help="what has changed since comes first")
    group.addoption("--turn", type=int, default=0, help="begin with another file each time")
    group.addoption("--until", type=float, help="begin no test after this time of the clock, in s")
    group.addoption("--passed", metavar="FILE", help="leave out what this record says has passed")


@dataclass(eq=False)  # a plugin is known by identity
class Lengths:
    """Leaves out, orders and ends the tests as the options say."""

    config: pytest.Config
    first: frozenset[str] = frozenset()
    """The files nearest to the change, which are run whatever the time."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        option = self.config.option
        if option.chosen or option.rest:
            known = {function_of(item.nodeid) for item in items}
            left_out = read_costs(known).keys() - set(read_chosen())
            self._keep(items, lambda item: (function_of(item.nodeid) in left_out) == option.rest)
        if passed := _passed(self.config):
            self._keep(items, lambda item: item.nodeid not in passed)
        files = sorted({_file(item.nodeid) for item in items})
        turn = option.turn % len(files) if files else 0
        place = {name: n for n, name in enumerate(files[turn:] + files[:turn])} if turn else {}
        if option.nearest:
            self.first = self._nearest(files, {function_of(item.nodeid) for item in items})
        key = lambda item: (_file(item.nodeid) not in self.first, place.get(_file(item.nodeid), 0))  # noqa: E731
        items.sort(key=key)

    def _keep(self, items: list[pytest.Item], wanted: Any) -> None:
        self.config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
        items[:] = [item for item in items if wanted(item)]

    def _nearest(self, files: Sequence[str], tests: Collection[str]) -> frozenset[str]:
        """As many of the nearest files as `NEAREST_SECONDS` have room for."""
        sources = {name: (ROOT / name).read_text() for name in files}
        seconds = Counter[str]()
        for test, (_, wall) in read_costs(tests).items():
            seconds[_file(test)] += wall  # type: ignore[assignment]
        found, left = [], NEAREST_SECONDS
        for name in nearest(changed_since(self.config.option.nearest), sources):
            left -= seconds[name]
            if left < 0:
                break
            found.append(name)
        return frozenset(found)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        until = self.config.option.until
        if until and time.time() > until and _file(item.nodeid) not in self.first:
            pytest.skip(NO_TIME)


@dataclass(eq=False)  # a plugin is known by identity
class Record:
    """Sees the reports of all workers: says what there was no time for, and what has passed."""

    config: pytest.Config
    late: set[str] = field(default_factory=set)
    bad: set[str] = field(default_factory=set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and NO_TIME in str(report.longrepr):
            self.late.add(_file(report.nodeid))
            self.bad.add(report.nodeid)
        elif report.failed:
            self.bad.add(report.nodeid)
        over = report.when == "teardown" and report.nodeid not in self.bad
        if over and self.config.option.passed:  # at once: a run that is killed has done that much
            line = {"test": report.nodeid, "commit": commit(), "time": round(time.time())}
            with open(self.config.option.passed, "a") as record:
                record.write(json.dumps(line) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.late:
            terminalreporter.section("no time was left for")
            terminalreporter.write_line("\n".join(sorted(self.late)))


def watch(config: pytest.Config) -> None:
    """Do as the options say. A session that a test starts in this process has its own."""
    config.pluginmanager.register(Lengths(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(config))


def _passed(config: pytest.Config) -> frozenset[str]:
    """The tests that a record says have passed at this commit."""
    record = Path(config.option.passed or os.devnull)
    rows = read(record) if record.is_file() else []
    now = commit() if rows else ""
    return frozenset(row["test"] for row in rows if row["commit"] == now != "")


def _file(test: str) -> str:
    return test.partition("::")[0]


def main(*measured: str) -> None:
    for file in measured:
        lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        facts = {
            **header(["kempner", "tests"], "KEMPNER_TEST_COSTS=FILE make check"),
            "unit": "CPU seconds and seconds of all cases of a function; those of the cheap "
            "functions are left out",
            "all": [round(sum(line[key] for line in lines)) for key in ("cpu", "seconds")],
        }
        rows = (f"  {json.dumps(test)}: {json.dumps(cost)}" for test, cost in dear(lines).items())
        cheap = sorted(
            {test for line in lines if (test := function_of(line["test"])).startswith(ON_RANKS)}
            - dear(lines).keys()
        )
        head = json.dumps(facts | {"cheap on ranks": cheap}, indent=1).removesuffix("\n}")
        COSTS.write_text(f'{head},\n "tests": {{\n' + ",\n".join(rows) + "\n }\n}\n")
    CHOSEN.write_text("\n".join(chosen_now()) + "\n")


def chosen_now() -> list[str]:
    """The choice as the promises, the planted bugs and the costs are now."""
    promises, bugs = read_promises(), read_tests_of_bugs()
    known = {test for entry in promises for test in witnesses(entry)}
    known |= {function_of(test) for tests in bugs for test in tests}
    return choose(promises, read_costs(known), bugs)


def read_tests_of_bugs() -> list[Sequence[str]]:
    """The tests of each planted bug."""
    from planted.bugs import read_bugs  # which asks here what `make test` runs

    return [bug.tests for bug in read_bugs()]


if __name__ == "__main__":
    main(*sys.argv[1:])
