"""Storage that is away, or full, for a while: the run waits, and is as one that never missed it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import warm
from harness import KEMPNER, Run, wait_until, write_tokens

from kempner.data.files.token_file import Corpus

WORLD = 2
AWAY = float(os.environ.get("KEMPNER_TEST_AWAY", "1"))
"""Seconds for which storage stays away once a rank waits for it."""


@pytest.fixture
def moving(run: Run, corpus: Path, tmp_path: Path) -> Path:
    """The same tokens in many files of this run alone, one open at a time, to be taken away."""
    whole = Corpus.open(corpus)
    tokens = whole.read(0, whole.index.tokens).tolist()
    shards = [tokens[at : at + 500] for at in range(0, len(tokens), 500)]
    write_tokens(tmp_path / "data", shards, whole.index.dtype, whole.index.vocab_size)
    run.overrides = [f'--data.dataset_path="{tmp_path / "data"}"', "--data.num_shards_per_rank=1"]
    return tmp_path / "data"


def waits(run: Run, attempt: int) -> list[str]:
    """What ranks of an attempt wait for, as the supervisor last heard."""
    try:
        ranks = json.loads(run.record.ranks(attempt).read_text())
    except (FileNotFoundError, ValueError):
        return []
    return [rank["storage"] for rank in ranks if rank["storage"]]


def stay_away() -> None:
    end = time.monotonic() + AWAY
    while time.monotonic() < end:
        time.sleep(0.1)


def assert_nothing_was_lost(run: Run, expected: Run) -> None:
    assert run.steps() == expected.steps()
    assert run.samples() == expected.samples()
    assert not list(run.checkpoints.glob("*.damaged-*"))
    assert not run.record.gave_up.exists()
    assert run.committed()[-1] == max(expected.steps())


def test_data_that_is_away_is_waited_for_in_a_run_and_at_a_restart(
    run: Run, undisturbed: Callable[..., Run], moving: Path, tmp_path: Path
) -> None:
    """A rank is killed while no rank sees the data: 65 and GAVE_UP, once."""
    away = tmp_path / "away"
    job = run.supervise(WORLD)
    pid = run.ready_pid(1, 1, job)
    run.reach(2, job)
    moving.rename(away)
    wait_until(lambda: waits(run, 1), "a rank to wait", job=job)
    stay_away()
    away.rename(moving)
    wait_until(lambda: run.events("storage_waited"), "it to go on", job=job)
    assert run.attempt() == 1

    wait_until(lambda: run.committed(), "a commit", job=job)
    moving.rename(away)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(waits(run, 2)) == WORLD, "both ranks to wait", job=job)
    _, shown = warm.complete(*KEMPNER, "status", run.record.path)
    assert f"waiting for storage: {moving}/index.json: No such file or directory" in shown
    stay_away()
    away.rename(moving)
    assert job.wait() == 0, job.output()
    assert_nothing_was_lost(run, undisturbed(WORLD))
    waited = [event for event in run.events("storage_waited") if event["attempt"] == 2]
    assert sorted(event["rank"] for event in waited) == [0, 1]
    assert all(event["tries"] > 1 for event in waited)
    assert run.events("hang") == []


def test_a_disk_that_is_full_for_a_while_ends_nothing(
    run: Run, undisturbed: Callable[..., Run], small_disk: Path
) -> None:
    """More saves fail than `checkpoint.max_failures` allows; the final one is waited for."""
    checkpoints = small_disk / "checkpoints"
    job = run.supervise(WORLD, f'--checkpoint.dir="{checkpoints}"', "--checkpoint.max_failures=2")
    wait_until(lambda: (checkpoints / "latest").exists(), "a commit", job=job)
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    wait_until(lambda: len(run.events("checkpoint_failed")) > 2, "failed saves", job=job)
    stay_away()
    ballast.unlink()
    assert job.wait() == 0, job.output()
    assert json.loads((checkpoints / "latest" / "manifest.json").read_text())["step"] == 40
    assert run.steps() == undisturbed(WORLD).steps()
    assert not run.record.gave_up.exists()
    assert run.attempt() == 1
    (over,) = run.events("storage_waited")
    assert "No space left on device" in over["what"]


def test_checkpoints_that_are_away_at_a_start_are_waited_for(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    """An empty folder in their place is no reason to begin at step 0."""
    job = run.supervise(WORLD)
    wait_until(lambda: run.committed(), "a commit", job=job)
    job.signal()
    assert job.wait() == 75, job.output()
    away = run.checkpoints.with_name("away")
    run.checkpoints.rename(away)
    run.checkpoints.mkdir()
    job = run.supervise(WORLD)
    wait_until(lambda: "waiting for storage" in job.output(), "the start to wait", job=job)
    stay_away()
    run.checkpoints.rmdir()
    away.rename(run.checkpoints)
    assert job.wait() == 0, job.output()
    assert not run.events("started")[1:]
    assert_nothing_was_lost(run, undisturbed(WORLD))
