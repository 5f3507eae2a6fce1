"""Finds the runs of a project, and reads them in parallel."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import tomli

from kempner.insight.run_reader import RunFacts, RunReader
from kempner.insight.status.activity import Activity
from kempner.insight.status.job import JobWatch
from kempner.insight.status.summary import Status, summarise
from kempner.run.process.exit_codes import RunError, cannot_read
from kempner.run.record.run_dir import RunDirectory

USUAL = "runs"  # the default of `run.dir`
AT_ONCE = 8  # runs read at the same time

_CONFIGS = ("*.toml", "configs/*.toml", "configs/*/*.toml")


def places(folder: Path) -> list[Path]:
    """The folders that may hold a project's runs: `runs`, and each `run.dir` of its
    configurations."""
    found = [folder / USUAL]
    for pattern in _CONFIGS:
        for config in sorted(folder.glob(pattern)):
            try:
                section = tomli.loads(config.read_text(encoding="utf-8")).get("run")
            except (OSError, ValueError):
                continue  # not a configuration of kempner
            named = section.get("dir") if isinstance(section, dict) else None
            if isinstance(named, str):
                found.append(folder / Path(named).expanduser())
    return list(dict.fromkeys(found))


def find_runs(where: Iterable[Path]) -> list[RunDirectory]:
    found: dict[Path, RunDirectory] = {}
    for folder in where:
        for ledger in folder.glob("*/ledger.jsonl"):
            found.setdefault(ledger.parent.resolve(), RunDirectory(ledger.parent))
    return sorted(found.values(), key=lambda run: run.path.name)


class RunFollower:
    """Follows one run, and asks Slurm about its job."""

    def __init__(self, run: RunDirectory, job: JobWatch, *, patient: bool) -> None:
        self.run, self._job = run, job
        self._reader = RunReader(run, patient=patient)

    def read(self) -> Status:
        """The status now. Raises `RunError` if the run cannot be read now."""
        try:
            facts = self._reader.read()
        except OSError as error:
            raise cannot_read(self.run.ledger, error) from error
        status = summarise(facts)
        waits = status.doing.activity in (Activity.QUEUED, Activity.DEAD)
        # Slurm is asked only where it can add something, not about every run that has ended.
        if not (self._job.named or waits or facts.live.alive is not False):
            return status
        job = self._job.look(facts.history)
        return status if job is None else summarise(replace(facts, job=job))


class AllRuns:
    """Follows all runs, including new ones."""

    def __init__(self, where: Sequence[Path], *, patient: bool) -> None:
        self._where, self._patient = where, patient
        self._followed: dict[Path, RunFollower] = {}

    def read(self) -> list[tuple[str, Status]]:
        """Name and status of each run: live ones first, then by their last progress."""
        runs = find_runs(self._where)
        for run in runs:
            if run.path not in self._followed:
                job = JobWatch(None, wait=self._patient)
                self._followed[run.path] = RunFollower(run, job, patient=self._patient)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(_read, (self._followed[run.path] for run in runs))
            named = [(str(run.path), status) for run, status in zip(runs, found, strict=True)]
        return sorted(named, key=_order)


def _read(follower: RunFollower) -> Status:
    try:
        return follower.read()
    except RunError as error:  # others can still be read
        return summarise(RunFacts(now=time.time(), unread=(str(error),)))


def _order(named: tuple[str, Status]) -> tuple[bool, float, str]:
    name, status = named
    moved = status.progress.logged_at or (status.attempt.begin if status.attempt else 0.0)
    return not status.doing.activity.is_live, -moved, name


def pending(job: JobWatch) -> Status:
    """The status of a job that waits for its first start, before it has a run."""
    facts = RunFacts(now=time.time())
    return summarise(replace(facts, job=job.look(facts.history)))
