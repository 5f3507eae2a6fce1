"""How `kempner rehearse` tells a rank that it takes part in a rehearsal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_VARIABLE = "KEMPNER_REHEARSE"


@dataclass(frozen=True)
class RehearsalPart:
    """One start of a rehearsed program.

    Its ranks write their recordings into `folder`, and have their run below `run`. In step `at`
    rank 0 gets a SIGTERM, or a SIGKILL if `kills`. The program runs in `cwd`.
    """

    folder: str
    run: str
    at: int
    kills: bool = False
    cwd: str = "."

    def environment(self) -> dict[str, str]:

        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RehearsalPart | None:
        """The part that this process belongs to; None where nothing is rehearsed."""
        text = environ.get(_VARIABLE)
        return None if text is None else cls(**json.loads(text))


def place_of(path: str | Path, environ: Mapping[str, str] = os.environ) -> Path:
    """`path`, or in a rehearsal the directory that replaces it."""
    part = RehearsalPart.from_environment(environ)
    if part is None:
        return Path(path)
    return Path(part.run) / re.sub(r"[^\w.-]+", "-", str(path)).strip("-")
