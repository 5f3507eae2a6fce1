"""What is kept of a submission in its run's directory: `submissions/<n>/`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from kempner.run.process.durable_io import replace_durable
from kempner.run.record.lease import Holder, start_ticks
from kempner.run.record.run_dir import RunDirectory

_RECORD = "submitted.json"


@dataclass(frozen=True)
class Submission:
    """The `number`th submission of a run, after so many `attempts`.

    Either a Slurm `job`, or the process `pid` that began at `started` (clock ticks) on `machine`,
    as in `Holder`.
    """

    number: int
    attempts: int
    job: str = ""
    machine: str = ""
    pid: int = 0
    started: int = 0

    @classmethod
    def of_process(cls, number: int, attempts: int, pid: int) -> Self:
        """Of a process that was just started here."""
        return cls(number, attempts, "", Holder.here(0.0).machine, pid, start_ticks(pid) or 0)

    def process_lives(self) -> bool | None:
        """Whether the process is there; None if it is another machine's, or a Slurm job's."""
        if self.job or self.machine != Holder.here(0.0).machine:
            return None
        return bool(self.started) and start_ticks(self.pid) == self.started

    def write(self, run: RunDirectory) -> None:
        """Keep it: from now on it is the run's last one. Raises `OSError`."""
        content = json.dumps(asdict(self)).encode()
        replace_durable(folder_of(run, self.number) / _RECORD, content, unique="new")


def folder_of(run: RunDirectory, number: int) -> Path:
    """Where a submission's files are."""
    return run.submissions / str(number)


def log_of(run: RunDirectory, number: int) -> Path:
    """What the supervisor of a submission, and the first rank, print."""
    return folder_of(run, number) / "log.out"


def cancelled_mark(run: RunDirectory, number: int) -> Path:
    """Exists if the submission was cancelled by `Job.cancel`."""
    return folder_of(run, number) / "cancelled"


def reserve(run: RunDirectory) -> int:
    """A number that no other submission has, with a folder. Raises `OSError`."""
    run.submissions.mkdir(parents=True, exist_ok=True)
    number = max(_numbers(run), default=0) + 1
    while True:
        try:
            folder_of(run, number).mkdir()
        except FileExistsError:
            number += 1
            continue
        return number


def last_submission(run: RunDirectory) -> Submission | None:
    """The newest submission of a run. Raises `OSError` if it cannot be read now."""
    for number in sorted(_numbers(run), reverse=True):
        try:
            return Submission(**json.loads((folder_of(run, number) / _RECORD).read_bytes()))
        except (FileNotFoundError, TypeError, ValueError):
            continue  # it failed
    return None


def _numbers(run: RunDirectory) -> list[int]:
    try:
        return [int(path.name) for path in run.submissions.iterdir() if path.name.isdecimal()]
    except FileNotFoundError:
        return []
