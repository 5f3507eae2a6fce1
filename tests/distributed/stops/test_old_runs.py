"""Runs that earlier commits have left unfinished are gone on with, as if nothing had changed."""

from __future__ import annotations

import json
import os
import signal
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm
from harness import KEMPNER, Job
from old_runs import (
    HERE,
    RUNS,
    OldRun,
    Step,
    bits_of_this_machine,
    final_digest,
    from_json,
    steps_of,
)

from kempner.checkpoint.compare import TensorVerdict, open_dcp, open_kempner, pairs
from kempner.checkpoint.format.names import METADATA
from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(300)

ARCHIVES = sorted(HERE.glob("*.tar.xz"))


@dataclass(frozen=True)
class GoneOn:
    """An old run in the folder in which this kempner has completed it."""

    run: OldRun
    folder: Path
    made: dict[str, Any]
    """What is known of the archive."""

    @property
    def about(self) -> dict[str, Any]:
        """What is known of the run."""
        about: dict[str, Any] = self.made["runs"][self.run.name]
        return about

    @property
    def undisturbed(self) -> dict[int, Step]:
        return from_json(self.about["steps"])

    def events(self, name: str) -> list[dict[str, Any]]:
        ledger = read_lines(self.folder / self.run.record / "ledger.jsonl")
        return [event for event in ledger if event["event"] == name]


@pytest.fixture(
    scope="module",
    params=[(archive, run) for archive in ARCHIVES for run in RUNS],
    ids=lambda param: f"{param[0].name.partition('.')[0]}-{param[1].name}",
)
def gone_on(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GoneOn:
    archive, run = request.param
    root = tmp_path_factory.mktemp("old")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # not before 3.11.4
        tar.extractall(root)
    made = json.loads((root / "made.json").read_text())
    folder = root / run.name
    assert_saved_state_is_read(folder, run, made["runs"][run.name]["saved"])
    path = os.pathsep.join([str(Path(KEMPNER[0]).parent), os.environ["PATH"]])
    log = folder / "out.txt"
    with open(log, "wb") as out:
        command = [*KEMPNER, "supervise", f"--nproc={run.ranks}", *run.command]
        spare = "--" not in run.command
        process = warm.start(command, {**os.environ, "PATH": path}, out, folder, spare=spare)
    job = Job(process, log)
    try:
        assert job.wait(200) == 0, job.output()
    finally:
        job.process.send_signal(signal.SIGKILL)
    return GoneOn(run, folder, made)


def assert_saved_state_is_read(folder: Path, run: OldRun, saved: int) -> None:
    """Every tensor has the bits that torch's own reader finds in the files.

    What a program has loaded is in its notes instead: a digest of the whole state.
    """
    checkpoint = folder / run.record / "checkpoints" / f"step-{saved:08}"
    if not (checkpoint / METADATA).exists():
        return
    found = list(pairs(open_kempner(checkpoint), open_dcp(checkpoint), lambda _: None))
    assert found
    assert {pair.verdict for pair in found} == {TensorVerdict.IDENTICAL}


def test_an_old_run_goes_on_where_it_was_and_takes_every_sample_once(gone_on: GoneOn) -> None:
    run, saved, undisturbed = gone_on.run, gone_on.about["saved"], gone_on.undisturbed
    assert [event["step"] for event in gone_on.events("resumed")] == [saved]
    assert [event["step"] for event in gone_on.events("completed")] == [run.steps]
    steps = steps_of(gone_on.folder, run)
    assert list(steps) == list(range(1, run.steps + 1))
    assert [step.samples for step in steps.values()] == [
        step.samples for step in undisturbed.values()
    ]
    seen = Counter(s for step in steps.values() for rank in step.samples for s in rank)
    size, taken = sum(map(len, steps[1].samples)), sum(seen.values())
    assert taken == run.steps * size
    assert seen == Counter(s % (run.per_epoch or taken) for s in range(taken))
    # It was loaded, and not computed: these are the old machine's bits on any machine.
    assert steps[saved + 1].state == undisturbed[saved + 1].state


def test_an_old_run_is_to_the_bit_what_it_would_have_been(gone_on: GoneOn) -> None:
    if bits_of_this_machine() != gone_on.made["bits"]:
        pytest.skip("this CPU, or this torch, rounds otherwise than where the run was begun")
    assert steps_of(gone_on.folder, gone_on.run) == gone_on.undisturbed
    assert final_digest(gone_on.folder, gone_on.run) == gone_on.about["final"]
