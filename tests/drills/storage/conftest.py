"""The faulty file system as a fixture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from drilling import ALL
from faulty_storage.cell import (
    IN_DRILLS,
    IN_TESTS,
    OVERRIDES,
    FaultyRun,
    Player,
    make_stopped_run,
    stopped_run,
)
from faulty_storage.mount import REQUIRE, Mount, missing, mounted
from harness import Run, made_once, write_tokens


@pytest.fixture(scope="session")
def fuse() -> None:
    """Skips what needs FUSE where there is none; with KEMPNER_REQUIRE_FUSE=1 that fails."""
    if reason := missing():
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)


@pytest.fixture
def storage(fuse: None, tmp_path: Path) -> Iterator[Mount]:
    """A healthy mount, until a test adds a rule."""
    with mounted(tmp_path / "storage") as mount:
        yield mount


@pytest.fixture(scope="session")
def tokens(shared: Path) -> Path:
    """A corpus of many small token files, so that a run opens another one every few steps."""
    parts = [[(part + n * n) % 251 for n in range(180)] for part in range(16)]
    make = lambda folder: write_tokens(folder / "tokens", parts)  # noqa: E731
    return made_once(shared / "small-parts", make) / "tokens"


@pytest.fixture(scope="session")
def player(fuse: None, shared: Path, tokens: Path) -> Player:
    """Plays cells of the matrix, beside runs that are made once."""

    def stopped(world: int) -> FaultyRun:
        make = lambda folder: make_stopped_run(folder, tokens, world)  # noqa: E731
        return stopped_run(made_once(shared / f"stopped-{world}", make), tokens)

    def undisturbed(world: int) -> Run:
        complete = lambda folder: Run(folder, tokens).complete(world, *OVERRIDES)  # noqa: E731
        return Run(made_once(shared / f"healthy-{world}", complete), tokens)

    return Player(tokens, stopped, undisturbed, IN_DRILLS if ALL else IN_TESTS)
