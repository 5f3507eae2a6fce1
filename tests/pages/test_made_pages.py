"""Pages that are made from something else are up to date, and the tests they name are there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli
from promises_kept import ROOT, collect, faults_of_the_tests

sys.path.append(str(ROOT / "scripts" / "docs"))
import configuration_page
import resilience_page
import slurm_page

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


def test_each_fault_is_whole_and_has_a_test_that_injects_it(tmp_path: Path) -> None:
    keys = {"part", "fault", "answer", "costs", "tests"}
    for entry in FAULTS:
        assert entry.keys() - {"drill"} == keys, entry
        assert all(entry.values()), entry
    named = [{"id": entry["fault"], **entry} for entry in FAULTS]
    assert faults_of_the_tests(named, collect(named, tmp_path / "answer.json")) == []
