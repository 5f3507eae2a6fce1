"""The vocabulary of the ledger: each event is spelt once, listed, documented, and read back."""

from __future__ import annotations

import ast
import json
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kempner.run.output import writers
from kempner.run.record import events
from kempner.run.record.events import (
    SUBJECTS,
    AttemptEnded,
    AttemptFailed,
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointFailed,
    ConnectionsStalled,
    HangFound,
    LedgerEvent,
    NodeSuspected,
    OwnProgramStands,
    PhaseDurationsLearned,
    PhaseTimes,
    Requeued,
    Resumed,
    RunGivenUp,
    StartedAnew,
    parse_event,
)
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger, read_lines
from kempner.run.record.save_times import Durations, SaveSeconds
from kempner.supervisor.watchdog.board import JobBoard
from kempner.supervisor.watchdog.keeper import requeued

ROOT = Path(__file__).parents[4]
sys.path.append(str(ROOT / "scripts" / "docs"))
import event_page  # noqa: E402 - a script

VOCABULARY = [kind for kinds in SUBJECTS.values() for kind in kinds]
NAMES = {kind.name for kind in VOCABULARY}

ALLOWED = {
    ("kempner/config/resilience.py", "hang"): "a kind of fault that a configuration asks for",
    ("kempner/training/fault_injection.py", "hang"): "the same, where it is injected",
    ("kempner/insight/attempts.py", "hang"): "a kind of interruption",
    ("kempner/insight/status/activity.py", "restarting"): "what a run is doing",
    ("kempner/insight/status/activity.py", "stopped"): "what a run is doing",
    ("kempner/insight/status/activity.py", "completed"): "what a run is doing",
    ("kempner/insight/status/summary.py", "gave_up"): "a key of the status as JSON",
    ("kempner/insight/triage/table/everything.py", "hang"): "the name of a cause",
    ("kempner/insight/triage/table/everything.py", "stopped"): "the name of a cause",
    ("kempner/insight/triage/table/scheduler.py", "requeued"): "the name of a cause",
    ("kempner/insight/triage/first_failure.py", "requeued"): "the name of a cause",
    ("kempner/insight/triage/ends.py", "requeued"): "the name of a cause",
    ("kempner/supervisor/watchdog/keeper.py", "requeued"): "the event, where nothing is imported",
    ("kempner/cli/insight/status_view.py", "left"): "a column, and a side",
    ("kempner/cli/insight/status_words.py", "left"): "a field of the status",
    ("kempner/cli/insight/status_words.py", "stopped"): "an `Activity`",
    ("kempner/probe/processes.py", "left"): "a key of an answer",
    ("kempner/supervisor/hooks.py", "completed"): "a key of the configuration",
    ("kempner/supervisor/hooks.py", "not_requeued"): "a key of the configuration",
    ("kempner/supervisor/policy/outcome.py", "completed"): "a sentence that happens to be one word",
    ("kempner/supervisor/policy/outcome.py", "stopped"): "the first word of a sentence",
}
"""Literals outside of the vocabulary that are equal to a name and mean something else, and what."""

WRITERS = ("the supervisor", "rank 0", "any rank", "the supervisor or any rank")


# The vocabulary


def test_all_events_are_listed_once_and_have_a_name_of_their_own() -> None:
    defined = [kind for kind in _subclasses(LedgerEvent) if kind.__module__.startswith("kempner.")]
    assert Counter(VOCABULARY) == Counter(defined)
    assert len(NAMES) == len(VOCABULARY)
    assert all(name.isidentifier() and name.islower() for name in NAMES)


def test_the_page_is_made_from_the_records() -> None:
    hint = "run `python scripts/docs/event_page.py`"
    assert event_page.PAGE.read_text() == event_page.page(SUBJECTS), hint


@pytest.mark.parametrize("kind", VOCABULARY, ids=lambda kind: kind.name)
def test_every_event_says_by_whom_it_is_written_and_when(kind: type[LedgerEvent]) -> None:
    by, when = event_page.origin(kind)
    assert by.split(",")[0] in (
        "the supervisor",
        "rank 0",
        "any rank",
        "the supervisor or any rank",
    )
    assert when
    hints = get_type_hints(kind, include_extras=True)
    assert all(hints[field.name].__metadata__ for field in fields(kind))  # what it holds


def test_no_event_is_spelt_outside_of_the_vocabulary() -> None:
    spelt = {(path, literal) for path, literal in _literals() if literal in NAMES}
    assert spelt == set(ALLOWED), "use the record's `name`, or say in ALLOWED what else it means"


def test_no_name_of_an_event_is_passed_on_by_a_constant() -> None:
    """A second name for the same event would have to be looked up to be understood."""
    assert [*_constants()] == []


# What is written and read


EXAMPLES: Mapping[object, object] = {
    int: 7,
    int | None: 7,
    float: 0.5,
    float | None: 0.5,
    bool: True,
    str: "words | with `all` sorts of € signs",
    str | None: "words",
    tuple[str, ...]: ["one", "two"],
    tuple[int, ...]: [1, 2],
    tuple[tuple[str, str], ...]: [["10.0.0.1:1", "10.0.0.2:2"]],
    Mapping[str, str]: {"rank 0": "no space left"},
    Mapping[str, float]: {"load": 1.5},
    Mapping[str, float] | None: {"code": 1.5},
    Mapping[str, int | None]: {"0": 75, "1": None},
    Mapping[str, Sequence[int]]: {"the vote": [0, 1]},
    OwnProgramStands | None: {"step": 7, "places": {"0": "at train.py:3"}, "busy": 0},
    Mapping[str, PhaseTimes]: {"step": {"median": 1.5, "spread": 0.25, "count": 3}},
}
"""Some value of each type that a field has, as JSON has it; of none the default."""


def whole(kind: type[LedgerEvent]) -> LedgerEvent:
    """An event all of whose fields are in its line."""
    hints = get_type_hints(kind)
    return kind.from_fields({field.name: EXAMPLES[hints[field.name]] for field in fields(kind)})


@pytest.mark.parametrize("kind", VOCABULARY, ids=lambda kind: kind.name)
def test_every_event_comes_back_from_its_line(kind: type[LedgerEvent]) -> None:
    event = whole(kind)
    said = json.loads(json.dumps(event.to_fields()))
    assert set(said) == {field.name for field in fields(kind)}
    assert kind.from_fields(said) == event
    assert parse_event(kind.name, {**said, "of_a_later_version": [1]}) == event


@pytest.mark.parametrize("kind", VOCABULARY, ids=lambda kind: kind.name)
def test_a_line_that_lacks_a_field_or_has_another_type_is_passed_over(
    kind: type[LedgerEvent],
) -> None:
    event = whole(kind)
    said = event.to_fields()
    for name in said:
        parse_event(kind.name, {key: value for key, value in said.items() if key != name})
        assert parse_event(kind.name, {**said, name: object()}) is None


@pytest.mark.parametrize("name", [None, 7, "", ["suspect"], "saved"])
def test_a_name_that_nobody_knows_is_passed_over(name: object) -> None:
    assert parse_event(name, {"step": 7}) is None


def test_what_has_its_default_is_left_out_of_the_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path).record(Requeued(step=None, job="7"), attempt=3)
    Ledger(path).record(Requeued(step=5, job="7", by_rank=0), attempt=4)
    first, second = read_lines(path)
    assert {key: first[key] for key in set(first) - {"time", "schema"}} == {
        **{"event": "requeued", "attempt": 3, "step": None, "job": "7"}
    }
    assert second["by_rank"] == 0


def test_the_line_that_the_watchdog_makes_without_the_records_is_one_of_them() -> None:
    board = JobBoard(alone=True)
    board.tell_attempt(3, 0, "ledger.jsonl")
    board.tell_step(5, new=True)
    line = requeued(board, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, now=8.0)
    (entry,) = RunHistory([line]).entries(LedgerEvent)
    assert (entry.event, entry.attempt) == (Requeued(5, "7", 2), 3)
    assert set(line) == {"schema", "time", "event", "attempt", *(f.name for f in fields(Requeued))}


# The history


def test_a_history_is_read_once_and_then_only_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    history, ledger = RunHistory.read(path), Ledger(path)
    assert history.events(LedgerEvent) == []
    ledger.record(Resumed(7), attempt=1)
    assert history.events(LedgerEvent) == []
    assert history.refresh().events(Resumed) == [Resumed(7)]
    ledger.record(NodeSuspected("node2", "it burns"), attempt=2)
    path.write_bytes(b"#" * len(path.read_bytes().splitlines(keepends=True)[0]) + _second(path))
    (entry,) = history.refresh().entries(NodeSuspected)
    assert (entry.event.node, entry.attempt) == ("node2", 2)
    assert entry.time > 1.6e9
    assert history.events(Resumed, NodeSuspected) == [Resumed(7), entry.event]  # read before


def test_a_history_knows_what_could_not_be_written_yet_and_counts_it_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    history = RunHistory.of(ledger)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ledger.record(Resumed(1), attempt=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
    try:
        ledger.record(Resumed(2), attempt=1)
        ledger.record(Resumed(3), attempt=1)
        assert RunHistory.read(path).last_step == 1
        assert [event.step for event in history.refresh().events(Resumed)] == [1, 2, 3]
        assert history.last_step == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ledger.record(Resumed(4), attempt=1)
    assert [event.step for event in history.refresh().events(Resumed)] == [1, 2, 3, 4]


def test_a_history_sees_every_line_once_wherever_a_writer_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "_LOOK", 0.0)
    source = tmp_path / "whole.jsonl"
    Ledger(source).record(Resumed(1), attempt=1)
    Ledger(source).record(Resumed(2), attempt=1)
    content = source.read_bytes()
    for cut in range(len(content) + 1):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(content[:cut])
        history = RunHistory.read(path)
        Ledger(path).record(Resumed(3), attempt=1)
        found = [event.step for event in history.refresh().refresh().events(Resumed)]
        assert found == [event.step for event in RunHistory.read(path).events(Resumed)], cut
        assert found[-1] == 3


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path).record(Resumed(1), attempt=1)
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    history = RunHistory.read(path)
    assert history.last_step is None
    path.write_bytes(content)
    assert history.refresh().events(Resumed) == [Resumed(1)]


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"event": None},
        {"event": "resumed"},
        {"event": "resumed", "step": "seven"},
        {"event": "resumed", "step": 7, "time": "noon"},
        {"event": "resumed", "step": 7, "attempt": "first"},
        {"event": "attempt_failed", "step": 7},
        {"event": "phase_durations", "ranks": 3, "phases": {"step": {"median": 1.0}}},
    ],
)
def test_a_damaged_line_does_not_reach_a_reader(line: Mapping[str, Any]) -> None:
    sound = {"event": "resumed", "step": 20, "time": 5.0, "attempt": 2}
    assert RunHistory([line, sound]).events(LedgerEvent) == [Resumed(20)]


def test_a_history_knows_commits_and_how_long_they_took() -> None:
    took = SaveSeconds(0.1, 2.0, 0.25)
    commit = CheckpointCommitted.of(10, 4096, took)
    lines = [
        {"event": event.name, **event.to_fields()}
        for event in (
            StartedAnew(),
            commit,
            CheckpointFailed(15, {"rank 1": "no space left"}),
            CheckpointDamaged(10, "damaged-10", ("rank-0: gone",)),
            Resumed(10),
        )
    ]
    history = RunHistory(lines)
    assert history.last_step == 10
    assert history.durations == Durations((took,))


def test_types_are_those_of_the_records() -> None:
    """What a reader gets has the types that mypy promises it."""
    failed = AttemptFailed.from_fields({"step": 3, "committed": None, "raised": ""})
    assert failed == AttemptFailed(step=3, committed=None, raised="", node="")
    ended = AttemptEnded.from_fields({"code": 0, "reason": "", "culprit": None, "exits": {"0": 0}})
    assert ended.exits == {"0": 0}
    stalled = ConnectionsStalled.from_fields({"ends": [["a", "b"]]})
    assert stalled.ends == (("a", "b"),)
    learned = PhaseDurationsLearned.from_fields(
        {"ranks": 2, "phases": {"step": {"median": 1, "spread": 0, "count": 4}}}
    )
    assert learned.phases == {"step": PhaseTimes(1.0, 0.0, 4)}
    hang = HangFound("still", None, {"nothing": [0]}, ())
    assert HangFound.from_fields(hang.to_fields()) == hang
    with pytest.raises(ValueError, match="code"):
        RunGivenUp.from_fields({"reason": "so"})


def _second(path: Path) -> bytes:
    return b"\n" + path.read_bytes().splitlines(keepends=True)[1]


def _subclasses(kind: type[LedgerEvent]) -> Iterator[type[LedgerEvent]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


@cache
def _modules() -> list[tuple[str, ast.Module]]:
    spelt = Path(events.__file__)
    return [
        (str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted((ROOT / "kempner").rglob("*.py"))
        if path != spelt
    ]


def _literals() -> Iterator[tuple[str, str]]:
    """Every string literal, parts of f-strings included, with its module."""
    for path, module in _modules():
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.value


def _constants() -> Iterator[tuple[str, str]]:
    """Assignments outside of functions of some event's `name`, with their module."""
    kinds = {kind.__name__ for kind in VOCABULARY}
    for path, module in _modules():
        scopes = [module, *(node for node in ast.walk(module) if isinstance(node, ast.ClassDef))]
        for statement in (s for scope in scopes for s in scope.body):
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
                continue
            for node in ast.walk(statement.value):
                if not isinstance(node, ast.Attribute) or node.attr != "name":
                    continue
                if isinstance(node.value, ast.Name) and node.value.id in kinds:
                    yield path, node.value.id
