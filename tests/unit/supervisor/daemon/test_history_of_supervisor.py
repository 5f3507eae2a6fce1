"""What the supervisor knows of its run: read once an attempt, and told to the hooks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from random import Random
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from drilling import SEED

from kempner.config.sections import Config
from kempner.run.control.protocol import Phase
from kempner.run.output.writers import json_line
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import inbox
from kempner.run.process.threads import steady_time
from kempner.run.record import history as past
from kempner.run.record.events import (
    SUBJECTS,
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    CorruptionFound,
    JobHandedBack,
    LedgerEvent,
    NodesLeft,
    NodesTakenBack,
    NodeSuspected,
    PhaseDurationsLearned,
    PhaseTimes,
    ProgramAdvanced,
    RankReady,
    Requeued,
    Restarting,
    Resumed,
    RolledBack,
    StartedAnew,
)
from kempner.run.record.history import KEPT, RunHistory
from kempner.run.record.ledger import FileTail, Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.run.record.save_times import REMEMBERED, SaveSeconds
from kempner.supervisor.daemon import supervise
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.launchers.local import this_machine
from kempner.supervisor.monitors.base import learned
from kempner.supervisor.nodes.changes import DOUBLINGS, times_lost, times_taken_back
from kempner.supervisor.nodes.exclusion import suspects
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import (
    decide_restart,
    dismissed_steps,
    failures,
    requeues_without_progress,
)
from kempner.supervisor.slurm.job_nodes import excluded_by_user

EVENTS = [kind for kinds in SUBJECTS.values() for kind in kinds]
BY_SUBJECT = (AttemptFailed, CheckpointCommitted, CorruptionFound, NodesLeft, NodesTakenBack,
              NodeSuspected, PhaseDurationsLearned, Requeued)  # fmt: skip
"""Kinds of which more than the last ones matter."""

READ = "the ledger is read"
FAILS_TWICE = 'echo >> starts; test "$(wc -l < starts)" -gt 2 || kill -KILL $$'


def test_a_run_that_is_given_up_has_its_hook_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, hook = RunDirectory(tmp_path / "run"), 'printf %s "$KEMPNER_ATTEMPT_NUMBER" > heard'
    sections = {"hooks": {"give_up": hook}, "supervise": {"max_restarts_without_progress": 0}}
    config = Config.model_validate({"run": {"name": "run"}, **sections})
    program = Program(("sh", "-c", "kill -KILL $$"), ours=False)
    launcher = Launcher(*this_machine(run, 1))
    assert supervise(run, launcher, program, config, inbox()) == ExitCode.CRASHED
    assert Path("heard").read_text() == "1"


def test_the_ledger_is_read_once_between_a_crash_and_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    read, record = FileTail.read, Ledger.record

    def count(tail: FileTail) -> tuple[list[bytes], bool]:
        seen.append(READ)
        return read(tail)

    def note(ledger: Ledger, event: LedgerEvent, attempt: int) -> None:
        seen.append(event.name)
        record(ledger, event, attempt)

    monkeypatch.setattr(FileTail, "read", count)
    monkeypatch.setattr(Ledger, "record", note)
    run = RunDirectory(tmp_path / "run")
    config = Config.model_validate({"run": {"name": "run"}})
    program = Program(("sh", "-c", FAILS_TWICE), ours=False)
    launcher = Launcher(*this_machine(run, 1))
    assert supervise(run, launcher, program, config, inbox()) == ExitCode.COMPLETED

    wanted = {READ, AttemptStarted.name, AttemptEnded.name, AttemptFailed.name}
    failed = [AttemptStarted.name, AttemptEnded.name, READ, AttemptFailed.name]
    assert [name for name in seen if name in wanted] == [READ, *failed, *failed, *failed[:3]]
    history = RunHistory.read(run.ledger)
    assert [entry.attempt for entry in history.entries(AttemptFailed)] == [1, 2]


def many_attempts(ledger: Ledger, attempts: int) -> None:
    """Each with the events of its kind; the first start was long."""
    ledger.record(StartedAnew(), 1)
    for number in range(1, attempts + 1):
        ledger.record(AttemptStarted(2), number)
        ledger.record(Resumed(10 * number - 10), number)
        ledger.record(RankReady(0, "cpu", {}), number)
        took = SaveSeconds(0.0, float(number), 0.0)
        ledger.record(CheckpointCommitted.of(10 * number, 1, took), number)
        start = PhaseTimes(600.0 if number == 1 else 1.0, 0.0, 1)
        ledger.record(PhaseDurationsLearned(2, {"start": start}), number)
        ledger.record(AttemptEnded(1, "rank 0 crashed", 0, {"0": 1, "1": 1}), number)
        ledger.record(AttemptFailed(10 * number + 1, 10 * number, "", "node2"), number)
        ledger.record(Restarting("again"), number)


def test_a_supervisor_holds_no_more_after_many_restarts_and_knows_the_same(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    history = RunHistory.of(ledger)
    many_attempts(ledger, 1000)
    assert json.loads(ledger.path.read_text().splitlines()[-1])["attempt"] == 1000

    whole = RunHistory.read(ledger.path)
    history.refresh()

    assert len(history.entries(LedgerEvent)) < 1000 < len(whole.entries(LedgerEvent))
    for found, expected in ((history, whole), (RunHistory.to_resume(ledger.path), whole)):
        assert (found.last_step, found.durations) == (expected.last_step, expected.durations)
        assert found.events(StartedAnew) == expected.events(StartedAnew)
    assert learned(history, 2) == learned(whole, 2)
    assert learned(history, 2)[Phase.START].median == 600.0


def made_up(kind: Any, random: Random) -> Any:
    """A value of the type of an event, or of one of its fields."""
    parts, outer = get_args(kind), get_origin(kind)
    if is_dataclass(kind):
        types = get_type_hints(kind)
        assert isinstance(kind, type)
        return kind(**{each.name: made_up(types[each.name], random) for each in fields(kind)})
    if outer is UnionType:
        return made_up(random.choice(parts), random)
    if outer is Mapping:
        return {made_up(parts[0], random): made_up(parts[1], random)}
    if outer in (tuple, Sequence):
        return tuple(made_up(part, random) for part in parts if part is not ...)
    if kind is bool:
        return random.random() < 0.5
    if kind is str:
        return f"node{random.randrange(4)}" if random.random() < 0.9 else random.randbytes(4).hex()
    return None if kind is NoneType else kind(random.randrange(1000))


def test_what_a_restart_costs_does_not_depend_on_how_many_events_there_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all kinds: no line is parsed twice, what is held stops growing, and what a supervisor
    concludes from it is the same as from all."""
    parse, parsed, random = past.parse_event, list[object](), Random(SEED)
    ledger, kinds = Ledger(tmp_path / "ledger.jsonl"), sorted(EVENTS, key=lambda kind: kind.name)
    history = RunHistory.of(ledger)
    monkeypatch.setattr(past, "parse_event", lambda *of: parsed.append(of) or parse(*of))
    for restart in range(1, 151):
        events = [made_up(kind, random) for kind in random.choices(kinds, k=100)]
        head = {"time": steady_time(), "attempt": restart}
        lines = [json_line({**head, "event": e.name, **e.to_fields()}) for e in events]
        with ledger.path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        parsed.clear()
        history.refresh()
        assert len(parsed) == len(lines)
    assert len(history.entries(LedgerEvent)) < 6000
    held = {kind: len(history.entries(kind)) for kind in kinds if kind not in BY_SUBJECT}
    assert not [kind for kind, events in held.items() if events > 4 * KEPT]
    assert conclusions(history) == conclusions(RunHistory.read(ledger.path))


def conclusions(history: RunHistory) -> dict[str, object]:
    """What a supervisor concludes from events that may be old."""
    nodes, against = [f"node{number}" for number in range(4)], _against(history)
    taken_back = times_taken_back(history) | times_lost(history)
    return {
        "advanced": max(event.step or 0 for event in history.events(ProgramAdvanced)),
        "dismissed": dismissed_steps(history)[-20:],
        "excluded": {job: excluded_by_user(nodes, history, job) for job in nodes},
        "failures": failures(history)[-20:],
        "fruitless": {job: requeues_without_progress(history, job, 1) for job in nodes},
        "last step": {place: history.last_step_in(place) for place in nodes},
        "left": [event.seconds for event in history.events(JobHandedBack)][-REMEMBERED:],
        "saves": history.durations,
        "suspects": [against[node][:1] for node in nodes if node in against],
        "taken back": [min(taken_back.get(node, 0), DOUBLINGS) for node in nodes],
    }


def test_what_is_decided_after_many_failures_is_the_same_without_the_old_ones(
    tmp_path: Path,
) -> None:
    """Failures of all kinds, on nodes that fail more or less often, with rare commits."""
    random = Random(SEED)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    history, committed = RunHistory.of(ledger), 0
    for number in range(1, 700):
        if random.random() < 0.01:
            committed = number
            ledger.record(CheckpointCommitted(committed, 1), number)
        raised = random.choice(["", "ValueError: x", "RuntimeError: CUDA error: uncorrectable ECC"])
        node, lost = random.choice(["", "node1", "node2", "node3"]), random.random() < 0.2
        failed = AttemptFailed(committed + random.randrange(3), committed, raised, node, lost)
        ledger.record(failed, number)
        history.refresh()
        if number % 20 == 0:
            whole = RunHistory.read(ledger.path)
            for budget in (3, 40, 500):
                ended = Decision(ExitCode.CRASHED, "it failed")
                found, expected = (
                    decide_restart(ended, past[-1], past[:-1], budget)
                    for past in (failures(history), failures(whole))
                )
                assert found == expected
            assert _against(history) == _against(whole)
    assert len(history.entries(AttemptFailed)) < 600


def _against(history: RunHistory) -> dict[str, tuple[str, bool, bool]]:
    """The suspect nodes."""
    found = suspects(history, steady_time(), 3600.0)
    return {node: (each.reason, each.proven, each.failed) for node, each in found.items()}


def test_a_rank_that_resumes_reads_the_same_whatever_is_in_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    told = [
        CheckpointCommitted(10, 1),
        CheckpointCommitted(7, 1, place="other"),
        Resumed(9, place="third"),
        Resumed(12),
        CheckpointCommitted(11, 1),
        RolledBack(9, 5, 1, 2),
        Resumed(8, place="other"),
    ]
    for event in told:
        ledger.record(event, 1)
        found, whole = RunHistory.to_resume(ledger.path), RunHistory.read(ledger.path)
        for place in ("", "other", "third"):
            assert found.last_step_in(place) == whole.last_step_in(place)
        assert found.events(RolledBack) == whole.events(RolledBack)
