"""The commit that is tested."""

from __future__ import annotations

import subprocess

from harness import ROOT


def commit() -> str:
    """By which cells are drawn; the same where there is no repository."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
