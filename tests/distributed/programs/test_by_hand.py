"""docs/examples/by_hand.py: a loop that asks when to stop and saves, on one rank and on two."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import warm
from harness import KEMPNER, ROOT, Job, in_words, launch
from patience import scaled

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.cluster.network.ports import free_port
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
PROGRAM = HERE / "signalled_by_hand.py"
STEPS, AT = 200, 33


class Place:
    """A folder in which the example is started again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.printed = folder, ""
        folder.mkdir()
        self.run = RunDirectory(folder / "runs" / "by_hand")

    def order(self, rank: int, to_parent: bool = False, number: str = "SIGTERM") -> None:
        """Have a rank of the next start get a signal in its step `AT`, or what has started it."""
        order = {"rank": rank, "at": AT, "to_parent": to_parent, "signal": number}
        (self.folder / "signal.json").write_text(json.dumps(order))

    def start(self, ranks: int) -> list[int]:
        """Start it without a supervisor; the exit codes of its ranks."""
        port = free_port("127.0.0.1", f"{os.getpid()} {self.folder}")
        common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
        places = [{**common, "MASTER_PORT": port, "RANK": n, "LOCAL_RANK": n} for n in range(ranks)]
        placed = [in_words(place) | {"TORCHELASTIC_RUN_ID": "none"} for place in places]
        with open(self.folder / "printed", "wb") as out:
            command = [sys.executable, str(PROGRAM)]
            environs = [{**os.environ, **place} for place in placed] if ranks > 1 else [os.environ]
            all_of = [warm.start(command, environ, out, self.folder) for environ in environs]
            try:
                return [process.wait(scaled(120)) for process in all_of]
            finally:
                for process in all_of:
                    process.send_signal(signal.SIGKILL)
                self.take_output(self.folder / "printed")

    def supervise(self) -> int:
        """Start it on two ranks under a supervisor, whose exit code this is."""
        log = self.folder / "supervised"
        command = [*KEMPNER, "supervise", "--nproc=2", "--run.name=by_hand", "--"]
        with open(log, "wb") as out:
            command += [sys.executable, str(PROGRAM)]
            process = warm.start(command, os.environ, out, self.folder, spare=True)
        try:
            return Job(process, log).wait()
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            self.take_output(log)

    def take_output(self, file: Path) -> None:
        self.printed += file.read_text(errors="replace")

    def undisturbed_from_now_on(self) -> None:
        (self.folder / "signal.json").unlink()

    def losses(self) -> list[tuple[int, str]]:
        """What rank 0 has printed, in the order in which it was."""
        found = re.findall(r"^step (\d+) loss ([\d.]+)", self.printed, re.M)
        return [(int(step), loss) for step, loss in found]

    def weights(self) -> Mapping[str, torch.Tensor]:
        found: Mapping[str, torch.Tensor] = torch.load(self.folder / "curve.pt")
        return found

    def stops(self) -> list[int]:
        """The steps after which it has stopped; nothing was lost, and each is in a checkpoint."""
        events = [event for event in read_lines(self.run.ledger) if event["event"] == "stopped"]
        assert [event["lost_steps"] for event in events] == [0] * len(events)
        return [event["step"] for event in events]

    def assert_as(self, whole: Place) -> None:
        """To the last bit, and no step was made twice."""
        assert self.losses() == whole.losses()
        ours, theirs = self.weights(), whole.weights()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def a_whole_run(folder: Path, ranks: int) -> Place:
    place = Place(folder)
    assert place.start(ranks) == [0] * ranks, place.printed
    assert [step for step, _ in place.losses()] == list(range(1, STEPS + 1))
    return place


def batch_job(place: Place) -> int:
    """Run docs/examples/by_hand.sh as Slurm would; its exit code."""
    stubs = place.folder / "bin"
    stubs.mkdir(exist_ok=True)
    for name, line in (
        ("python", f'exec "{sys.executable}" "{PROGRAM}"'),
        ("scontrol", f'echo "$*" >> "{place.folder}/scontrol"'),
    ):
        (stubs / name).write_text(f"#!/bin/sh\n{line}\n")
        (stubs / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    with open(place.folder / "job", "wb") as out:
        script = ROOT / "docs" / "examples" / "by_hand.sh"
        process = subprocess.Popen(
            ["bash", script], env=environ, cwd=place.folder, stdout=out, stderr=out
        )
        try:
            return process.wait(scaled(120))
        finally:
            process.kill()
            place.take_output(place.folder / "job")


def test_one_rank_in_a_batch_job_comes_back_after_the_warning(tmp_path: Path) -> None:
    whole = a_whole_run(tmp_path / "whole", 1)
    place = Place(tmp_path / "stopped")
    place.order(rank=0, to_parent=True)
    assert batch_job(place) == 75, place.printed
    assert (place.folder / "scontrol").read_text() == "requeue 4711\n"
    assert not (place.folder / "curve.pt").exists()
    (stopped,) = place.stops()
    assert AT <= stopped < STEPS
    assert CheckpointFolder(place.run.checkpoints).latest() == stopped

    place.undisturbed_from_now_on()
    assert batch_job(place) == 0, place.printed
    assert f"resumed at step {stopped}" in place.printed
    assert (place.folder / "scontrol").read_text() == "requeue 4711\n"
    place.assert_as(whole)


def test_two_ranks_stop_after_the_same_step_and_go_on_under_a_supervisor(tmp_path: Path) -> None:
    whole = a_whole_run(tmp_path / "whole", 2)
    place = Place(tmp_path / "stopped")
    place.order(rank=1)
    assert place.start(2) == [75, 75], place.printed
    (first,) = place.stops()
    assert AT <= first < STEPS
    assert CheckpointFolder(place.run.checkpoints).latest() == first

    place.order(rank=0)
    assert place.supervise() == 75, place.printed
    _, second = place.stops()
    assert first + AT <= second < STEPS
    place.undisturbed_from_now_on()
    assert place.supervise() == 0, place.printed
    (completed,) = [e for e in read_lines(place.run.ledger) if e["event"] == "completed"]
    assert completed["step"] == STEPS
    place.assert_as(whole)


def test_ranks_without_a_launcher_vote_with_and_without_a_manager(tmp_path: Path) -> None:
    launch(HERE / "by_hand_spawned.py", 2, tmp_path)


def test_a_kill_goes_back_to_the_last_save(tmp_path: Path) -> None:
    whole = a_whole_run(tmp_path / "whole", 1)
    place = Place(tmp_path / "killed")
    place.order(rank=0, number="SIGKILL")
    assert place.start(1) == [-signal.SIGKILL], place.printed
    saved = CheckpointFolder(place.run.checkpoints).latest() or 0
    assert saved in (0, 20)  # its save may have been in flight
    place.undisturbed_from_now_on()
    place.printed = ""
    assert place.start(1) == [0], place.printed
    assert place.losses() == whole.losses()[saved:]
