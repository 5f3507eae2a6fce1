"""What is said of other tools is made from the record of their runs, or has a dated source."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import tomli
from promises_kept import ROOT

sys.path.append(str(ROOT / "scripts" / "docs"))
import comparison_page

RECORD = comparison_page.read()
SOURCES: Mapping[str, Any] = tomli.loads(comparison_page.SOURCES.read_text())

MADE = ("promises.md", "configuration_keys.md")
"""Pages that are made from something else."""

NAMES = re.compile(
    r"\b(transformers|Trainer|SFTTrainer|TRL|Lightning|Fabric|Accelerate|accelerate launch|"
    r"torchtitan|torchrun|torchft|NVRx|NVIDIA Recovery|submitit|dlrover|lm-resiliency|Ray|"
    r"HyperPod|SkyPilot|async_save|torch_checkpointing)\b"
)
SAYS = re.compile(
    r"\b(does not|do not|cannot|never|alone|by itself|by themselves|would|kills?|hangs?|repeats?|"
    r"miss(es)?|requeues?|restarts?|loses?|forbids?|default|better|slower|faster|only)\b"
)
"""Words by which a line that names another tool says what that does or does not do."""


def lines_on_peers() -> Iterator[tuple[str, str]]:
    """The page and the line, where it is neither code nor made from the record."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        inside = False
        for line in path.read_text().splitlines():
            if line.startswith(("```", "<!-- Made by", "<!-- The end of it")):
                inside = not inside
            elif inside or path.name in MADE:
                continue
            elif NAMES.search(line) and SAYS.search(line):
                yield path.name, line


def test_the_pages_are_made_from_the_record() -> None:
    for page in (comparison_page.README, comparison_page.PAGE):
        text = page.read_text()
        hint = "run `python scripts/docs/comparison_page.py`"
        assert text == comparison_page.made(text, RECORD, SOURCES), hint


def test_each_line_that_says_something_of_a_peer_has_its_evidence() -> None:
    claims = SOURCES["claim"]
    bare = [
        (page, line)
        for page, line in lines_on_peers()
        if not any(claim["page"] == page and claim["text"] in line for claim in claims)
    ]
    assert bare == []


def test_the_evidence_is_there() -> None:
    for claim in SOURCES["claim"]:
        page = (
            ROOT / claim["page"] if claim["page"] == "README.md" else ROOT / "docs" / claim["page"]
        )
        assert claim["text"] in page.read_text(), claim
        for row in claim.get("rows", []):
            peer, scenario = row.split("/")
            assert scenario in RECORD[peer], claim
        if "test" in claim:
            path, name = claim["test"].split("::")
            assert f"def {name}(" in (ROOT / path).read_text(), claim
        kinds = claim.keys() & {"rows", "test", "source", "of_kempner"}
        assert len(kinds) == 1, claim
        assert ("source" in claim) == ("date" in claim), claim
    for entry in [*SOURCES["sourced"], *SOURCES["better"]]:
        assert entry["source"].startswith("https://"), entry
        assert re.search(r"\b20\d\d\b", entry["date"]), entry


def test_every_row_says_where_it_comes_from() -> None:
    keys = {"commit", "date", "machine", "versions", "command", "codes", "hands", "hung"}
    for peer, rows in RECORD.items():
        for scenario, row in rows.items():
            assert row.keys() >= keys, (peer, scenario)
            assert row["complete"] or row["error"], (peer, scenario)


def test_enough_peers_ran() -> None:
    others = [peer for peer in comparison_page.ran(RECORD) if not peer.startswith("kempner")]
    assert len(others) >= 8
