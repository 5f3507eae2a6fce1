"""What must start quickly imports nothing heavy: what a step calls, what a node is asked while its
home hangs, and each command before it has looked at its arguments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection

import pytest
from patience import scaled

LIBRARIES = ("numpy", "pydantic", "structlog", "torch")
ALONE = [
    "kempner.cli.program.heartbeat",
    "kempner.run.process.worker_process",
    "kempner.probe.processes",
    "kempner.supervisor.watchdog.keeper",
    "kempner.supervisor.watchdog.watch",
    "kempner.training.rehearsal.rank",
]
DRAWS_CURVES = "kempner.cli.insight.report"
"""The one command whose own module computes with arrays."""

COMMANDS = f"""
import importlib, pkgutil, kempner.cli
for module in pkgutil.walk_packages(kempner.cli.__path__, "kempner.cli."):
    if module.name != "{DRAWS_CURVES}":
        importlib.import_module(module.name)
"""


def imported(program: str) -> Collection[str]:
    """Those of the libraries that a program has imported in the end."""
    ends = f"\nimport sys\nprint(*(name for name in {LIBRARIES!r} if name in sys.modules))"
    command = [sys.executable, "-c", program + ends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=True)
    return done.stdout.split()


@pytest.mark.parametrize("module", ALONE)
def test_what_starts_often_or_in_need_imports_no_library(module: str) -> None:
    assert imported(f"import {module}") == []


def test_no_command_imports_numpy_or_torch_to_begin_with() -> None:
    assert not {"numpy", "torch"} & {*imported(COMMANDS)}


def test_a_library_that_is_imported_would_be_seen() -> None:
    assert imported("import numpy, structlog") == ["numpy", "structlog"]
