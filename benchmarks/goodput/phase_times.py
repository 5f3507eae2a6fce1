"""How long the phases of a failure take: samples of real runs, or scaled to a cluster.

    python benchmarks/goodput/phase_times.py RUN_DIR... > mine.json

collects them from runs of your own; `table.py --times mine.json` takes the file. Each phase is
counted as `kempner report` counts it (`kempner.insight.report.timeline`).
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kempner.insight.attempts import InterruptionKind, cause_of
from kempner.insight.report.summary import RunData, read_run
from kempner.insight.report.timeline import AttemptTime, Category
from kempner.run.record.events import CheckpointCommitted
from kempner.run.record.run_dir import RunDirectory

HERE = Path(__file__).parent
MEASURED, CLUSTER = HERE / "measured.json", HERE / "cluster.json"


@dataclass(frozen=True)
class PhaseTimes:
    """Samples in seconds, by phase; a draw takes one of them, each as likely.

    `detect`: from a failure until every rank is gone. `detect_hang`: from the last step. `start`:
    from there until the state is loaded, but for the load. `stall`: what one save stops training.
    `durable`: from its begin until it is committed. `queue`: a requeue. `salvage`: from steps in
    memory to a checkpoint. `step`: one. `about` says where they come from.
    """

    about: str
    samples: dict[str, list[float]] = field(default_factory=dict)

    def draw(self, phase: str, rng: random.Random) -> float:
        """One of the samples; 0 where there is none."""
        found = self.samples.get(phase)
        return rng.choice(found) if found else 0.0

    def median(self, phase: str) -> float:
        """Of the samples; 0 where there is none."""
        found = self.samples.get(phase)
        return statistics.median(found) if found else 0.0

    def mean(self, phase: str) -> float:
        """Of the samples; 0 where there is none."""
        found = self.samples.get(phase)
        return statistics.fmean(found) if found else 0.0


def load(path: Path) -> PhaseTimes:
    """What `phase_times.py` printed, or a file that scales such a one.

    The latter has `shape`, another file, and `medians`: of each phase the phase of the shape whose
    samples are multiplied, the median that they then have, and where that comes from.
    """
    told = json.loads(path.read_text())
    samples = dict(told.get("samples", {}))
    if "shape" in told:
        shape = load(path.parent / told["shape"])
        for phase, (like, median, _) in told["medians"].items():
            factor = median / shape.median(like)
            samples[phase] = [factor * value for value in shape.samples[like]]
    return PhaseTimes(told["about"], samples)


def collect(runs: Sequence[Path], about: str) -> PhaseTimes:
    """The times of all attempts and saves of these runs.

    Raises `UsageError` if one is not a run, `DataError` if it cannot be read.
    """
    found: dict[str, list[float]] = {}
    for path in runs:
        for phase, values in _of_run(read_run(RunDirectory(path))).items():
            found.setdefault(phase, []).extend(round(value, 4) for value in values)
    return PhaseTimes(about, found)


def _of_run(data: RunData) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    times = data.timeline.attempts
    for before, time in zip([None, *times[:-1]], times, strict=True):
        body, ending = time.body.seconds(), time.tail.seconds() + time.gap.seconds()
        commits = [entry.event for entry in time.facts.all(CheckpointCommitted)]
        found.setdefault("step", []).extend([time.unit] if time.unit == time.unit else [])
        found.setdefault("durable", []).extend(c.took.total for c in commits if c.took)
        if saves := len(commits):  # each counts as much, in however few attempts they were
            found.setdefault("stall", []).extend([float(body[Category.SAVE]) / saves] * saves)
        if before is not None and time.facts.ready_at is not None and _failed(before):
            started = body[Category.START] + before.gap.seconds()[Category.START]
            found.setdefault("start", []).append(float(started))
            found.setdefault("load", []).append(float(body[Category.LOAD]))
        if ending[Category.QUEUE] > 0:
            found.setdefault("queue", []).append(float(ending[Category.QUEUE]))
        if _failed(time):
            kind = "detect_hang" if cause_of(time.facts)[0] is InterruptionKind.HANG else "detect"
            noticed = float(ending[Category.HUNG] + ending[Category.STOP])
            found.setdefault(kind, []).append(noticed)
    return found


def _failed(time: AttemptTime) -> bool:
    return (
        cause_of(time.facts)[0] in (InterruptionKind.FAILURE, InterruptionKind.HANG)
        and not time.facts.completed
    )


def main() -> None:
    """Print the times of the runs that are named."""
    found = collect([Path(name) for name in sys.argv[1:]], "collected from " + str(sys.argv[1:]))
    print(json.dumps(asdict(found), indent=1))


if __name__ == "__main__":
    main()
