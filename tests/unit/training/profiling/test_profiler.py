"""Traces of steps: which are made, who hears of them, and that they stay few."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import wait_until
from patience import scaled

from kempner.config.sections import ProfilingSection
from kempner.run.record.profile_request import ProfileAnswer, ProfileMail
from kempner.run.record.run_dir import RunDirectory
from kempner.training.observe import profiler as module
from kempner.training.observe.profiler import Profiler, Span, due


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.attempt(1).mkdir(parents=True)
    return run


@contextmanager
def profiler_of(run: RunDirectory, section: ProfilingSection, rank: int = 0) -> Iterator[Profiler]:
    opened = Profiler(section, run, attempt=1, rank=rank, gpu=False)
    yield opened
    opened.close()


def make(profiler: Profiler, first: int, last: int) -> None:
    for step in range(first, last + 1):
        profiler.begin(step)
        torch.ones(4, 4).matmul(torch.ones(4, 4))
        profiler.end(step)
        if profiler._writer is not None:
            profiler._writer.join(scaled(60))


def traced(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def test_which_steps_are_due() -> None:
    section = ProfilingSection(steps=[3, 9], ranks=[0, 2], length=4)
    assert due(section, 0, 3) == Span(3, 6)
    assert due(section, 2, 9) == Span(9, 12)
    assert due(section, 1, 3) is None
    assert due(section, 0, 4) is None
    assert due(ProfilingSection(steps=[1], length=500), 0, 1) == Span(1, module.LONGEST)


def test_a_trace_has_the_operations_of_its_steps_and_few_stay(run: RunDirectory) -> None:
    section = ProfilingSection(steps=[2, 5, 8], length=2, keep=2)
    with profiler_of(run, section) as profiler:
        make(profiler, 1, 10)
    kept = sorted(path.name for path in run.profiles.iterdir())
    assert kept == [f"step-{step:08d}-rank-00000.json.gz" for step in (5, 8)]
    events = traced(run.profiles / kept[0])
    assert sum(event.get("name") == "aten::matmul" for event in events) == 2


def test_somebody_asks_and_is_answered(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY", 0.01)
    mail = ProfileMail(run.attempt(1), 3)
    mail.ask(7)  # no caller waits for this one any more
    request = mail.ask(2)
    with profiler_of(run, ProfilingSection(), rank=3) as profiler:
        wait_until(lambda: profiler._asked is not None, "it has seen the request", 20)
        make(profiler, 41, 44)
        answer = mail.answered(request)
        assert answer == ProfileAnswer(request.id, ("profiles/step-00000041-rank-00003.json.gz",))
        assert len(traced(run.path / answer.files[0])) > 2
        assert profiler._asked is None  # once


def test_a_trace_that_cannot_be_written_is_told_and_costs_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY", 0.01)
    run.profiles.write_text("a file is in its place")
    request = (mail := ProfileMail(run.attempt(1), 0)).ask(1)
    with profiler_of(run, ProfilingSection()) as profiler:
        wait_until(lambda: profiler._asked is not None, "it has seen the request", 20)
        make(profiler, 1, 3)
    answer = mail.answered(request)
    assert answer is not None
    assert "the trace of steps 1 to 1 is lost" in answer.error


def test_what_makes_no_sense_is_no_request(run: RunDirectory) -> None:
    mail = ProfileMail(run.attempt(1), 0)
    assert mail.asked() is None
    for content in ("", "[]", '{"id": "x"}', '{"id": "", "steps": 3}', '{"id": "x", "steps": "3"}'):
        (run.attempt(1) / "rank-00000.profile-asked.json").write_text(content)
        assert mail.asked() is None


def test_storage_that_hangs_holds_up_no_step(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second trace is left out while the first one cannot be written."""
    released = threading.Event()
    finish = Profiler._finish
    monkeypatch.setattr(
        Profiler, "_finish", lambda *arguments: released.wait(scaled(60)) and finish(*arguments)
    )
    monkeypatch.setattr(module, "LAST_WAIT", 0.01)
    with profiler_of(run, ProfilingSection(steps=[1, 3], length=1)) as profiler:
        for step in range(1, 6):
            profiler.begin(step)
            profiler.end(step)
    assert not run.profiles.exists()
    released.set()
    assert profiler._writer is not None
    profiler._writer.join(scaled(60))
    assert [path.name for path in run.profiles.iterdir()] == ["step-00000001-rank-00000.json.gz"]
