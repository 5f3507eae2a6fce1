"""What failed first in a job, from its logs alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kempner.insight.triage.log.reading import read_log
from kempner.insight.triage.scan import Scan
from kempner.insight.triage.verdict import Verdict, decide


def triage_logs(paths: Sequence[Path]) -> Verdict:
    """The verdict on one job, of which these are the logs.

    Raises `OSError` if one cannot be read.
    """
    scan = Scan()
    for path in paths:
        scan.read(str(path), read_log(path))
    return decide(scan)
