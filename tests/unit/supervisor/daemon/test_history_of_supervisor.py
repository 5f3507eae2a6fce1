"""What the supervisor knows of its run: read once an attempt, and told to the hooks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kempner.config.sections import Config
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import inbox
from kempner.run.record.events import AttemptEnded, AttemptFailed, AttemptStarted, LedgerEvent
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import FileTail, Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.daemon import supervise
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.launchers.local import this_machine

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
