"""Which software a node has, and whether torch can be imported there, in a process of its own."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

IMPORT_WITHIN = 180.0
"""Seconds that the import of torch may take: from a busy network file system, minutes."""

_DRY_RUN = """
import importlib, json, sys
import kempner, torch
told = {
    "kempner": kempner.__version__,
    "torch": torch.__version__,
    "cuda": torch.version.cuda or torch.version.hip or "",
    "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
}
for name in sys.argv[1:]:
    module, _, function = name.partition(":")
    found = importlib.import_module(module)
    for part in function.split(".") if function else ():
        found = getattr(found, part)
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Software:
    """Versions, and what torch sees: `cuda` is what it was built with (CUDA or ROCm), empty for
    CPUs alone; `devices` is how many GPUs it can use. `trouble` says why an import failed."""

    python: str
    kempner: str = ""
    torch: str = ""
    cuda: str = ""
    devices: int = 0
    trouble: str = ""


def look_at_software(imports: Sequence[str] = ()) -> Software:
    """Import torch and `imports` (`module` or `module:function`) in a process of its own."""
    python = platform.python_version()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DRY_RUN, *imports],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_WITHIN,
        )
    except subprocess.TimeoutExpired:
        trouble = f"its import takes longer than {IMPORT_WITHIN:g} s"
        return Software(python, trouble=trouble)
    except OSError as error:
        return Software(python, trouble=str(error))
    if done.returncode:
        last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
        trouble = last[0] if last else f"the process ended with {done.returncode}"
        return Software(python, trouble=trouble)
    told = json.loads(done.stdout.splitlines()[-1])
    return Software(python, **told)
