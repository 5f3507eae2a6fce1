"""Decides whether a step's loss is suspicious, and where to roll back to after too many of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from kempner.checkpoint.format.manifest import Rollback, TrainState
from kempner.config.resilience import ResilienceSection
from kempner.run.record.events import LossSpike, RolledBack, StartedAnew, StepSkipped
from kempner.run.record.history import RunHistory

FEWEST_LOSSES = 16
"""Normal losses that must be known before a loss can be a spike."""

NORMAL_SPREAD = 1.4826
"""Standard deviation by median absolute deviation of a normal distribution."""

SMALLEST_SPREAD = 0.01
"""Smallest spread, as a share of the median loss, so that a loss that hardly varies has no
spikes."""


@dataclass(frozen=True)
class Numbers:
    """A step's loss, gradient norm and learning rate, and the train state after it; of preferences
    also `PAIR_MEANS`, by name. `fingerprint` is that of the state after it, if it was taken."""

    train_state: TrainState
    loss: float
    norm: float
    rate: float
    of_pairs: Mapping[str, float] = field(default_factory=dict)
    fingerprint: int | None = None


@dataclass(frozen=True)
class Anomaly:
    """What is wrong with a step: its kind of event, and a clause."""

    event: type[StepSkipped] | type[LossSpike]
    reason: str


@dataclass(frozen=True)
class Health:
    """`losses` of the last normal steps, newest last, and the number of `suspects` in a row since.
    `trouble` is the train state at which there were too many."""

    losses: tuple[float, ...] = ()
    suspects: int = 0
    trouble: TrainState | None = None

    @property
    def sound(self) -> bool:
        """Whether the state may be saved: no suspect at the end, and no trouble before."""
        return self.suspects == 0 and self.trouble is None


def find_anomaly(losses: Sequence[float], step: Numbers, rule: ResilienceSection) -> Anomaly | None:
    """What is wrong with a step, given the `losses` of normal ones before; None if nothing is.

    A spike is a loss that exceeds their median by `spike_threshold` times their spread, estimated
    by the median absolute deviation (Hampel, "The Influence Curve and its Role in Robust
    Estimation", 1974), which undetected spikes hardly change.
    """
    if not (math.isfinite(step.loss) and math.isfinite(step.norm)):  # the step changed nothing
        return Anomaly(StepSkipped, f"its loss is {step.loss} and its gradient norm {step.norm}")
    if len(losses) < FEWEST_LOSSES:
        return None
    middle = median(losses)
    deviation = median(abs(loss - middle) for loss in losses)
    spread = max(NORMAL_SPREAD * deviation, SMALLEST_SPREAD * abs(middle))
    if step.loss <= middle + rule.spike_threshold * spread:
        return None
    times = math.inf if spread == 0 else (step.loss - middle) / spread
    return Anomaly(
        LossSpike,
        f"its loss of {step.loss:.4g} is {times:.1f} times the usual spread above {middle:.4g}",
    )


def is_doubtful(health: Health, loss: float, rule: ResilienceSection) -> bool:
    """Whether the loss of the next step, or those before, are suspicious."""
    step = Numbers(TrainState(), loss, 0.0, 0.0)
    return not health.sound or find_anomaly(health.losses, step, rule) is not None


def observe(
    health: Health, step: Numbers, rule: ResilienceSection
) -> tuple[Health, Anomaly | None]:
    """The health after another step, and that step's anomaly."""
    anomaly = find_anomaly(health.losses, step, rule)
    if anomaly is None:
        losses = (*health.losses, step.loss)[-rule.spike_window :]
        return Health(losses, trouble=health.trouble), None
    suspects = health.suspects + 1
    trouble = health.trouble
    if trouble is None and suspects >= rule.rollback_after:
        trouble = step.train_state
    return Health(health.losses, suspects, trouble), anomaly


@dataclass(frozen=True)
class RollbackPlan:
    """The step to roll back `to`, None to give up, and why."""

    to: int | None
    reason: str


def plan_rollback(
    committed: Sequence[int], rollbacks: Iterable[Rollback], budget: int
) -> RollbackPlan:
    """Roll back to the newest checkpoint; to an older one if that did not help; or give up.
    `committed` are the steps of the live branch, ascending. A rollback has helped, and no longer
    counts against the `budget`, if a step beyond its trouble was committed since."""
    if not committed:
        return RollbackPlan(None, "there is no checkpoint yet to go back to")
    in_vain = [rollback for rollback in rollbacks if rollback.at >= committed[-1]]
    if len(in_vain) >= budget:
        tried = f"{len(in_vain)} rollbacks did not help" if in_vain else "no rollback is allowed"
        return RollbackPlan(None, f"{tried} (resilience.max_rollbacks={budget})")
    if not in_vain:
        return RollbackPlan(committed[-1], "it is the newest checkpoint")
    oldest_tried = min(rollback.to for rollback in in_vain)
    older = [step for step in committed if step < oldest_tried]
    if older:
        return RollbackPlan(older[-1], f"going back to step {oldest_tried} did not help")
    return RollbackPlan(committed[0], "there is no older checkpoint")


def remembered(history: RunHistory) -> tuple[Rollback, ...]:
    """The rollbacks of a run since it last began at step 0."""
    found: list[Rollback] = []
    for event in history.events(StartedAnew, RolledBack):
        if isinstance(event, StartedAnew):
            found.clear()
        else:
            found.append(Rollback(event.at, event.to, event.start, event.end))
    return tuple(found)
