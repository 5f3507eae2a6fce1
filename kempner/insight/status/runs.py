"""Finds the user's runs here, and reads them all at once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import tomli

from kempner.insight.status.activity import Activity
from kempner.insight.status.facts import RunFacts
from kempner.insight.status.read import JobWatch, RunReader
from kempner.insight.status.summary import Status, summarise
from kempner.run.process.exit_codes import RunError, cannot_read
from kempner.run.record.run_dir import RunDirectory

USUAL = "runs"
"""The default of `run.dir`."""

AT_ONCE = 8
"""Runs that are read at the same time."""

_CONFIGS = ("*.toml", "configs/*.toml", "configs/*/*.toml")


def places(folder: Path) -> list[Path]:
    """Where the runs of a project may be: `runs`, and each `run.dir` of its configurations."""
    found = [folder / USUAL]
    for pattern in _CONFIGS:
        for config in sorted(folder.glob(pattern)):
            if (named := _run_dir(config)) is not None:
                found.append(folder / named)
    return list(dict.fromkeys(found))


def _run_dir(config: Path) -> Path | None:
    try:
        section = tomli.loads(config.read_text(encoding="utf-8")).get("run")
    except (OSError, ValueError):
        return None  # not a configuration of kempner
    named = section.get("dir") if isinstance(section, dict) else None
    return Path(named).expanduser() if isinstance(named, str) else None


def find_runs(where: Iterable[Path]) -> list[RunDirectory]:
    """The runs in these folders, each once, by name."""
    found: dict[Path, RunDirectory] = {}
    for folder in where:
        for ledger in folder.glob("*/ledger.jsonl"):
            found.setdefault(ledger.parent.resolve(), RunDirectory(ledger.parent))
    return sorted(found.values(), key=lambda run: run.path.name)


class RunFollower:
    """Reads one run again and again, and asks Slurm about `job`, or that which the run names."""

    def __init__(self, run: RunDirectory, job: JobWatch, *, patient: bool) -> None:
        self.run, self._job = run, job
        self._reader = RunReader(run, patient=patient)

    def read(self) -> Status:
        """Its status now. Raises `RunError` if it cannot be read now."""
        try:
            facts = self._reader.read()
        except OSError as error:
            raise cannot_read(self.run.ledger, error) from error
        status = summarise(facts)
        if not (self._job.named or _may_have_job(status)):
            return status
        job = self._job.look(facts.history)
        return status if job is None else summarise(replace(facts, job=job))


def _may_have_job(status: Status) -> bool:
    """Whether Slurm may know more: not of the jobs of all runs that have ended."""
    activity = status.doing.activity
    return status.facts.live.alive is not False or activity in (Activity.QUEUED, Activity.DEAD)


class AllRuns:
    """Reads all runs again and again; those that are new are found."""

    def __init__(self, where: Sequence[Path], *, patient: bool) -> None:
        self._where, self._patient = where, patient
        self._followed: dict[Path, RunFollower] = {}

    def read(self) -> list[tuple[str, Status]]:
        """Name and status of each: those that are live first, then by when they last moved."""
        followers = [self._follower(run) for run in find_runs(self._where)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(_read, followers))
        named = [(str(f.run.path), status) for f, status in zip(followers, found, strict=True)]
        return sorted(named, key=_order)

    def _follower(self, run: RunDirectory) -> RunFollower:
        if run.path not in self._followed:
            job = JobWatch(None, wait=self._patient)
            self._followed[run.path] = RunFollower(run, job, patient=self._patient)
        return self._followed[run.path]


def _read(follower: RunFollower) -> Status:
    try:
        return follower.read()
    except RunError as error:  # the others can be
        return summarise(RunFacts(now=time.time(), unread=(str(error),)))


def _order(named: tuple[str, Status]) -> tuple[bool, float, str]:
    name, status = named
    moved = status.progress.logged_at or (status.attempt.begin if status.attempt else 0.0)
    return not status.doing.activity.is_live, -moved, name


def pending(job: JobWatch) -> Status:
    """The status of a job that waits for its first start, and so has no run yet."""
    facts = RunFacts(now=time.time())
    return summarise(replace(facts, job=job.look(facts.history)))
