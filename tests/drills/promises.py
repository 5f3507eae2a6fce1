"""What must hold of a checkpoint folder after anything at all, checked by what a resume uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.io.verify import verify
from kempner.checkpoint.store.selection import choose


def resumable(folder: CheckpointFolder) -> int | None:
    """The step that a resume ends up with: chosen, and whole; each that is not whole set aside."""
    committed: Sequence[int] = folder.committed()
    while (step := choose(committed, folder.latest())) is not None:
        if not verify(folder.step(step)):
            return step
        committed = [other for other in committed if other != step]
    return None


def broken(path: Path, reported: int | None) -> list[str]:
    """The promises that this folder breaks; `reported` is the last step that was said to be safe.

    No checkpoint is torn; `latest` never dangles; what was reported can be resumed from.
    """
    folder = CheckpointFolder(path)
    torn = {step: damage for step in folder.committed() if (damage := verify(folder.step(step)))}
    found = [f"step {step} is torn: {damage[0]}" for step, damage in torn.items()]
    latest, best = folder.latest(), resumable(folder)
    if latest is not None and (latest in torn or latest not in folder.committed()):
        found.append(f"latest names step {latest}, which is not whole")
    if reported is not None and (best is None or best < reported):
        found.append(f"step {reported} was reported, but a resume finds {best}")
    return [sentence.replace(f"{path}/", "") for sentence in found]
