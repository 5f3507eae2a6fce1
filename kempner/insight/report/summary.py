"""The report of one run, as data: what the page shows and `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kempner.insight.owner import OwnerWatch
from kempner.insight.report.attempts import AttemptFacts, attempts_of
from kempner.insight.report.categories import Category
from kempner.insight.report.cause import Kind
from kempner.insight.report.findings import (
    Advice,
    Nodes,
    Saves,
    advise,
    node_count,
    nodes_of,
    saves_of,
)
from kempner.insight.report.interruptions import HOUR, Interruption, interruptions_of
from kempner.insight.report.series import EvalSeries, StepSeries, read_series
from kempner.insight.report.timeline import Timeline, account
from kempner.run.process.exit_codes import DataError, UsageError
from kempner.run.record.events.attempt import RankReady
from kempner.run.record.events.stop import Completed
from kempner.run.record.history import RunHistory
from kempner.run.record.recorded_config import total_steps
from kempner.run.record.run_dir import RunDirectory

_UNSEEN = "in progress, or ended without a message"
"""Where it cannot be seen whether a supervisor works on the run."""


@dataclass(frozen=True)
class Training:
    """How far a run came, and how it stands; what is not known is None."""

    state: str
    step: int
    total_steps: int | None
    attempts: int
    last_loss: float | None
    last_eval_loss: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Machines:
    """The most ranks and nodes that an attempt had, `nodes` None if the ledger does not say."""

    ranks: int
    nodes: int | None
    device: str

    @property
    def counted(self) -> str:
        """Whose time is added up: that of GPUs, or of ranks without one."""
        return "rank" if self.device.startswith("cpu") else "GPU"


@dataclass(frozen=True)
class TimeSpent:
    """Where the time went. `begin` and `end` are seconds since the epoch.

    `seconds` and `gpu_hours` are by category; a rank counts as one GPU. `goodput` is the effective
    training time ratio: training by the whole wall time. `while_held` is the same by the time in
    which the job held its machines.
    """

    begin: float
    end: float
    machines: Machines
    goodput: float | None
    while_held: float | None
    seconds: Mapping[str, float]
    gpu_hours: Mapping[str, float]

    @property
    def wall(self) -> float:
        """Seconds from the first start to the end."""
        return self.end - self.begin


@dataclass(frozen=True)
class RunReport:
    """One run."""

    name: str
    training: Training
    time: TimeSpent
    interruptions: Sequence[Interruption]
    saves: Saves
    nodes: Nodes
    advice: Sequence[Advice]

    @property
    def lost_hours(self) -> float:
        """GPU hours that all interruptions cost."""
        return sum(one.cost.gpu_hours for one in self.interruptions)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        sums = {"wall_seconds": self.time.wall, "lost_gpu_hours": self.lost_hours}
        return {**asdict(self), **sums}


@dataclass(frozen=True)
class RunData:
    """A run's report, and what its plots are drawn from."""

    report: RunReport
    timeline: Timeline
    attempts: Sequence[AttemptFacts]
    steps: StepSeries
    evaluations: EvalSeries


def read_run(run: RunDirectory) -> RunData:
    """Read a run and account for its time.

    Raises `UsageError` if there is none, `DataError` if a file of it cannot be read now.
    """
    if not run.ledger.is_file():
        raise UsageError(
            f"{run.path} is not a run: it has no ledger.jsonl; name <run.dir>/<run.name>"
        )
    try:
        history = RunHistory.read(run.ledger)
        steps, evaluations = read_series(run.metrics)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}; try again") from error
    attempts = attempts_of(history, steps.last_times())
    if not attempts:
        raise UsageError(f"{run.path} has not been started yet: its ledger tells of no attempt")
    timeline = account(attempts, steps)
    name, alive = run.path.resolve().name, _owned(run)
    report = summarise(name, attempts, timeline, steps, evaluations, total_steps(run), alive)
    return RunData(report, timeline, attempts, steps, evaluations)


def _owned(run: RunDirectory) -> bool | None:
    """Whether a supervisor works on the run now; None if that cannot be seen."""
    try:
        return OwnerWatch(run.supervisors).look()
    except OSError:
        return None


def summarise(
    name: str,
    attempts: Sequence[AttemptFacts],
    timeline: Timeline,
    steps: StepSeries,
    evaluations: EvalSeries,
    total: int | None,
    alive: bool | None = None,
) -> RunReport:
    """The report of a run with at least one attempt; `alive` is whether anything works on it."""
    interruptions = interruptions_of(timeline, dead=alive is False)
    saves = saves_of(attempts, timeline)
    nodes = nodes_of(attempts)
    training = Training(
        state=_state(attempts[-1], interruptions, alive),
        step=max(time.front for time in timeline.attempts),
        total_steps=total,
        attempts=len(attempts),
        last_loss=_last(steps.loss),
        last_eval_loss=_last(evaluations.loss),
        tokens_per_second=_last(steps.tokens_per_second[-50:], middle=True),
    )
    advice = advise(timeline, saves, interruptions, nodes)
    time = _time_spent(attempts, timeline)
    return RunReport(name, training, time, interruptions, saves, nodes, advice)


def _time_spent(attempts: Sequence[AttemptFacts], timeline: Timeline) -> TimeSpent:
    seconds = timeline.seconds()
    wall, train = timeline.end - timeline.begin, float(seconds[Category.TRAIN])
    held = sum(float(seconds[c]) for c in Category if c.holds_machines)
    told = not timeline.of_stranger
    ready = [e.event.device for a in attempts for e in a.all(RankReady)]
    machines = Machines(
        ranks=max(a.started.ranks for a in attempts),
        nodes=max((many for a in attempts if (many := node_count(a.started))), default=None),
        device=ready[-1] if ready else "",
    )
    return TimeSpent(
        begin=timeline.begin,
        end=timeline.end,
        machines=machines,
        goodput=train / wall if told and wall else None,
        while_held=train / held if told and held else None,
        seconds={c.key: float(seconds[c]) for c in Category},
        gpu_hours=_gpu_hours(timeline),
    )


def _gpu_hours(timeline: Timeline) -> dict[str, float]:
    """By category, on all ranks; none while no machine is held."""
    total = dict.fromkeys((c.key for c in Category), 0.0)
    for time in timeline.attempts:
        ranks = time.facts.started.ranks
        for pieces in (time.body, time.tail, time.gap):
            for category, seconds in zip(Category, pieces.seconds(), strict=True):
                total[category.key] += float(seconds) * ranks / HOUR * category.holds_machines
    return total


def _state(last: AttemptFacts, interruptions: Sequence[Interruption], alive: bool | None) -> str:
    """How the run stands, in a few words."""
    if last.completed:
        return Completed.name
    if last.given_up is not None:
        return "given up"
    if last.left_at is not None:
        return f"ended after step {last.left_at}, not complete"
    if alive:
        return "in progress"
    if not last.over:
        return "ended without a message" if alive is False else _UNSEEN
    end = interruptions[-1] if interruptions else None
    return end.cause if end is not None and end.kind is Kind.STOP else "interrupted"


def _last(values: Any, middle: bool = False) -> float | None:
    """The last of these numbers that is one, or the median of them."""
    known = values[values == values]
    if not len(known):
        return None
    return float(sorted(known)[len(known) // 2] if middle else known[-1])
