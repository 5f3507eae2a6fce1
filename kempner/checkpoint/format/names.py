"""Names of files and folders in the checkpoint folder.

    step-00000120                      committed, if its manifest says so
    latest -> step-00000120            the newest commit of the live branch
    .step-00000120.a3-9f1c22ab         in progress, by attempt 3
    step-00000120.abandoned-a4         a commit that attempt 4 made again after a fallback
    step-00000120.damaged-a4           a commit that attempt 4 found damaged
    verified.jsonl                     what `kempner checkpoint verify` found, and when
    .step-00000120.a0-51d07be2         a commit whose deletion has begun
    .reading-step-00000120.7c0e44d1    a process reads step 120

Anything else is not kempner's, and is never read, moved or deleted.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path

from kempner.run.process.durable_io import fsync_directory, rename

LATEST = "latest"
MANIFEST = "manifest.json"
METADATA = ".metadata"
"""What DCP calls its description of a checkpoint."""

SHARED_OBJECTS = "objects.pt"
"""What a program has registered for all ranks together, and is no module or optimizer."""

VERIFIED = "verified.jsonl"
WITHDRAWN = "manifest.withdrawn.json"
"""The manifest's name once the checkpoint is to be deleted."""

_NO_LINK = {errno.ENOENT, errno.ENOTDIR, errno.EINVAL}
"""Error numbers of readlink(2) where there is no link of that name."""

_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"(step-\d{8,})\.(abandoned|damaged)-a(\d+)(?:\.\d+)?")
_IN_PROGRESS = re.compile(r"\.step-(\d{8,})\.a(\d+)-[0-9a-f]+")
_MARKER = re.compile(r"\.reading-(step-\d{8,})\.[0-9a-f]+")


def objects_file(rank: int) -> str:
    """The file of what a program has registered for each rank."""
    return f"objects-{rank:05d}.pt"


def step_name(step: int) -> str:
    """The name of a committed checkpoint."""
    return f"step-{step:08d}"


def in_progress_name(step: int, attempt: int, nonce: str) -> str:
    """The name of a checkpoint that is being written; `nonce` is hexadecimal."""
    return f".{step_name(step)}.a{attempt}-{nonce}"


def dying_name(step: int, nonce: str) -> str:
    """The name of a checkpoint whose deletion has begun: in progress, by no attempt."""
    return in_progress_name(step, 0, nonce)


def leftover_step(leftover: Path) -> int:
    """The step of a folder in progress. Raises `ValueError` for any other name."""
    match = _IN_PROGRESS.fullmatch(leftover.name)
    if match is None:
        raise ValueError(f"{leftover} is not a checkpoint in progress")
    return int(match[1])


def marker_name(step: int, nonce: str) -> str:
    """The name of the file with which a reader says what it reads; `nonce` is hexadecimal."""
    return f".reading-{step_name(step)}.{nonce}"


def parse_step(name: str) -> int | None:
    """The step of a committed checkpoint's name, or None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


@dataclass(frozen=True)
class SetAside:
    """What a checkpoint that was set aside tells by its name; `why` is "abandoned" or "damaged"."""

    step: int
    why: str
    attempt: int


def parse_aside(name: str) -> SetAside | None:
    """The meaning of a name that `CheckpointFolder.set_aside` gave, or None for any other name."""
    match = _ASIDE.fullmatch(name)
    step = parse_step(match[1]) if match else None
    return SetAside(step, match[2], int(match[3])) if match and step is not None else None


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder that holds a run's checkpoints."""

    path: Path

    def step(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or will be."""
        return self.path / step_name(step)

    def committed(self) -> list[int]:
        """Steps that have a manifest, ascending. Whether it verifies is another question."""
        return self._steps_with(MANIFEST)

    def withdrawn(self) -> list[int]:
        """Steps whose deletion has begun, but whose folder still has its name, ascending."""
        return self._steps_with(WITHDRAWN)

    def markers(self, step: int) -> list[Path]:
        """The files of those who read the checkpoint of `step`."""
        matches = ((entry, _MARKER.fullmatch(entry.name)) for entry in self.path.iterdir())
        return sorted(entry for entry, m in matches if m and m[1] == step_name(step))

    def latest(self) -> int | None:
        """The step that `latest` names, or None if it is absent or names no step of ours.

        The link's text decides, not what it resolves to: a link that points out of this folder is
        not followed. Raises `OSError` if it cannot be read now.
        """
        try:
            return parse_step(str((self.path / LATEST).readlink()))
        except OSError as error:
            if error.errno in _NO_LINK:
                return None
            raise

    def is_bare(self) -> bool:
        """Whether nothing in it is ours, or it is not there. Raises `OSError`."""
        if not self.path.is_dir():
            return True
        names = [entry.name for entry in self.path.iterdir()]
        return not any(n == LATEST or parse_step(n) or parse_aside(n) for n in names)

    def point_latest(self, step: int, unique: str) -> None:
        """Swap `latest` to `step` by an atomic rename, durably."""
        temporary = self.path / f".{LATEST}.{unique}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(step_name(step))
        rename(temporary, self.path / LATEST, arrived=lambda: self.latest() == step)
        fsync_directory(self.path)

    def leftovers(self, before_attempt: int) -> list[Path]:
        """In-progress folders of attempts below `before_attempt`, which will not be finished."""
        if not self.path.is_dir():
            return []
        matches = ((entry, _IN_PROGRESS.fullmatch(entry.name)) for entry in self.path.iterdir())
        return sorted(entry for entry, m in matches if m and int(m[2]) < before_attempt)

    def set_aside(self, step: int, why: str, attempt: int) -> Path:
        """Rename a checkpoint out of the way, to `step-<s>.<why>-a<attempt>`; return its new path.

        `why` is "abandoned" or "damaged". The caller fsyncs the folder.
        """
        name = f"{step_name(step)}.{why}-a{attempt}"
        target, again = self.path / name, 1
        while target.exists():
            again += 1
            target = self.path / f"{name}.{again}"
        rename(self.step(step), target, arrived=target.exists)
        return target

    def _steps_with(self, file: str) -> list[int]:
        if not self.path.is_dir():
            return []
        steps = (parse_step(entry.name) for entry in self.path.iterdir())
        return sorted(s for s in steps if s is not None and (self.step(s) / file).is_file())
