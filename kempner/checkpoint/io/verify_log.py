"""Stores results of `verify` beside the checkpoints, since a commit never changes.

One JSON object a line. A checkpoint is known by the digest of its manifest, so that a finding
follows it through a rename and never speaks of another one that came to have its name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kempner.checkpoint.format.manifest import Manifest, digest
from kempner.checkpoint.format.names import VERIFIED
from kempner.checkpoint.io.verify import Damage
from kempner.run.process.durable_io import append_line
from kempner.run.record.ledger import read_lines


@dataclass(frozen=True)
class Finding:
    """The outcome of reading every byte at `time` (Unix, seconds): how many files are damaged."""

    time: float
    damaged: int


def record(folder: Path, manifest: Manifest, damages: Sequence[Damage], now: float) -> None:
    """Keep what a verification found. Raises `OSError`."""
    entry = {"time": round(now, 3), "manifest": digest(manifest), "damaged": len(damages)}
    append_line(folder / VERIFIED, json.dumps(entry))


def read_findings(folder: Path) -> dict[str, Finding]:
    """The last finding on each checkpoint, by its manifest's digest."""
    found = {}
    for line in read_lines(folder / VERIFIED):
        try:
            found[str(line["manifest"])] = Finding(float(line["time"]), int(line["damaged"]))
        except (KeyError, TypeError, ValueError):
            continue  # not a line of ours
    return found
