"""Pure functions about a step: its learning rate, whether its loss is suspicious, where to go back
to.

Decides whether to make the final save before exiting: a pure choice, after each action.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

from kempner.checkpoint.format.manifest import Rollback, TrainState
from kempner.config.resilience import ResilienceSection
from kempner.config.sections import SchedulerSection
from kempner.run.record.events import LossSpike, RolledBack, StartedAnew, StepSkipped
from kempner.run.record.history import RunHistory

FEWEST_LOSSES = 16
"""Sound losses that must be known before a loss can be called a spike."""

NORMAL_SPREAD = 1.4826
"""Standard deviations per median absolute deviation, of a normal distribution."""

SMALLEST_SPREAD = 0.01
"""Of the median loss: what hardly varies at all must not make every wiggle a spike."""


def learning_rate(step: int, peak: float, max_steps: int, schedule: SchedulerSection) -> float:
    """The rate for step 1 ... `max_steps`.

    Linear warm-up over `warmup_steps` reaches `peak` at its last step. Then: `constant` stays;
    `linear` and `cosine` (half a period, as in SGDR, arXiv:1608.03983) fall to
    `min_lr_ratio * peak` at `max_steps`; `wsd` (warm-up, stable, decay, as in MiniCPM,
    arXiv:2404.06395) stays and falls linearly over the last `decay_steps`.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    floor = schedule.min_lr_ratio
    match schedule.name:
        case "constant":
            return peak
        case "linear":
            progress = (step - warmup) / (max_steps - warmup)
            return peak * (1 - (1 - floor) * progress)
        case "cosine":
            progress = (step - warmup) / (max_steps - warmup)
            return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        case "wsd":
            decay = schedule.decay_steps or max(1, max_steps // 10)
            progress = max(0.0, (step - (max_steps - decay)) / decay)
            return peak * (1 - (1 - floor) * progress)


@dataclass(frozen=True)
class Numbers:
    """What a step came to: where the run stood after it, its loss and gradient norm, its rate."""

    train_state: TrainState
    loss: float
    norm: float
    rate: float


@dataclass(frozen=True)
class Anomaly:
    """What is wrong with a step: the kind of its event, and a clause for a person."""

    event: type[StepSkipped] | type[LossSpike]
    reason: str


@dataclass(frozen=True)
class Health:
    """`losses` of the last sound steps, newest last; how many `suspects` in a row came since.
    `trouble` is where the run stood once there were too many of them."""

    losses: tuple[float, ...] = ()
    suspects: int = 0
    trouble: TrainState | None = None

    @property
    def sound(self) -> bool:
        """Whether the state is worth keeping: no suspect at the end, and no trouble before."""
        return self.suspects == 0 and self.trouble is None


def find_anomaly(losses: Sequence[float], step: Numbers, rule: ResilienceSection) -> Anomaly | None:
    """What is wrong with a step, given the losses of the sound ones before; None if nothing is.

    A spike is a loss that exceeds their median by `spike_threshold` times their spread, estimated
    by the median absolute deviation (Hampel, "The Influence Curve and its Role in Robust
    Estimation", 1974): spikes that are let in do not move it.
    """
    if not (math.isfinite(step.loss) and math.isfinite(step.norm)):  # it changed nothing
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


def observe(
    health: Health, step: Numbers, rule: ResilienceSection
) -> tuple[Health, Anomaly | None]:
    """The health after another step, and what was wrong with that step."""
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
    """The step `to` go back to, None to give up; and why."""

    to: int | None
    reason: str


def plan_rollback(
    committed: Sequence[int], rollbacks: Iterable[Rollback], budget: int
) -> RollbackPlan:
    """Back to the newest checkpoint; to an older one if that did not help; or give up. `committed`
    are the steps of the live branch, ascending. A rollback helped if a step beyond its trouble was
    committed since, and no longer counts against the `budget` then."""
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
    """The rollbacks of a run, since it last began at step 0."""
    found: list[Rollback] = []
    for event in history.events(StartedAnew, RolledBack):
        if isinstance(event, StartedAnew):
            found.clear()
        else:
            found.append(Rollback(event.at, event.to, event.start, event.end))
    return tuple(found)


EXIT_SECONDS = 2.0
"""What is kept free at the end of a deadline, for the goodbye of the ranks and their exit."""

BREATH = 1.0
"""Seconds that the ranks pause at most before they look at the deadline again."""


class Action(Enum):
    """The next thing to do."""

    WAIT = "wait for the save in flight"
    SAVE = "start the last save"
    PAUSE = "leave storage alone for a moment"
    DONE = "exit, everything is committed"
    FAIL = "exit, the last save could not be written"
    ABANDON = "exit, the last commit stays as it is"
    DISCARD = "exit, the state is not worth keeping"


@dataclass(frozen=True)
class SaveInFlight:
    """A save under way: the step whose state it writes, and its age in seconds."""

    step: int
    age: float


@dataclass(frozen=True)
class SaveTimes:
    """Seconds of the last saves: their median, and their 95th percentile."""

    usual: float
    long: float


@dataclass(frozen=True)
class SaveSituation:
    """Where the ranks stand. Seconds; None where there is no deadline, save or measurement.

    `step` steps are done, `committed` is the step of the last commit, `warned_for` the time since
    the stop was asked for, `seconds_left` what is left until the deadline, `next_try` in how many
    seconds a save may be started, None if none is worth it any more, `suspicious` whether the last
    step had a loss that no state should be kept after.
    """

    step: int
    committed: int | None
    in_flight: SaveInFlight | None
    save_times: SaveTimes | None
    warned_for: float
    seconds_left: float | None
    next_try: float | None
    suspicious: bool


@dataclass(frozen=True)
class SaveDecision:
    """`action`, and why; `patience` is how many seconds to WAIT or PAUSE at most, None for ever.
    `lost` steps are not committed as things stand; `enough` is how many seconds of warning would
    have saved them, None if that cannot be told."""

    action: Action
    reason: str
    lost: int
    patience: float | None = None
    enough: float | None = None


def decide_final_save(now: SaveSituation) -> SaveDecision:
    """Wait while there is time; start the last save only if a save usually fits.

    A save in flight is worth waiting for until the deadline: the last commit is not touched by it,
    and nothing else can be saved meanwhile. So one slow save is no reason not to try. Before any
    save was measured, one is tried.
    """
    time = time_to_spare(now.seconds_left)
    lost = now.step - (now.committed or 0)
    if now.in_flight is not None:
        if time is None or time > 0:
            return SaveDecision(Action.WAIT, "a save is in flight", lost, patience=time)
        return _abandon(now, "the save in flight did not finish in time")
    if lost == 0:
        return SaveDecision(Action.DONE, "the last step is committed", lost)
    if now.suspicious:
        return SaveDecision(Action.DISCARD, "the loss diverged at the end", lost)
    if now.next_try is None:
        return SaveDecision(Action.FAIL, "the last step could not be saved", lost)
    return _save_or_pause(now, time, now.next_try, lost)


def _save_or_pause(now: SaveSituation, time: float | None, pause: float, lost: int) -> SaveDecision:
    """Of a state that is to be saved: whether there is `time`, and whether it is time."""
    usual = now.save_times.usual if now.save_times else 0.0
    if pause > 0 and (time is None or pause + usual < time):
        return SaveDecision(Action.PAUSE, "a save has failed", lost, patience=min(pause, BREATH))
    if time is None:
        return SaveDecision(Action.SAVE, "there is no deadline", lost)
    if time <= 0:
        return _abandon(now, "no time was left to save")
    if now.save_times is None:
        return SaveDecision(Action.SAVE, "no save was measured yet, so it is tried", lost)
    if usual <= time:
        return SaveDecision(Action.SAVE, f"a save takes {usual:.1f} s of {time:.1f} s left", lost)
    return _abandon(now, f"a save takes {usual:.1f} s and {time:.1f} s were left for it")


def time_to_spare(seconds_left: float | None) -> float | None:
    """What is left of a deadline when the exit's share is kept free; None without a deadline."""
    return None if seconds_left is None else seconds_left - EXIT_SECONDS


def tell_loss(move: SaveDecision) -> str:
    """What ABANDON or DISCARD cost and what would have helped, for a person."""
    steps = "step is" if move.lost == 1 else f"{move.lost} steps are"
    if move.action is Action.DISCARD:
        advice = "the next start repeats them"
    elif move.enough is None:
        advice = "the duration of a save is not known yet"
    else:
        advice = f"a warning of {math.ceil(move.enough)} s would have been enough"
    return f"the last {steps} lost, because {move.reason}; {advice}"


def _abandon(now: SaveSituation, reason: str) -> SaveDecision:
    lost = now.step - (now.committed or 0)
    return SaveDecision(Action.ABANDON, reason, lost, enough=_enough(now))


def _enough(now: SaveSituation) -> float | None:
    """From the request to the exit: what was spent so far, and what the saves still need."""
    in_flight, times = now.in_flight, now.save_times
    if times is None or (in_flight is not None and in_flight.age > times.long):
        return None
    rest = 0.0 if in_flight is None else times.long - in_flight.age
    last = 0.0 if in_flight is not None and in_flight.step == now.step else times.long
    return now.warned_for + rest + last + EXIT_SECONDS
