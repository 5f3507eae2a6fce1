"""Records say where each row comes from, and how old it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import records
from records import ROOT, ages, command_line, replaced, report

sys.path.append(str(ROOT / "benchmarks"))
import measure

RECORDS = sorted(records.DOCS.glob("*.jsonl"))
AUTHOR = ("-c", "user.name=nn", "-c", "user.email=nn@example.org")


def row(name: str, case: int, found: str = "") -> dict[str, Any]:
    return {"drill": name, "case": case, "found": found}


def test_a_new_row_replaces_the_old_one_and_no_other() -> None:
    old = [row("a", 1, "old"), row("a", 2), row("a", 1, "old, too"), row("b", 1)]
    new = [row("a", 1, "new"), row("c", 1)]
    assert replaced(old, new, ("drill", "case")) == [*new, row("a", 2), row("b", 1)]
    assert replaced(old, new, ("drill",)) == [*new, row("b", 1)]
    assert replaced(old, new, ()) == new
    assert replaced(old, [row("c", 1)], ("drill",)) == [*old, row("c", 1)]


def test_a_file_takes_rows_of_several_writers(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    records.write(file, [row("a", 1), row("a", 2)], by=("drill", "case"))
    records.write(file, [row("a", 2, "new")], by=("drill", "case"))
    assert records.read(file) == [row("a", 1), row("a", 2, "new")]
    records.write(file, [row("b", 3)], by=("drill", "case"), only={"case": (2, 3)})
    assert records.read(file) == [row("a", 2, "new"), row("b", 3)]


def test_the_command_is_as_it_is_called_in_the_project() -> None:
    script = str(ROOT / "benchmarks" / "write.py")
    words = [script, "--record", "x.jsonl", "--rounds", "2", "--folder=/x", "--ways", "a b"]
    assert command_line(words) == "python benchmarks/write.py --rounds 2 --ways 'a b'"


def test_rows_are_told_by_how_many_commits_changed_their_code() -> None:
    since = {"1" * 12: 3, "2" * 12: 40, "3" * 12: 0}

    def told(name: str, commit: str) -> dict[str, Any]:
        return {"drill": name, "commit": commit, "date": "2026-11-25T10:00Z", "proves": ["kempner"]}

    rows = [
        told("a", "1" * 12),
        told("b", "2" * 12 + "+"),
        told("c", "3" * 12),
        told("d", "4" * 12),
    ]
    found = ages([*rows, told("e", "1" * 12)], lambda commit, folders: since.get(commit))
    assert [(age.names, age.commits) for age in found] == [
        (("d",), None),
        (("b",), 40),
        (("a", "e"), 3),
        (("c",), 0),
    ]
    assert report("x.jsonl", found) == [
        "x.jsonl: 5 rows, 1 of the code as it is, 3 older, 1 of a commit that is not here",
        "    ? commits since 444444444444 of 2026-11-25: d",
        "   40 commits since 222222222222+ of 2026-11-25: b",
        "    3 commits since 111111111111 of 2026-11-25: a and 1 more",
    ]


def test_the_commits_of_other_folders_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    records._git("init", "-q")
    for number, name in enumerate(("docs", "docs", "tests", "docs")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "file").write_text(str(number))
        records._git("add", ".")
        records._git(*AUTHOR, "commit", "-qm", name)
    first = records._git("rev-list", "--max-parents=0", "HEAD")
    assert records.commits_since(first, ("docs",)) == 2
    assert records.commits_since(first, ("docs", "tests")) == 3
    assert records.commits_since(records._git("rev-parse", "HEAD"), ("docs",)) == 0
    assert records.commits_since("0" * 40, ("docs",)) is None


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_every_row_says_where_it_comes_from(record: Path) -> None:
    rows = records.read(record)
    assert rows
    for each in rows:
        assert all(each.get(key) for key in records.HEADER), each
        assert all((ROOT / folder).exists() for folder in each["proves"]), each
        assert not Path(each["command"].split()[0]).is_absolute(), each
        if "drill" in each or "slurm" in each:
            test = ROOT / each["test"].partition("::")[0]
            assert test.exists(), f"{each['test']} is gone: drop its rows"


def test_a_drill_that_runs_again_replaces_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import drilling

    file = tmp_path / "drills.jsonl"
    monkeypatch.setenv("KEMPNER_DRILLS_RECORD", str(file))
    for times in (3, 2):
        monkeypatch.setattr(drilling, "_noted", {})
        monkeypatch.setenv(
            "PYTEST_CURRENT_TEST", "tests/drills/saves/test_x.py::test_y[a (b)] (call)"
        )
        for number in range(times):
            drilling.note("kill", rank=number)
    rows = records.read(file)
    assert [each["rank"] for each in rows] == [0, 1]
    assert {each["test"] for each in rows} == {"tests/drills/saves/test_x.py::test_y[a (b)]"}
    assert rows[0]["proves"] == ["kempner/checkpoint", "kempner/training"]
    assert json.dumps(rows[0]).count(str(ROOT)) == 0


def test_a_benchmark_keeps_what_it_measured_and_is_then_done(tmp_path: Path) -> None:
    file = tmp_path / "performance.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "order.py"), "--samples", "1000"]
    for _ in range(2):
        subprocess.run([*command, "--record", str(file)], check=True, capture_output=True)
    rows = records.read(file)
    assert [row["at once"] for row in rows] == [1, 64, 4096]
    assert {row["benchmark"] for row in rows} == {"order"}
    assert all(row["ns an index"] > 0 for row in rows)
    assert {row["command"] for row in rows} == {"python benchmarks/order.py --samples 1000"}
    assert measure.is_done("order.py --samples 1000", rows)
    assert not measure.is_done("order.py", rows)
    assert not measure.is_done("order.py --samples 1000", [row | {"commit": "0"} for row in rows])


def test_what_is_measured_can_be_kept() -> None:
    programs = {ROOT / "benchmarks" / command.split()[0] for command in measure.COMMANDS}
    assert [path for path in programs if "records.add_option(parser)" not in path.read_text()] == []
