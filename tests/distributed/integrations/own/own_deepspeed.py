"""docs/examples/with_deepspeed.py, which notes its losses, with trouble in its steps."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from trouble import note, strike

import kempner

EXAMPLE = Path(__file__).resolve().parents[4] / "docs" / "examples" / "with_deepspeed.py"


class Struck(kempner.ShutdownHandler):
    """Asked once in each step of the example."""

    def should_shutdown(self) -> bool:
        loop = sys._getframe(1).f_globals
        note(loop["step"], [], loop["loss"].item())
        strike(loop["step"])
        return super().should_shutdown()


if __name__ == "__main__":
    kempner.ShutdownHandler = Struck  # type: ignore[misc]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
