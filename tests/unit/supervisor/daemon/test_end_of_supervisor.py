"""The end of a run: its stages in order, and none that fails keeps another from happening."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kempner.config.sections import Config
from kempner.run.process.exit_codes import ExitCode, RunError, UsageError
from kempner.run.process.signals import inbox
from kempner.run.record.attempts import SupersededError
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor import daemon
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.watchdog import board
from kempner.supervisor.watchdog.board import JobBoard, SupervisorStage

STAGES = ["ranks", "requeue", "exporters", "lease", "ranks", "hooks"]


class Stage:
    """Anything whose end is a stage, which may fail."""

    def __init__(self, name: str, seen: list[str], failing: str) -> None:
        self._name, self._seen, self._failing = name, seen, failing

    def end(self, *_: Any) -> None:
        self._seen.append(self._name)
        if self._name == self._failing:
            raise RuntimeError(f"{self._name} cannot be ended")

    close = release = end

    def start(self, *_: Any) -> None: ...

    prepare = start


@pytest.fixture
def run_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Supervise a run whose first attempt was stopped; the stages of its end, with one that
    fails."""

    def run(failing: str) -> list[str]:
        seen: list[str] = []
        stage = {name: Stage(name, seen, failing) for name in STAGES}
        stopped = Decision(ExitCode.STOPPED, "stopped")
        followed = lambda context: (None, stopped)  # noqa: E731
        monkeypatch.setattr(daemon, "Hooks", lambda *_: stage["hooks"])
        monkeypatch.setattr(daemon, "MetricsExports", lambda: stage["exporters"])
        monkeypatch.setattr(daemon.Lease, "acquire", lambda *_: stage["lease"])
        monkeypatch.setattr(Stage, "check", lambda self: None, raising=False)
        monkeypatch.setattr(Stage, "stop_asked", False, raising=False)
        monkeypatch.setattr(daemon, "_follow_attempt", followed)
        monkeypatch.setattr(daemon, "restart_or_finish", lambda *_: stopped)
        monkeypatch.setattr(daemon, "requeue_or_explain", stage["requeue"].end)
        directory, program = RunDirectory(tmp_path / "run"), Program(("true",), ours=False)
        config = Config.model_validate({"run": {"name": "run"}})
        end: Any = daemon.supervise
        code = end(
            directory, stage["ranks"], program, config, inbox(), SimpleNamespace(batch=False)
        )
        assert code == ExitCode.STOPPED
        return seen

    return run


@pytest.mark.parametrize("failing", ["none", "ranks", "exporters", "lease", "hooks"])
def test_each_stage_of_the_end_happens_in_order_whichever_fails(
    run_to_its_end: Callable[[str], list[str]], failing: str
) -> None:
    assert run_to_its_end(failing) == STAGES


@pytest.mark.parametrize(
    ("error", "settled"), [(SupersededError("taken over"), True), (UsageError("no srun"), False)]
)
def test_the_watchdog_leaves_a_run_alone_that_another_supervisor_has(
    run_to_its_end: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    error: RunError,
    settled: bool,
) -> None:
    """Its job must not come back beside the other; any other end without a word may be requeued."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(board, "_board", shared := JobBoard())
    monkeypatch.setattr(daemon, "salvage", fail)
    with pytest.raises(type(error)):
        run_to_its_end("none")
    assert (shared.stage is SupervisorStage.SETTLED) is settled
