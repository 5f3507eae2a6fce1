"""Runs of a group tell each other of suspect nodes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kempner.config.resilience import ResilienceSection
from kempner.run.record.history import RunHistory
from kempner.supervisor.nodes import exclusion
from kempner.supervisor.nodes.exclusion import known_suspects, withdraw


def named(node: str, reason: str, ago: float = 0.0) -> dict[str, Any]:
    return {"event": "suspect", "node": node, "reason": reason, "time": time.time() - ago}


def failed_first(attempt: int) -> dict[str, Any]:
    what = {"step": 7, "committed": None, "raised": "", "node": "node4"}
    return {"event": "attempt_failed", "attempt": attempt, "time": time.time(), **what}


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResilienceSection:
    monkeypatch.setattr(exclusion, "BEGAN", time.time() - 60.0)
    return ResilienceSection(suspects_dir=str(tmp_path / "group"), suspect_for=3600.0)


def reasons(section: ResilienceSection, run: str, *lines: dict[str, Any]) -> dict[str, str]:
    found = known_suspects(RunHistory(lines), section, run)
    return {node: suspect.reason for node, suspect in found.items()}


def test_what_one_run_has_proof_of_all_others_know(
    section: ResilienceSection, tmp_path: Path
) -> None:
    habit = "its ranks failed first in attempts 1 and 2"
    seen = [named("node2", "no memory"), failed_first(1), failed_first(2)]
    assert reasons(section, "a", *seen) == {"node2": "no memory", "node4": habit}
    assert reasons(section, "b") == {"node2": "no memory (seen by run a)"}  # node4: may be chance
    assert reasons(section, "b", named("node2", "no room")) == {"node2": "no room"}
    assert reasons(section, "c") == {"node2": "no room (seen by run b)"}
    assert [path.name for path in (tmp_path / "group").iterdir()] == ["node2.json"]


def test_a_suspicion_ends_with_its_time_or_its_file(
    section: ResilienceSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "group" / "node2.json"
    old = named("node2", "no memory", ago=50.0)
    assert reasons(section, "a", old)
    told = json.loads(file.read_text())
    assert told["until"] - told["since"] == 3600.0
    file.write_text(json.dumps({**told, "until": time.time() - 1.0}))
    assert reasons(section, "b") == {}
    file.unlink()  # by a person who has mended the node, while run a is requeued
    monkeypatch.setattr(exclusion, "BEGAN", time.time() - 10.0)
    assert reasons(section, "a", old) == {"node2": "no memory"}
    assert not file.exists()


def test_a_folder_or_a_file_that_cannot_be_used_ends_no_run(
    section: ResilienceSection, tmp_path: Path
) -> None:
    (tmp_path / "group").write_text("not a folder")
    assert reasons(section, "a", named("node2", "no memory")) == {"node2": "no memory"}
    (tmp_path / "group").unlink()
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "node3.json").write_text("{half")
    assert reasons(section, "b") == {}


def test_a_node_that_is_well_again_is_suspect_to_nobody(
    section: ResilienceSection, tmp_path: Path
) -> None:
    assert reasons(section, "a", named("node2", "no memory"), named("node3", "no room"))
    assert reasons(section, "b", named("node4", "no route"))
    withdraw(tmp_path / "group", ["node2", "node4"], {"a"})
    assert sorted(reasons(section, "c")) == ["node3", "node4"]
