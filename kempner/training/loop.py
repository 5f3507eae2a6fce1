"""The step loop. It reads from top to bottom; everything else serves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from torch import nn
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
from kempner.training.compute.forward_backward import accumulate, weightless
from kempner.training.compute.optimizer import update
from kempner.training.fault_injection import FaultInjector
from kempner.training.groups.process_groups import Ranks
from kempner.training.observe.evaluation import Evaluation
from kempner.training.observe.metrics import StepMetrics
from kempner.training.observe.profiler import Profiler
from kempner.training.policy.anomalies import Health, RollbackPlan, observe, plan_rollback
from kempner.training.policy.lr_schedule import learning_rate
from kempner.training.rank_link.shutdown import StopListener
from kempner.training.vote.final_save import (
    finish,
    refuse_to_go_on_unsaved,
    secure_last_step,
    vote_to_go_on,
)
from kempner.training.vote.vote import Vote, VoteGroup, VoteResult


@dataclass
class LoopState:
    """What moves with every step: where the run stands, and how sound its last losses are.

    `save_postponed` is whether a save that was due waits for sound steps.
    """

    train_state: TrainState
    health: Health
    save_postponed: bool = False


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
        """Go on at another train state."""
        self.feed.close()
        self.feed = self._open(train_state)


@dataclass(frozen=True)
class Tools:
    """What feeds and measures the steps, tells of them, and disturbs them on demand; and when the
    ranks communicate in one.
    """

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
    """Everything the loop needs, ready to go."""

    config: Config
    ranks: Ranks
    model: nn.Module
    optimizer: Optimizer
    shutdown: StopListener
    checkpoints: CheckpointEngine
    tools: Tools
    state: LoopState

    @cached_property
    def vote_group(self) -> VoteGroup:
        """The group in which the ranks vote."""
        return VoteGroup(self.ranks.votes)

    @property
    def progress(self) -> Progress:
        """What the supervisor is told of this rank."""
        return self.tools.progress

    def record(self, event: LedgerEvent) -> None:
        """A line for the run's ledger, from rank 0."""
        self.tools.record(event)

    @property
    def train_state(self) -> TrainState:
        """The step and the position in the data."""
        return self.state.train_state

    @property
    def health(self) -> Health:
        """How sound the last losses are."""
        return self.state.health

    def vote(self, void: bool = False) -> Vote:
        """What this rank wants at this moment."""
        at_the_end = self.train_state.step == self.config.train.max_steps
        diverged = self.health.trouble is not None or (at_the_end and not self.health.sound)
        wanted = vote_to_go_on(self.shutdown, self.checkpoints)
        return replace(wanted, void=void, diverged=diverged)

    @property
    def suspicious(self) -> bool:
        """Whether the last steps had losses that no state should be kept after."""
        return not self.health.sound

    def no_data(self) -> list[MicroBatch]:
        """A step's worth of rows that weigh nothing."""
        train = self.config.train
        return weightless(self.tools.data.feed.micro_steps, train.micro_batch_size, train.seq_len)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        config = self.config
        return learning_rate(step, config.optimizer.lr, config.train.max_steps, config.scheduler)


def train(run: Training) -> ExitCode:
    """Train to the last step or until the ranks agree to stop; either way, commit and say how."""
    last = run.config.train.max_steps
    run.progress.step = run.train_state.step
    agreed = evaluate_if_due(run)  # again, if the run was stopped in the middle of it
    # The last step, too, must be a sound one: what is suspicious then gets a vote of its own.
    while (run.train_state.step < last or not run.health.sound) and not agreed.stop:
        step = run.train_state.step + 1
        run.tools.profiler.begin(step)
        with run.progress.held_up_by_data():
            batch = run.tools.data.take(give_up=run.shutdown.should_shutdown)
        ballot = run.vote_group.open(run.vote(void=batch is None))
        if batch is None and (agreed := ballot.close()).all_void:
            break  # no rank waits for another in the step: a stop need not wait for its end
        with run.tools.faults.during_step(step, run.model):
            loss = accumulate(
                run.model,
                batch.micro if batch is not None else run.no_data(),
                device=run.ranks.device,
                seed=run.config.train.seed,
                step=step,
                rank=run.ranks.world.rank,
                copies=run.ranks.degrees.tensor,
                choice=run.tools.communication,
                waiting=run.progress.waiting,
            )
        with run.progress.held_up_by_save():
            run.checkpoints.release_staging()
        with run.progress.waiting("the vote"):
            agreed = ballot.close()
        if agreed.void or (agreed.diverged and agreed.stop):
            break  # a rank had no data, or the step is discarded: it did not happen, on any rank
        if agreed.diverged:
            roll_back(run)
            continue
        assert batch is not None  # a rank without one has made the vote void
        rate = run.rate(step)
        norm = update(
            run.model,
            run.optimizer,
            loss,
            rate,
            run.config.train.clip_grad_norm,
            run.progress.waiting,
        )
        run.state.train_state = advance(run, batch)
        run.progress.made(step)
        run.tools.profiler.end(step)
        held_up = run.progress.take_held_up()
        run.tools.step_metrics.record(run.train_state, loss, norm, rate, batch.positions, held_up)
        due = save_is_due(run, agreed)
        take_note(run, everything=due or is_last_step(run, agreed))
        if due:
            save_unless_suspicious(run, agreed)
        elif run.config.checkpoint.in_memory:
            keep_in_memory(run)
        if not agreed.stop:
            agreed = evaluate_if_due(run)
    return finish_run(run, agreed)


def advance(run: Training, batch: StepBatch) -> TrainState:
    """Where the run stands after a step on `batch`."""
    train, train_state = run.config.train, run.train_state
    return replace(
        train_state,
        step=train_state.step + 1,
        cursor=batch.cursor_after,
        tokens=train_state.tokens + train.global_batch_size * train.seq_len,
    )


def take_note(run: Training, everything: bool) -> None:
    """Learn what the last steps came to; of the newest one only if `everything` is asked for."""
    for numbers in run.tools.step_metrics.arrivals(everything):
        run.state.health, anomaly = observe(run.health, numbers, run.config.resilience)
        if anomaly is not None and run.ranks.world.rank == 0:
            step, in_a_row = numbers.train_state.step, run.health.suspects
            logger().warning(f"step {step} is suspicious: {anomaly.reason}", in_a_row=in_a_row)
            run.record(anomaly.event(step, anomaly.reason, in_a_row))
    run.state.train_state = replace(run.train_state, losses=run.health.losses)


def is_last_step(run: Training, agreed: VoteResult) -> bool:
    """Whether this step is the last one of this attempt, to be saved before the ranks part."""
    return bool(agreed.stop) or run.train_state.step == run.config.train.max_steps


def save_is_due(run: Training, agreed: VoteResult) -> bool:
    """Whether to save now and train on: at the interval, and later where that did not work out.

    Raises `CheckpointWriteError`, on all ranks alike, when saves keep failing.
    """
    config = run.config
    limits = config.checkpoint.max_failures, config.resilience.patience
    refuse_to_go_on_unsaved(run.checkpoints, agreed, *limits)
    on_interval = run.train_state.step % config.checkpoint.interval == 0
    # While saves fail, the interval is of no account: the next try has a time of its own.
    due = agreed.save_again if agreed.failed_saves else on_interval or run.state.save_postponed
    return due and not is_last_step(run, agreed)


def save_unless_suspicious(run: Training, agreed: VoteResult) -> None:
    """Start to save, unless the last steps are suspicious: then it is due again after the next."""
    run.state.save_postponed = not run.health.sound
    if run.state.save_postponed:
        return
    step = run.train_state.step
    with (
        run.progress.during(Phase.SAVE),
        run.tools.faults.during_save(step, run.checkpoints.settle),
    ):
        run.checkpoints.save(run.train_state, agreed.failed_saves)


def keep_in_memory(run: Training) -> None:
    """Start to copy the state into memory that outlives this process.

    What the newest step came to on a GPU is known once its state was copied: then it is judged.
    """
    train_state, health, rule = run.train_state, run.health, run.config.resilience
    unseen = run.tools.step_metrics.unseen()

    def verdict() -> TrainState | None:
        judged = health
        for numbers in unseen():
            judged, _ = observe(judged, numbers, rule)
        return replace(train_state, losses=judged.losses) if judged.sound else None

    if health.sound:
        run.checkpoints.hold(train_state, verdict)


def roll_back(run: Training) -> None:
    """Go back to a good checkpoint and leave out the data since.

    Raises `DivergedError`, on all ranks alike, where that would not help.
    """
    run.optimizer.zero_grad()  # of a step that does not count
    trouble = run.health.trouble or run.train_state
    to = agree_on_rollback(run, trouble)
    with run.progress.during(Phase.LOAD):
        good = run.checkpoints.roll_back(to, run.config.checkpoint.accept_changes)
        rollback = Rollback(trouble.step, good.step, start=good.cursor, end=trouble.cursor)
        run.state.train_state = replace(good, rollbacks=(*run.train_state.rollbacks, rollback))
        run.state.health, run.state.save_postponed = Health(good.losses), False
        run.progress.step = good.step
        run.tools.data.reopen(run.train_state)
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


def evaluate_if_due(run: Training) -> VoteResult:
    """Evaluate where the interval says so; the result of its last vote."""
    if not run.tools.evaluation.due(run.train_state.step):
        return VoteResult()
    began = time.monotonic()
    with run.progress.during(Phase.EVAL):
        run.tools.faults.maybe_inject(Phase.EVAL, run.train_state.step)
        result = run.tools.evaluation.run(run.model, run.ranks, run.vote_group, run.vote)
    if result.loss is not None:
        run.tools.step_metrics.evaluated(run.train_state, result.loss)
        took = round(time.monotonic() - began, 3)
        run.record(Evaluated(run.train_state.step, result.loss, took))
    return result.agreed


def finish_run(run: Training, agreed: VoteResult) -> ExitCode:
    """Commit the state of the last step if there is time, say why the run ends, and part.

    Raises `CheckpointWriteError` if the state cannot be committed, and what keeps the data of a
    rank from being read.
    """
    run.progress.phase = Phase.SAVE
    take_note(run, everything=True)
    if agreed.void and not agreed.stop:
        secure_last_step(run)
        raise run.tools.data.failure or PeersLostError("another rank has no data to go on with")
    code, words = finish(run, agreed)
    run.tools.step_metrics.end(words, completed=code is ExitCode.COMPLETED)
    run.tools.step_metrics.close()
    run.progress.phase = Phase.EXIT
    run.ranks.final_barrier()
    return code
