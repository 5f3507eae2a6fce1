"""Hooks hear of what the ledger hears of, with the facts, and change nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kempner.config.site import HooksSection
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events import (
    AttemptEnded,
    LedgerEvent,
    NodeSuspected,
    NotRequeued,
    Restarting,
    RunGivenUp,
)
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.hooks import Hooks, LedgerWithHooks, hook_of

DONE = AttemptEnded(0, "done", None, {})
GIVEN_UP = RunGivenUp(1, 'it\'s "broken" $HOME', (), "mend it", rank=None, step=7)


@pytest.mark.parametrize(
    ("key", "event", "shows", "said"),
    [
        ("node_suspect", NodeSuspected("node2", "no memory"), "$KEMPNER_NODE", "node2"),
        ("give_up", GIVEN_UP, "$KEMPNER_REASON|$KEMPNER_RANK|$KEMPNER_STEP",
         "it's \"broken\" $HOME||7"),
        ("not_requeued", NotRequeued(None, "r"), "$KEMPNER_STEP|$KEMPNER_JOB_ID", "|17"),
        ("completed", DONE, "$KEMPNER_EVENT $KEMPNER_RUN_NAME $KEMPNER_ATTEMPT_NUMBER",
         "completed run 3"),
    ],
)  # fmt: skip
def test_the_hook_of_an_event_has_its_facts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    event: LedgerEvent,
    shows: str,
    said: str,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.chdir(tmp_path)
    section = HooksSection(**{key: f'printf %s "{shows}" >> told'})  # type: ignore[arg-type]
    hooks = Hooks(section, RunDirectory(tmp_path / "run"))
    ledger = LedgerWithHooks(tmp_path / "ledger.jsonl", hooks)
    failed = AttemptEnded(int(ExitCode.CRASHED), "no", 0, {})
    for heard in (Restarting("again"), failed, event):
        ledger.record(heard, attempt=3)
    hooks.close()
    assert Path("told").read_text() == said
    assert [line["event"] for line in read_lines(tmp_path / "ledger.jsonl")][-1] == event.name


def test_a_hook_that_fails_or_hangs_changes_nothing_and_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child"
    section = HooksSection(
        node_suspect="echo no such room; exit 4",
        give_up=f"sleep 100 & echo $! > {child}; echo waiting; wait",
        completed="/no/such/command",
        timeout=0.5,
    )
    hooks = Hooks(section, RunDirectory(tmp_path / "run"))
    for event in (NodeSuspected("node2", "x"), GIVEN_UP, DONE):
        hooks.hear(hook_of(event), event, attempt=1)
    hooks.close()
    told = capsys.readouterr().err
    assert "hooks.node_suspect failed: exit status 4: no such room" in told
    assert "hooks.give_up failed: it took too long: waiting" in told
    assert "hooks.completed failed: exit status 127" in told
    left = Path(f"/proc/{child.read_text().strip()}/stat")
    for _ in range(100):  # the kernel may take a moment to remove it
        if not left.exists() or left.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("what the hook started still runs")
