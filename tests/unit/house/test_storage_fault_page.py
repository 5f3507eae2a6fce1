"""The page of storage faults is made from the record of the drills."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[3] / "scripts" / "docs"
sys.path.insert(0, str(SCRIPTS))

import storage_fault_page  # noqa: E402 - a script


def cell(what: str, when: str, how: str, *wrong: str) -> dict[str, Any]:
    place = {"what": what, "where": "tokens", "when": when, "how": how}
    told = {"commit": "0" * 12, "date": "2026-11-25T10:00Z", "machine": "2 cores"}
    return {**place, "seconds": 12.3, "faults": 4, "wrong": list(wrong), **told}


def test_the_page_has_every_cell_and_what_did_not_hold() -> None:
    page = storage_fault_page.page(
        [
            cell("EIO", "step", "10 s"),
            cell("EIO", "start", "p", "exit code 65"),
            cell("hang", "step", "p"),
        ]
    )
    assert "Of 3 cells 2 held; 12 operations met a fault" in page
    assert f"Of 2026-11-25, at {'0' * 12}, on 2 cores;" in page
    assert "## tokens\n| | start | step |\n" in page
    assert "| EIO | p: **failed** | 10 s: 12 s |\n| hang |  | p: 12 s |\n" in page
    assert "- EIO, tokens, start, p: exit code 65\n" in page


def test_the_page_is_made_from_the_record() -> None:
    hint = "run `python scripts/docs/storage_fault_page.py`"
    assert storage_fault_page.PAGE.read_text() == storage_fault_page.page(
        storage_fault_page.read()
    ), hint
