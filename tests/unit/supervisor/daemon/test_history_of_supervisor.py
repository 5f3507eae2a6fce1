"""What the supervisor knows of its run: read once an attempt, and told to the hooks."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from drilling import SEED

from kempner.config.sections import Config
from kempner.run.control.protocol import Phase
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import inbox
from kempner.run.process.threads import steady_time
from kempner.run.record.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    LedgerEvent,
    PhaseDurationsLearned,
    PhaseTimes,
    RankReady,
    Restarting,
    Resumed,
    RolledBack,
    StartedAnew,
)
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import FileTail, Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.run.record.save_times import SaveSeconds
from kempner.supervisor.daemon import supervise
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.launchers.local import this_machine
from kempner.supervisor.monitors.base import learned
from kempner.supervisor.nodes.exclusion import suspects
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import decide_restart, failures

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
    assert len(history.entries(AttemptFailed)) < 300


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
