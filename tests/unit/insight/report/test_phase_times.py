"""What `benchmarks/goodput/phase_times.py` collects from a run, against what was planted."""

from __future__ import annotations

from pathlib import Path

import pytest
from phase_times import collect
from planted_run import PlantedRun


def test_times_are_collected_from_a_run_as_its_report_counts_them(tmp_path: Path) -> None:
    run = PlantedRun(tmp_path / "run")
    run.train_and_save(beyond=7)
    first_start = run.planted["start"]
    run.fail()
    run.go_on_from(20, again=7)
    run.steps(20)
    run.hang(300.0)
    run.go_on_from(20, again=5)
    planted = dict(run.planted)
    run.complete()
    run.report()
    found = collect([run.path], "planted").samples
    assert len(found["load"]) == 2
    assert sum(found["start"]) == pytest.approx(planted["start"] - first_start, abs=0.1)
    assert len(found["detect"]) == len(found["detect_hang"]) == 1
    ended = found["detect"][0] + found["detect_hang"][0]
    assert ended == pytest.approx(planted["hung"] + planted["stop"], abs=0.1)
    assert sum(found["stall"]) == pytest.approx(planted["save"], abs=0.1)
    assert found["step"] == pytest.approx([run.step_takes] * 3)
