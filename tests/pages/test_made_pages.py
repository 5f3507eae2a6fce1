"""Pages that are made from something else are up to date, and the tests they name are there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli
from promises_kept import ROOT, collect, faults_of_the_tests

sys.path.append(str(ROOT / "scripts" / "docs"))
import configuration_page
import performance_page
import resilience_page
import slurm_page

THREE_SCREENS = 135  # lines

FAULTS: list[Mapping[str, Any]] = tomli.loads(resilience_page.SOURCE.read_text())["fault"]


def test_the_keys_are_those_of_the_sections() -> None:
    hint = "run `python scripts/docs/configuration_page.py`"
    assert configuration_page.PAGE.read_text() == configuration_page.page(), hint


def test_the_page_on_resilience_is_made_from_the_list() -> None:
    hint = "run `python scripts/docs/resilience_page.py`"
    assert resilience_page.PAGE.read_text() == resilience_page.page(FAULTS), hint


def test_the_table_of_slurm_versions_is_made_from_the_record() -> None:
    text = slurm_page.PAGE.read_text()
    assert text == slurm_page.page(text, slurm_page.read()), "run scripts/docs/slurm_page.py"


def test_the_pages_of_figures_are_made_from_the_records() -> None:
    rows, hint = performance_page.read(), "run `python scripts/docs/performance_page.py`"
    for file in performance_page.PAGES:
        text = file.read_text()
        assert "<!-- table: " in text
        assert text == performance_page.page(text, rows), hint
    assert len((performance_page.DOCS / "performance.md").read_text().splitlines()) <= THREE_SCREENS
    assert performance_page.DETAILS.read_text() == performance_page.details(rows), hint


def test_a_table_has_the_rows_and_columns_that_the_page_asks_for() -> None:
    told = {"commit": "0" * 12, "date": "2026-11-25T10:00Z"}
    rows = [
        {"benchmark": "write", "way": "raw", "s": 2.0, "MB": 9, **told},
        {"benchmark": "write", "way": "ours", "s": [0.5, 1000], **told},
        {"drill": "kill", "way": "ours", "steps_lost": 1, **told},
    ]

    def made(what: str) -> list[str]:
        text = f"<!-- table: {what}; s; steps_lost -->\nold\n<!-- end -->"
        return performance_page.page(text, rows).splitlines()

    some, both = made("write where way=ours"), made("write + kill")
    assert some[1:4] == ["| s | steps lost |", "| --- | --- |", "| 0.5 to 1,000 |  |"]
    said = f"Of 2026-11-25, at {'0' * 12} ([all](measurements.md#write)). <!-- end -->"
    assert some[4:] == both[6:] == ["", said]
    assert [both[3], both[5]] == ["| 2.0 |  |", "|  | 1 |"]
    with pytest.raises(SystemExit, match="no row of 'writing'"):
        made("writing")


def test_each_fault_is_whole_and_has_a_test_that_injects_it(tmp_path: Path) -> None:
    keys = {"part", "fault", "answer", "costs", "tests"}
    for entry in FAULTS:
        assert entry.keys() - {"drill"} == keys, entry
        assert all(entry.values()), entry
    named = [{"id": entry["fault"], **entry} for entry in FAULTS]
    assert faults_of_the_tests(named, collect(named, tmp_path / "answer.json")) == []
