"""The step loop. It reads from top to bottom; everything else serves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.format.manifest import Rollback, TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.config.sections import Config
from kempner.data.serve.loader import Feed, MicroBatch, StepBatch
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.run.control.heartbeat import Progress
from kempner.run.control.protocol import Phase
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import DivergedError, ExitCode, PeersLostError, RunError
from kempner.run.record.events import Diverged, Evaluated, LedgerEvent, RolledBack
from kempner.run.record.ledger import EventRecorder
from kempner.training.anomalies import Health, RollbackPlan, is_doubtful, observe, plan_rollback
from kempner.training.compute.fingerprint import StateFingerprint, summed
from kempner.training.compute.forward_backward import (
    StepGradient,
    weightless,
)
from kempner.training.compute.optimizer import learning_rate, update
from kempner.training.compute.slot_gradient import SlotGradient
from kempner.training.evaluation import Evaluation
from kempner.training.fault_injection import FaultInjector
from kempner.training.groups.process_groups import Ranks
from kempner.training.observe.metrics import StepMetrics
from kempner.training.observe.numerics import Numerics
from kempner.training.observe.profiler import Profiler
from kempner.training.rank_link.shutdown import StopListener
from kempner.training.vote import (
    Vote,
    VoteGroup,
    VoteResult,
    finish,
    refuse_to_go_on_unsaved,
    secure_last_step,
)

if TYPE_CHECKING:
    from kempner.training.observe.parts import StepParts
    from kempner.training.step_checks import StepChecks


class Data:
    """Where the batches come from: a feed, and how to `open` one that begins at a train state."""

    def __init__(self, open_feed: Callable[[TrainState], Feed], train_state: TrainState) -> None:
        self._open, self.feed = open_feed, open_feed(train_state)
        self.failure: RunError | None = None
        """Why there is no more data on this rank."""

    def take(self, give_up: Callable[[], bool]) -> StepBatch | None:
        """The next batch; None if `give_up` returns true first, or the data is over."""
        try:
            return self.feed.take(give_up)
        except RunError as error:
            logger().error(f"no data for the next step: {error}")
            self.failure = error
            return None

    def reopen(self, train_state: TrainState) -> None:
        self.feed.close()
        self.feed = self._open(train_state)


@dataclass(frozen=True)
class Tools:
    """What feeds and measures the steps, tells of them, and disturbs them on demand; and when the
    ranks communicate in one."""

    data: Data
    step_metrics: StepMetrics
    evaluation: Evaluation
    faults: FaultInjector
    progress: Progress
    record: EventRecorder
    profiler: Profiler
    communication: Choice = EACH_MICRO_BATCH


@dataclass
class Training:
    """Everything the loop needs, ready to go, and where the run stands. `train_state` moves with
    every step, and `health` tells how sound the last losses are; `save_postponed` is whether a save
    that was due waits for sound steps."""

    config: Config
    ranks: Ranks
    model: nn.Module
    optimizer: Optimizer
    shutdown: StopListener
    checkpoints: CheckpointEngine
    tools: Tools
    train_state: TrainState
    health: Health
    save_postponed: bool = False
    checks: StepChecks | None = field(init=False, default=None)
    """Checks steps for silent corruption, if that is asked for."""
    parts: StepParts | None = field(init=False, default=None)
    """Writes fingerprints of the parts of steps, if that is asked for."""
    numerics: Numerics | None = field(init=False, default=None)
    """Records what steps compute, if that is asked for."""

    def __post_init__(self) -> None:
        section, micro_steps = self.config.profiling, self.tools.data.feed.micro_steps
        if section.numerics is not None:
            where = self.train_state.step
            self.numerics = Numerics(section, self.model, self.ranks, micro_steps, where)

    @cached_property
    def vote_group(self) -> VoteGroup:
        return VoteGroup(self.ranks.votes)

    @cached_property
    def gradient(self) -> StepGradient | SlotGradient:
        ranks, tools, train = self.ranks, self.tools, self.config.train
        if train.same_on_any_world:
            return SlotGradient(
                self.model,
                ranks.device,
                train.seed,
                -(-train.global_batch_size // train.micro_batch_size),
                ranks.mesh,
                tools.communication,
                tools.progress.waiting,
            )
        return StepGradient(
            self.model,
            ranks.device,
            self.config.train.seed,
            ranks.world.rank,
            ranks.degrees.tensor,
            tools.communication,
            tools.progress.waiting,
            self.config.preferences.beta,
        )

    @cached_property
    def state_fingerprint(self) -> StateFingerprint:
        return StateFingerprint(
            self.model, self.optimizer, self.ranks.world.rank, self.ranks.world.size
        )

    def record(self, event: LedgerEvent) -> None:
        """A line for the run's ledger, from rank 0."""
        self.tools.record(event)

    def vote(self, void: bool = False) -> Vote:
        at_the_end = self.train_state.step == self.config.train.max_steps
        diverged = self.health.trouble is not None or (at_the_end and self.suspicious)
        asked, saves = self.shutdown.request, self.checkpoints.poll()
        return Vote.to_go_on(asked, *saves, void=void, diverged=diverged)

    @property
    def suspicious(self) -> bool:
        """Whether the last steps had losses that no state should be kept after."""
        return not self.health.sound

    def no_data(self) -> list[MicroBatch]:
        train = self.config.train
        return weightless(self.tools.data.feed.micro_steps, train.micro_batch_size, train.seq_len)


def train(run: Training) -> ExitCode:
    """Train to the last step or until the ranks agree to stop; either way, commit and say how."""
    tools, progress, last = run.tools, run.tools.progress, run.config.train.max_steps
    progress.made(run.train_state.step, before=True)
    every, step, agreed = run.config.eval.interval, run.train_state.step, VoteResult()
    if every and step and (step % every == 0 or step == last):
        agreed = evaluate(run)  # again, if the run was stopped in the middle of it
    # The last step, too, must be a sound one: what is suspicious then gets a vote of its own.
    while (run.train_state.step < last or run.suspicious) and not agreed.stop:
        step = run.train_state.step + 1
        if step >= tools.profiler.begins_at:
            tools.profiler.begin(step)
        with progress.held_up_by("data"):
            batch = tools.data.take(give_up=run.shutdown.should_shutdown)
        ballot = run.vote_group.open(run.vote(void=batch is None))
        if batch is None and (agreed := ballot.close()).all_void:
            break  # no rank waits for another in the step: a stop need not wait for its end
        means = compute_gradient(run, batch, step)
        with progress.held_up_by("saves"):
            run.checkpoints.release_staging()
        with progress.waiting("the vote"):
            agreed = ballot.close()
        if agreed.void or (agreed.diverged and agreed.stop):
            break  # a rank had no data, or the step is discarded: it did not happen, on any rank
        if agreed.diverged:
            roll_back(run)
            continue
        assert batch is not None  # a rank without one has made the vote void
        advance_checked(run, batch, means)
        due = save_is_due(run, agreed)
        take_note(run, everything=due or bool(agreed.stop) or step == last)
        if due:
            save_unless_suspicious(run, agreed)
        elif run.config.checkpoint.in_memory:
            keep_in_memory(run)
        if every and not agreed.stop and (step % every == 0 or step == last):
            agreed = evaluate(run)
    return finish_run(run, agreed)


def compute_gradient(run: Training, batch: StepBatch | None, step: int) -> Tensor:
    """The means of a step on `batch`, or on no data, as those of `StepGradient.add`."""
    faults = run.tools.faults
    add = run.gradient.add if run.checks is None else run.checks.gradient
    if run.parts is not None:
        add = run.parts.add
    with faults.during_step(step, run.model, run.optimizer) if faults.armed else nullcontext():
        return add(run.no_data() if batch is None else batch.micro, step)


def advance(run: Training, batch: StepBatch, means: Tensor) -> None:
    """Update the weights by the gradient of a step on `batch`, whose `means` are those of
    `StepGradient.add`, and go on from there."""
    train, tools, before = run.config.train, run.tools, run.train_state
    step, peak = before.step + 1, run.config.optimizer.lr
    schedule = run.config.scheduler
    rate = learning_rate(step, peak, schedule.total_steps or train.max_steps, schedule)
    waiting = tools.progress.waiting
    any_shard = bool(train.same_on_any_world)
    clip, loss = train.clip_grad_norm, means[0]
    if run.numerics is not None:
        run.numerics.before_update()
    if run.parts is not None:
        run.parts.before_update(step, run.model)
    norm = update(run.model, run.optimizer, loss, rate, clip, waiting, any_shard)
    made = None if run.parts is None else run.parts.after_update(step, run.state_fingerprint)
    if run.numerics is not None:
        numbers: dict[str, Tensor | float] = {"loss": loss, "grad_norm": norm, "lr": rate}
        run.numerics.after_update(step, batch, tools.data.feed.order, numbers)
    run.train_state = replace(
        before,
        step=step,
        cursor=batch.cursor_after,
        tokens=before.tokens + train.global_batch_size * train.seq_len,
    )
    tools.progress.made(step)
    if tools.profiler.tracing:
        tools.profiler.end(step)
    printed = print_state(run, made)
    tools.step_metrics.recent.send(run.train_state, means, norm, rate, printed)
    if tools.step_metrics.log_samples:
        tools.step_metrics.record_samples(run.train_state, batch.positions)


def advance_checked(run: Training, batch: StepBatch, means: Tensor) -> None:
    """As `advance`; where silent corruption is found, raises as `StepChecks.leave`."""
    checks, before = run.checks, run.train_state
    if checks is None:
        advance(run, batch, means)
        return
    step, rule = before.step + 1, run.config.resilience
    with run.tools.progress.waiting("the check of memory"):
        verdict, check = checks.agree(step, is_doubtful(run.health, means[0].item(), rule))
    if verdict is None and check:
        verdict, check = checks.check_gradient(before)
    if verdict is None:
        checks.certify(run)
        advance(run, batch, means)
        if check:
            verdict = checks.check_update(step, means[0], run.config.train.clip_grad_norm)
        checks.remember()
    if verdict is not None:
        checks.leave(run, verdict)
    if check:
        run.train_state = replace(run.train_state, checked=step)


def print_state(run: Training, known: Tensor | None) -> Tensor | None:
    """The fingerprint of weights and moments, an int64 scalar, `known` if it is there already; None
    for a step that is not logged, or where none is asked for."""
    wanted = run.config.integrity.fingerprints is not False
    if not wanted or run.train_state.step % run.config.metrics.log_interval:
        return None
    if known is not None:
        return known
    return summed(run.state_fingerprint.local().sum(), run.tools.progress.waiting)


def take_note(run: Training, everything: bool) -> None:
    """Learn what the last steps came to; of the newest one only if `everything` is asked for."""
    for numbers in run.tools.step_metrics.recent.arrivals(everything):
        run.tools.step_metrics.tell(numbers)
        run.health, anomaly = observe(run.health, numbers, run.config.resilience)
        if anomaly is not None and run.ranks.world.rank == 0:
            step, in_a_row = numbers.train_state.step, run.health.suspects
            logger().warning(f"step {step} is suspicious: {anomaly.reason}", in_a_row=in_a_row)
            run.record(anomaly.event(step, anomaly.reason, in_a_row))
    run.train_state = replace(run.train_state, losses=run.health.losses)


def save_is_due(run: Training, agreed: VoteResult) -> bool:
    """Whether to save now and train on: at the interval, and later where that did not work out.
    Raises `CheckpointWriteError`, on all ranks alike, when saves keep failing."""
    config, step = run.config, run.train_state.step
    if agreed.superseded or agreed.failed_saves:
        limits = config.checkpoint.max_failures, config.resilience.patience
        refuse_to_go_on_unsaved(run.checkpoints, agreed, *limits)
    on_interval = step % config.checkpoint.interval == 0
    # While saves fail, the interval is of no account: the next try has a time of its own.
    due = agreed.save_again if agreed.failed_saves else on_interval or run.save_postponed
    # The last step of this attempt is saved before the ranks part.
    return due and not agreed.stop and step < config.train.max_steps


def save_unless_suspicious(run: Training, agreed: VoteResult) -> None:
    """Start to save, unless the last steps are suspicious: then it is due again after the next."""
    run.save_postponed = not run.health.sound
    if run.save_postponed:
        return
    step = run.train_state.step
    with (
        run.tools.progress.during(Phase.SAVE),
        run.tools.faults.during_save(step, run.checkpoints.settle),
    ):
        run.checkpoints.save(run.train_state, agreed.failed_saves)


def keep_in_memory(run: Training) -> None:
    """Start to copy the state into memory that outlives this process. What the newest step came to
    on a GPU is known once its state was copied: then it is judged."""
    train_state, health, rule = run.train_state, run.health, run.config.resilience
    unseen = run.tools.step_metrics.recent.unseen()

    def verdict() -> TrainState | None:
        judged = health
        for numbers in unseen():
            judged, _ = observe(judged, numbers, rule)
        return replace(train_state, losses=judged.losses) if judged.sound else None

    if health.sound:
        run.checkpoints.hold(train_state, verdict)


def roll_back(run: Training) -> None:
    """Go back to a good checkpoint and leave out the data since. Raises `DivergedError`, on all
    ranks alike, where that would not help."""
    run.optimizer.zero_grad()  # of a step that does not count
    trouble = run.health.trouble or run.train_state
    to = agree_on_rollback(run, trouble)
    with run.tools.progress.during(Phase.LOAD):
        good = run.checkpoints.roll_back(to, run.config.checkpoint.accept_changes)
        rollback = Rollback(trouble.step, good.step, start=good.cursor, end=trouble.cursor)
        run.train_state = replace(good, rollbacks=(*run.train_state.rollbacks, rollback))
        run.health, run.save_postponed = Health(good.losses), False
        run.tools.progress.made(good.step, before=True)
        run.tools.data.reopen(run.train_state)
        if run.checks is not None:
            run.checks.begin_again(good.step)
        run.tools.step_metrics.start(run.train_state)
    run.record(RolledBack(**asdict(rollback)))
    if run.ranks.world.rank == 0:
        logger().warning("went back to a good checkpoint", **asdict(rollback))
    run.tools.step_metrics.say(
        f"back at step {good.step}, without {trouble.cursor - good.cursor} samples"
    )


def agree_on_rollback(run: Training, trouble: TrainState) -> int:
    """The step to go back to, by rank 0's choice. Raises `DivergedError` if there is none."""
    run.checkpoints.join()
    committed = run.checkpoints.branch()
    budget = run.config.resilience.max_rollbacks
    plan = run.ranks.broadcast(plan_rollback(committed, run.train_state.rollbacks, budget))
    assert isinstance(plan, RollbackPlan)  # rank 0 made it
    if plan.to is not None:
        return plan.to
    run.record(Diverged(trouble.step, plan.reason))
    kept = f"`latest` is step {committed[-1]}, from before" if committed else "nothing was saved"
    raise DivergedError(
        f"the loss diverged at step {trouble.step}, and {plan.reason}; {kept}. See the "
        f"warnings above; lower optimizer.lr, or look at the data that ends with sample "
        f"{trouble.cursor}, then start again"
    )


def evaluate(run: Training) -> VoteResult:
    """Evaluate the weights; the result of the last vote meanwhile."""
    began = time.monotonic()
    with run.tools.progress.during(Phase.EVAL):
        run.tools.faults.maybe_inject(Phase.EVAL, run.train_state.step)
        result = run.tools.evaluation.run(run.model, run.ranks, run.vote_group, run.vote)
    if (scores := result.scores) is not None:
        run.tools.step_metrics.evaluated(run.train_state, scores)
        took = round(time.monotonic() - began, 3)
        sets = {name: one.loss for name, one in scores.items()}
        usual = sets.pop("", None)
        run.record(Evaluated(run.train_state.step, usual, took, sets or None))
    return result.agreed


def finish_run(run: Training, agreed: VoteResult) -> ExitCode:
    """Commit the state of the last step if there is time, say why the run ends, and part. Raises
    `CheckpointWriteError` if the state cannot be committed, and what keeps the data of a rank from
    being read."""
    run.tools.progress.phase = Phase.SAVE
    take_note(run, everything=True)
    if agreed.void and not agreed.stop:
        secure_last_step(run)
        raise run.tools.data.failure or PeersLostError("another rank has no data to go on with")
    code, words = finish(run, agreed)
    if run.checks is not None:
        run.checks.certify_last(run)
    run.tools.step_metrics.end(words, completed=code is ExitCode.COMPLETED)
    run.tools.step_metrics.close()
    run.tools.progress.phase = Phase.EXIT
    run.ranks.final_barrier()
    return code
