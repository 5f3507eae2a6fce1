"""Imports the recorder only in a process that takes part in a rehearsal."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kempner.run.control.rehearsal import RehearsalPart

if TYPE_CHECKING:
    from kempner.training.rehearsal.recorder import Recorder


@cache
def recorder() -> Recorder | None:
    """The recorder of this process, which starts with the first call; None outside of a
    rehearsal."""
    part = RehearsalPart.from_environment()
    if part is None:
        return None
    from kempner.training.rehearsal.recorder import Recorder

    return Recorder(part)
