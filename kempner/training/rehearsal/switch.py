"""Whether this process takes part in a rehearsal; what only a rehearsal needs is imported then."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kempner.run.control.rehearsal import RehearsalPart

if TYPE_CHECKING:
    from kempner.training.rehearsal.recorder import Recorder


@cache
def recorder() -> Recorder | None:
    """The recorder of this process, which begins to watch with the first call; None without."""
    part = RehearsalPart.from_environment()
    if part is None:
        return None
    from kempner.training.rehearsal.recorder import Recorder

    return Recorder(part)
