"""`make versions`: which Pythons and torches are tried, and how their tests are counted."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version
from python_versions import Pair, count, pairs

OLD, NEW = (Version("3.11.2"), "/usr/bin/python3.11"), (Version("3.13.0"), "/opt/python3.13")
PINNED = Version("2.13.0")


def test_the_pinned_torch_runs_on_every_python_and_the_ends_on_the_oldest() -> None:
    torches = [Version(name) for name in ("2.13.0", "2.9.0", "2.15.0", "2.10.0")]
    found = pairs([NEW, OLD, (OLD[0], "/elsewhere/python3.11")], torches, PINNED)
    assert [(pair.python, str(pair.torch)) for pair in found] == [
        (OLD[0], "2.13.0"),
        (NEW[0], "2.13.0"),
        (OLD[0], "2.9.0"),
        (OLD[0], "2.15.0"),
    ]
    assert pairs([OLD], [PINNED], PINNED) == [Pair(*OLD, PINNED)]


def test_what_failed_is_named(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    results.write_text(
        "<testsuites><testsuite>"
        "<testcase classname='a' name='passes'/>"
        "<testcase classname='a' name='is_skipped'><skipped/></testcase>"
        "<testcase classname='a' name='fails'><failure/></testcase>"
        "<testcase classname='a' name='breaks'><error>why</error></testcase>"
        "</testsuite></testsuites>"
    )
    assert count(results) == {"passed": 1, "skipped": 1, "failed": ["a::fails", "a::breaks"]}
