"""What each row says of its making: commit, date, machine, versions, command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def head(python: str, packages: Sequence[str]) -> dict[str, Any]:
    asked = [python, "-c", VERSIONS, *packages]
    versions = json.loads(subprocess.run(asked, check=True, capture_output=True).stdout)
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    return {
        "of": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "commit": subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": f"Python {platform.python_version()}",
        "command": shlex.join(["python", "benchmarks/peers/run.py", *sys.argv[1:]]),
        "proves": ["benchmarks/peers"],
    }
