"""Suspect nodes that the runs of a group tell each other of, in a folder: one file per node.

A file says why the node is suspect and until when; removing it ends that for all other runs. It is
replaced at one go, so that a reader never sees half of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kempner.config.resilience import ResilienceSection
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import replace_durable
from kempner.run.record.history import RunHistory
from kempner.supervisor.nodes.exclusion import Suspect, suspects

BEGAN = time.time()
"""What this process saw before, an earlier one has told the others: somebody may have removed it
since."""


class SharedSuspect(BaseModel):
    """What a file says; times are in seconds since the epoch."""

    model_config = ConfigDict(frozen=True)

    node: str
    reason: str
    since: float
    until: float
    run: str


def known_suspects(
    history: RunHistory, section: ResilienceSection, run: str = ""
) -> dict[str, Suspect]:
    """The suspect nodes by name: those of this run, and of the group's others.

    Others are told of those of this run that there is proof against. A folder that cannot be used
    is no reason to end a run.
    """
    now = time.time()
    own = suspects(history.refresh(), now, section.suspect_for)
    if section.suspects_dir is None:
        return own
    folder = Path(section.suspects_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        theirs = read_shared(folder, now)
        news = {name: s for name, s in own.items() if s.proven and s.since >= BEGAN}
        share(folder, news, theirs, section.suspect_for, run)
    except OSError as error:
        logger().warning(f"resilience.suspects_dir={folder} cannot be used: {error.strerror}")
        return own
    shared = {
        name: Suspect(name, f"{s.reason} (seen by run {s.run})", s.since, proven=True)
        for name, s in theirs.items()
    }
    return {**shared, **own}


def read_shared(folder: Path, now: float) -> dict[str, SharedSuspect]:
    """What the files say that are still true; one that cannot be understood is passed over.

    Raises `OSError`.
    """
    found = {}
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            suspect = SharedSuspect.model_validate_json(path.read_bytes())
        except FileNotFoundError:  # somebody has just removed it
            continue
        except ValueError:
            logger().warning("names no suspect node", file=str(path))
            continue
        if suspect.until > now:
            found[suspect.node] = suspect
    return found


def share(
    folder: Path,
    own: Mapping[str, Suspect],
    known: Mapping[str, SharedSuspect],
    keep_for: float,
    run: str,
) -> None:
    """Tell the group of suspects of our own, unless it knows as much. Raises `OSError`."""
    for name, suspect in own.items():
        if name in known and known[name].since >= suspect.since:
            continue
        told = SharedSuspect(
            node=name,
            reason=suspect.reason,
            since=suspect.since,
            until=suspect.since + keep_for,
            run=run,
        )
        unique = f"{os.uname().nodename}-{os.getpid()}"
        replace_durable(folder / f"{name}.json", told.model_dump_json().encode(), unique=unique)


def withdraw(folder: Path, nodes: Collection[str], names: Collection[str]) -> None:
    """Tell the group that nodes are well again which a run with one of these `names` has accused.

    Raises `OSError`.
    """
    for name, suspect in read_shared(folder, 0.0).items():
        if name in nodes and suspect.run in names:
            (folder / f"{name}.json").unlink(missing_ok=True)
