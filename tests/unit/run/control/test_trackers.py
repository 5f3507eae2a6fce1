"""Trackers show one run for all starts of a program, and another one for each of its loops."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kempner.run.control.launch_env import Launch, LaunchTerms
from kempner.run.control.trackers import (
    TRACKERS,
    Trackers,
    begin_next_loop,
    note_mlflow_run,
    open_trackers,
)

IDS = ("WANDB_RUN_ID", "COMET_EXPERIMENT_KEY", "MLFLOW_RUN_ID")


def started(path: Path, rank: int = 0, **exported: str) -> dict[str, str]:
    """The environment of a rank."""
    environ = {TRACKERS: open_trackers(path), **exported}
    return environ | Trackers.parse(environ[TRACKERS]).variables(rank, environ)


def test_every_start_has_the_same_ids_and_every_run_others(tmp_path: Path) -> None:
    one, again, other = (started(tmp_path / name) for name in ("a", "a", "b"))
    assert one == again
    assert {one[n] for n in IDS if n in one}.isdisjoint(other[n] for n in IDS if n in other)
    assert one["WANDB_RESUME"] == "allow"
    assert one["COMET_RESUME_STRATEGY"] == "get_or_create"
    assert len(one["COMET_EXPERIMENT_KEY"]) == 32
    assert "MLFLOW_RUN_ID" not in one  # it would have to exist


def test_ranks_do_not_write_into_the_same_run(tmp_path: Path) -> None:
    ranks = [started(tmp_path / "a", rank) for rank in range(3)]
    for name in IDS[:2]:
        assert len({environ[name] for environ in ranks}) == 3


def test_what_is_exported_stays_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    environ = started(tmp_path / "a", WANDB_RUN_ID="mine")
    assert (environ["WANDB_RUN_ID"], "WANDB_RESUME" in environ) == ("mine", False)
    begin_next_loop(environ)
    assert environ["WANDB_RUN_ID"] == "mine"


def test_each_loop_of_a_process_has_a_run_of_its_own_at_every_start(tmp_path: Path) -> None:
    def start(*mlflow: str) -> list[list[str | None]]:
        environ = started(tmp_path / "a")
        seen = []
        for run in mlflow:
            seen.append([environ.get(name) for name in IDS])
            environ.pop("MLFLOW_RUN_ID", None)  # as MLflow does, once it has read it
            there = SimpleNamespace(info=SimpleNamespace(run_id=seen[-1][2] or run))
            sys.modules["mlflow"] = SimpleNamespace(active_run=lambda there=there: there)  # type: ignore[assignment]
            note_mlflow_run(tmp_path / "a", environ)
            begin_next_loop(environ)
        return seen

    before = sys.modules.get("mlflow")
    try:
        first, second = start("m1", "m2"), start("m3", "m4", "m5")
    finally:
        sys.modules.pop("mlflow")
        if before is not None:
            sys.modules["mlflow"] = before
    assert [loop[:2] for loop in second[:2]] == [loop[:2] for loop in first]
    assert [loop[2] for loop in second] == ["m1", "m2", None]
    assert len({loop[0] for loop in second}) == 3


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"id": 7}', '{"id": "x", "mlflow_runs": 3}'])
def test_a_file_that_makes_no_sense_ends_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "a").write_text(content)
    assert open_trackers(tmp_path / "a") == ""
    assert open_trackers(tmp_path / "no" / "folder") == ""


def test_a_rank_finds_them_in_its_environment_however_it_is_started(tmp_path: Path) -> None:
    from kempner.run.link.auth import Secret
    from kempner.run.record.attempts import Attempt

    terms = LaunchTerms(tmp_path, 1.0, 1.0, 1.0, trackers=open_trackers(tmp_path / "a"))
    launch = Launch(Attempt(1, "n"), Secret("x"), terms=terms)
    there = Launch.from_environment(launch.environment())
    assert there is not None
    assert there.terms == terms
    assert there.of_rank(0, {}).items() >= Trackers.parse(terms.trackers).variables(0, {}).items()


WANDB = """
import wandb
run = wandb.init(project="p")
run.log({"x": 1})
print("RUN", run.id, run.resumed)
run.finish()
"""


def test_weights_and_biases_goes_on_with_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    folder = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    ids = []
    for _ in range(2):
        environ = {**os.environ, **folder, **started(tmp_path / "a")}
        done = subprocess.run(
            [sys.executable, "-c", WANDB], env=environ, capture_output=True, text=True, check=True
        )
        ids += [line.split()[1] for line in done.stdout.splitlines() if line.startswith("RUN")]
    assert ids == [started(tmp_path / "a")["WANDB_RUN_ID"]] * 2
