"""Names of files and folders in the checkpoint folder.

    step-00000120                      committed, if its manifest says so
    latest -> step-00000120            the newest commit of the live branch; a file with that name
                                       where there are no links
    .latest.a3-77aa01bc.120            replaces `latest` once step 120 is committed
    .step-00000120.a3-9f1c22ab         in progress, by attempt 3
    step-00000120.abandoned-a4         a commit that attempt 4 made again after a fallback
    step-00000120.damaged-a4           a commit that attempt 4 found damaged
    verified.jsonl                     the results of `kempner checkpoint verify`
    .step-00000120.a0-51d07be2         a commit whose deletion has begun
    .reading-step-00000120.7c0e44d1    a process reads step 120

Anything else is not kempner's, and is never read, moved or deleted.
"""

from __future__ import annotations

import errno
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

from kempner.run.process.durable_io import fsync_directory, is_listed, rename, write_durable
from kempner.run.process.retry import PASSING

LATEST = "latest"
MANIFEST = "manifest.json"
METADATA = ".metadata"  # what DCP calls its description of a checkpoint
SHARED_OBJECTS = "objects.pt"
"""The file of a program's registered objects that all ranks share, other than modules and
optimizers."""

VERIFIED = "verified.jsonl"
WITHDRAWN = "manifest.withdrawn.json"  # the manifest's name once the checkpoint is to be deleted
_NOTHING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
"""Errors of a read if there is no such file or link."""

_LONGEST_TEXT = 64  # characters of a file `latest` that are read
_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"(step-\d{8,})\.(abandoned|damaged)-a(\d+)(?:\.\d+)?")
_IN_PROGRESS = re.compile(r"\.step-(\d{8,})\.a(\d+)-[0-9a-f]+")
_MARKER = re.compile(r"\.reading-(step-\d{8,})\.[0-9a-f]+")


def objects_file(rank: int) -> str:
    return f"objects-{rank:05d}.pt"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def in_progress_name(step: int, attempt: int, nonce: str) -> str:
    """The name of a checkpoint that is being written; `nonce` is hexadecimal."""
    return f".{step_name(step)}.a{attempt}-{nonce}"


def dying_name(step: int, nonce: str) -> str:
    """The name of a checkpoint whose deletion has begun: in progress, by attempt 0."""
    return in_progress_name(step, 0, nonce)


def leftover_step(leftover: Path) -> int:
    """The step of a folder in progress. Raises `ValueError` for any other name."""
    match = _IN_PROGRESS.fullmatch(leftover.name)
    if match is None:
        raise ValueError(f"{leftover} is not a checkpoint in progress")
    return int(match[1])


def marker_name(step: int, nonce: str) -> str:
    """The name of a reader's marker file; `nonce` is hexadecimal."""
    return f".reading-{step_name(step)}.{nonce}"


def parse_step(name: str) -> int | None:
    """The step of a committed checkpoint's name, or None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


@dataclass(frozen=True)
class SetAside:
    step: int
    why: str
    attempt: int


def parse_aside(name: str) -> SetAside | None:
    match = _ASIDE.fullmatch(name)
    step = parse_step(match[1]) if match else None
    return SetAside(step, match[2], int(match[3])) if match and step is not None else None


def _named_by(path: Path) -> int | None:
    """The step that a link or a file names; None if it does not exist or names no checkpoint."""
    try:
        try:
            return parse_step(str(path.readlink()))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        with open(path, encoding="ascii", errors="replace") as file:
            return parse_step(file.read(_LONGEST_TEXT).strip())
    except OSError as error:
        if error.errno in _NOTHING:
            return None
        raise


@dataclass
class Tip:
    """The newest `step` of the live branch according to this process; None before it has chosen
    one. `durable`: its directory entry is on disk; `pointed`: `latest` names it. Two threads update
    these, under `lock`."""

    step: int | None = None
    durable: bool = True
    pointed: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reach(self, step: int) -> None:
        """Make `step` the newest; the folder does not show it yet."""
        with self.lock:
            self.step, self.durable, self.pointed = step, False, False


@dataclass(frozen=True)
class CheckpointFolder:
    path: Path
    tip: Tip = field(default_factory=Tip, compare=False, repr=False)

    def step(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or will be."""
        return self.path / step_name(step)

    def committed(self) -> list[int]:
        """The steps that have a manifest, ascending; they may not verify."""
        return self._steps_with(MANIFEST)

    def withdrawn(self) -> list[int]:
        """The steps whose deletion has begun but whose folders are not renamed yet, ascending."""
        return self._steps_with(WITHDRAWN)

    def entries(self) -> list[Path]:
        """All entries; empty if the folder does not exist. Raises `OSError`."""
        return list(self.path.iterdir()) if self.path.is_dir() else []

    def markers(self, step: int) -> list[Path]:
        """The markers of readers of the checkpoint of `step`."""
        matches = ((entry, _MARKER.fullmatch(entry.name)) for entry in self.entries())
        return sorted(entry for entry, m in matches if m and m[1] == step_name(step))

    def latest(self) -> int | None:
        """The step that `latest` names; None if it is absent or names no checkpoint. The text of
        the link or file counts: a link out of this folder is not followed. Raises `OSError` if it
        cannot be read now."""
        return _named_by(self.path / LATEST)

    def is_bare(self) -> bool:
        """Whether the folder has no checkpoints, or does not exist. Raises `OSError`."""
        names = (entry.name for entry in self.entries())
        return not any(n == LATEST or parse_step(n) or parse_aside(n) for n in names)

    def copies(self) -> list[Path]:
        """All entries that may hold a step: committed or not, in progress, set aside."""
        ours = (parse_step, parse_aside, _IN_PROGRESS.fullmatch)
        entries = self.entries()
        return sorted(e for e in entries if any(is_one(e.name) is not None for is_one in ours))

    def prepared(self) -> dict[Path, int]:
        """The prepared replacements of `latest`, each with the step that it names."""
        entries = [e for e in self.entries() if e.name.startswith(f".{LATEST}.")]
        return {entry: step for entry in entries if (step := _named_by(entry)) is not None}

    def prepare_latest(self, step: int, unique: str) -> Path:
        """Create the replacement of `latest`: a link, or a file if the file system has no links.
        From then on `step` counts as the newest once it is committed, even before the swap."""
        next_latest = self.path / f".{LATEST}.{unique}.{step}"
        if _named_by(next_latest) != step:
            next_latest.unlink(missing_ok=True)
            try:
                next_latest.symlink_to(step_name(step))
            except OSError as error:
                if error.errno in PASSING:
                    raise
                write_durable(next_latest, f"{step_name(step)}\n".encode())
        return next_latest

    def point_latest(self, step: int, unique: str) -> None:
        """Point `latest` to `step` by an atomic, durable rename; removes other replacements."""
        next_latest = self.prepare_latest(step, unique)
        rename(next_latest, self.path / LATEST, arrived=lambda: self.latest() == step)
        fsync_directory(self.path)
        for outdated in self.prepared():
            outdated.unlink(missing_ok=True)

    def leftovers(self, before_attempt: int) -> list[Path]:
        """In-progress folders of attempts before `before_attempt`, which will not be finished."""
        matches = ((entry, _IN_PROGRESS.fullmatch(entry.name)) for entry in self.entries())
        return sorted(entry for entry, m in matches if m and int(m[2]) < before_attempt)

    def set_aside(self, step: int, why: str, attempt: int) -> Path:
        """Rename a checkpoint to `step-<s>.<why>-a<attempt>`; its new path. `why` is "abandoned" or
        "damaged". The caller fsyncs the folder."""
        name = f"{step_name(step)}.{why}-a{attempt}"
        target, again = self.path / name, 1
        while target.exists():
            again += 1
            target = self.path / f"{name}.{again}"
        rename(self.step(step), target, arrived=target.exists)
        return target

    def _steps_with(self, file: str) -> list[int]:
        steps = (parse_step(entry.name) for entry in self.entries())
        # A withdrawn manifest was renamed by this run, so no file system shows it late.
        seen = is_listed if file == MANIFEST else lambda path: bool(path.is_file())
        return sorted(s for s in steps if s is not None and seen(self.step(s) / file))
