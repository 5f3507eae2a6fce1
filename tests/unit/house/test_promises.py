"""Every promise of docs/promises.toml has its test, which exists, and which CI really runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import promises_kept
import pytest
from patience import scaled
from promises_kept import (
    ROOT,
    Collected,
    Promise,
    collect,
    faults_of_the_list,
    faults_of_the_tests,
    read_promises,
)

sys.path.append(str(ROOT / "scripts" / "docs"))
import promise_page


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    """The tests that there are."""
    return collect(read_promises(), tmp_path_factory.mktemp("collected") / "answer.json")


# The list


def test_every_promise_is_listed() -> None:
    assert faults_of_the_list(read_promises()) == []


def test_the_page_is_made_from_the_list() -> None:
    hint = "run `python scripts/docs/promise_page.py`"
    assert promise_page.PAGE.read_text() == promise_page.page(read_promises()), hint


def entry(name: str, **keys: object) -> Promise:
    return {"id": name, "promise": "It holds.", **keys}


A1, A2 = entry("A1", tests=["test_x.py::test_x"]), entry("A2", open="All of it.")


@pytest.mark.parametrize(
    ("promises", "faults"),
    [
        ([A1, A2], []),
        ([A1, {**A2, "tests": ["test_x.py::test_y"]}], []),
        ([A1, entry("A2", out_of_scope="It is not ours.")], []),
        ([A1], ["A2: there is no such promise"]),
        ([A1, A2, A2], ["A2: there are 2 entries"]),
        ([A1, A2, entry("A3", open="All.")], ["A3: the id is unknown"]),
        ([A1, entry("A2")], ["A2: it has no `tests`, no `open` and no `out_of_scope`"]),
        ([A1, {"id": "A2", "open": "All."}], ["A2: it promises nothing"]),
        ([A1, entry("A2", tests=[])], ["A2: `tests` is empty, or of the wrong type"]),
        ([A1, entry("A2", tests="test_x")], ["A2: `tests` is empty, or of the wrong type"]),
        ([A1, {**A2, "test": ["test_x.py::test_x"]}], ["A2: `test` means nothing"]),
        ([A1, {**A2, "out_of_scope": "No."}], ["A2: `out_of_scope` stands alone"]),
    ],
)
def test_what_is_wrong_with_the_list(promises: list[Promise], faults: list[str]) -> None:
    assert faults_of_the_list(promises, ids=("A1", "A2")) == faults


# The tests that it names


def test_the_tests_of_every_promise_are_there(collected: Collected) -> None:
    assert faults_of_the_tests(read_promises(), collected) == []


THERE = Collected({"a.py::test_often", "a.py::test_in_part_a_drill"}, {"a.py::test_drill"})


@pytest.mark.parametrize(
    ("names", "drill", "fault"),
    [
        (["test_often"], False, ""),
        (["test_often", "test_drill"], False, ""),
        (["test_in_part_a_drill"], False, ""),
        (["test_drill"], True, ""),
        (["test_often", "test_gone"], False, "pytest does not find a.py::test_gone"),
        (["test_drill"], False, "`make check` runs none of its tests; say `drill = true`"),
        (
            ["test_often", "test_drill"],
            True,
            "`make check` runs a test of it, so leave `drill` out",
        ),
    ],
)
def test_what_is_wrong_with_the_tests_of_a_promise(
    names: list[str], drill: bool, fault: str
) -> None:
    promise = entry("A1", tests=[f"a.py::{name}" for name in names], drill=drill)
    assert faults_of_the_tests([promise], THERE) == ([f"A1: {fault}"] if fault else [])


DRILLS = """
def pytest_collection_modifyitems(config, items):
    drills = [item for item in items if "drill" in item.nodeid]
    items[:] = [item for item in items if item not in drills]
    config.hook.pytest_deselected(items=drills)
"""
SOME = """
import pytest

@pytest.mark.parametrize("kind", ["often", "drill"])
def test_in_part(kind): pass

def test_drill(): pass
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Tests of which some are left out as drills."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(DRILLS)
    (tmp_path / "a.py").write_text(SOME)
    return tmp_path


def test_what_pytest_finds_is_told_by_function_and_drills_apart(tree: Path) -> None:
    promises = [entry("A1", tests=["a.py::test_in_part", "gone.py::test_it"])]
    found = collect(promises, tree / "answer.json", tree)
    assert found == Collected(["a.py::test_in_part"], ["a.py::test_drill"])
    assert faults_of_the_tests(promises, found) == ["A1: pytest does not find gone.py::test_it"]


def test_a_file_that_cannot_be_collected_is_told(tree: Path) -> None:
    (tree / "b.py").write_text("import nothing_of_that_name")
    with pytest.raises(AssertionError, match="nothing_of_that_name"):
        collect([entry("A1", tests=["b.py::test_x"])], tree / "answer.json", tree)


# That they ran

CONFTEST = """
import sys
from pathlib import Path
sys.path.append({tests!r})
import promises_kept

def pytest_configure(config):
    promises_kept.watch(config, Path(__file__).with_name("promises.toml"))
"""
TESTS = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_skipped_in_part(n):
    if n == 2:
        pytest.skip("there is no cluster")

@pytest.mark.xfail(reason="not yet")
def test_expected_to_fail():
    raise AssertionError

def test_run():
    pass
"""
REQUIRED = {"KEMPNER_REQUIRE_SLURM": "1"}


def session(
    folder: Path, promised: str, environ: dict[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    """A session of pytest in which one test is promised, and others are not."""
    (folder / "conftest.py").write_text(CONFTEST.format(tests=str(ROOT / "tests")))
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "promises.toml").write_text(
        f'[[promise]]\nid = "A1"\npromise = "It holds."\ntests = ["test_it.py::{promised}"]\n'
    )
    ours = ("KEMPNER_", "PYTEST_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**inherited, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ},
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )


@pytest.mark.parametrize(
    ("promised", "options", "reason"),
    [
        (
            "test_skipped_in_part",
            ("-p", "xdist", "--numprocesses=1"),
            "test_it.py::test_skipped_in_part[2] was skipped: there is no cluster",
        ),
        (
            "test_expected_to_fail",
            (),
            "test_it.py::test_expected_to_fail was skipped: it is expected to fail not yet",
        ),
    ],
)
def test_a_promise_whose_test_is_skipped_fails_the_session(
    tmp_path: Path, promised: str, options: tuple[str, ...], reason: str
) -> None:
    done = session(tmp_path, promised, REQUIRED, *options)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert f'A1 is promised ("It holds."), but its test {reason}\n' in done.stdout
    assert done.stdout.count("is promised") == 1
    assert " failed" not in done.stdout


@pytest.mark.parametrize(
    ("promised", "environ"), [("test_run", REQUIRED), ("test_skipped_in_part", {})]
)
def test_other_skips_do_no_harm(tmp_path: Path, promised: str, environ: dict[str, str]) -> None:
    done = session(tmp_path, promised, environ)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    assert "is promised" not in done.stdout


def test_the_projects_own_sessions_are_watched(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[pytest.Config] = []
    monkeypatch.setattr(promises_kept, "watch", watched.append)
    ours = str(ROOT / "tests" / "conftest.py")
    plugins = pytestconfig.pluginmanager.get_plugins()
    (conftest,) = (plugin for plugin in plugins if getattr(plugin, "__file__", None) == ours)
    conftest.pytest_configure(pytestconfig)
    assert watched == [pytestconfig]
