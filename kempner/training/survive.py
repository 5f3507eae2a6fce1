"""`survive`: lets your own training loop stop, save and resume.

    for step in survive(model, optimizer, steps=1000, save_every=50):
        ...

Iterating resumes from the newest checkpoint, votes in every step, saves, and stops all ranks after
the same step. Under `kempner supervise -- COMMAND` the ranks also report to the supervisor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from numbers import Integral
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kempner.checkpoint.format.manifest import Identity, Origin
from kempner.checkpoint.format.train_state import TrainState
from kempner.checkpoint.manager import CheckpointManager
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.tensors.context import CheckpointContext
from kempner.cluster.machine.rlimits import raise_open_file_limit
from kempner.config.resilience import ResilienceSection
from kempner.config.sections import CheckpointSection, DistributedSection, SuperviseSection
from kempner.run.control.heartbeat import Progress
from kempner.run.control.launch_env import Launch, LaunchTerms
from kempner.run.control.protocol import Phase
from kempner.run.output import logs
from kempner.run.output.console import protect, say
from kempner.run.output.logs import logger, open_log
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.process.retry import storage_waits
from kempner.run.process.stop_reason import StopReason
from kempner.run.record.attempts import Attempt, Fence
from kempner.run.record.events.base import LedgerEvent
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory
from kempner.training.build import host_facts, read_history, versions
from kempner.training.compute.seeds import set_rng
from kempner.training.groups.process_groups import Ranks, adopt
from kempner.training.last_words import LastWords
from kempner.training.main import Ownership, take_run
from kempner.training.rank_link.rank_link import RankLink, join
from kempner.training.rank_link.shutdown import ShutdownHandler
from kempner.training.vote.final_save import finish, refuse_to_go_on_unsaved, vote_to_go_on
from kempner.training.vote.vote import Vote, VoteGroup, VoteResult


def survive(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int,
    save_every: int,
    keep_last: int = CheckpointSection().keep_last,
    seed: int = 0,
    run_dir: str | Path | None = None,
) -> Survivor:
    """Iterate over this instead of `range(1, steps + 1)`: it yields the steps not done yet.

    Call it once on every rank, after `init_process_group`, when `model` and `optimizer` are final;
    both are loaded from the newest checkpoint, if there is one. A checkpoint is saved every
    `save_every` steps, and the last `keep_last` are kept. Each step begins with torch's generators
    seeded by `seed`, the step and the rank, so that a resumed step draws the same numbers.

    `run_dir` is the run directory; by default the supervisor's, or else `runs/<script>`.

    After a stop the state is committed, and iterating raises `SystemExit` with 75. Raises
    `UsageError` (also if the ranks are called with different `steps`, `save_every` or `seed`),
    `DataError` or `CheckpointWriteError` with a sentence, which is printed without a traceback.

    From this call to the end of the loop, however it ends, the stop signals come here; then they do
    again what they did before. In another thread than the main one Python traps no signals, and
    only the supervisor's orders stop the loop.

    At a prompt (a notebook, IPython, `python -i`) they come here only while the loop runs. After a
    Ctrl-C the state is committed, and iterating raises `KeyboardInterrupt`; a second one within two
    seconds raises it at once. `run_dir` has no default there.
    """
    protect()
    logs.configure()
    shutdown = ShutdownHandler(_at_prompt())
    if not _at_prompt():
        shutdown.install()
    try:
        return _prepare(
            model, optimizer, Todo(steps, save_every, seed, keep_last), run_dir, shutdown
        )
    except BaseException:
        shutdown.uninstall()
        raise


def _prepare(
    model: nn.Module,
    optimizer: Optimizer,
    todo: Todo,
    run_dir: str | Path | None,
    shutdown: ShutdownHandler,
) -> Survivor:
    """Find the others and the run, and load the newest checkpoint."""
    launch = Launch.from_environment(os.environ)
    told = launch.terms if launch is not None else None
    run = RunDirectory(Path(run_dir or (told.run if told else _beside(sys.argv[0]))))
    section = _as_told(told)
    rank_link = join(run, section, shutdown)
    last_words = LastWords(rank_link)
    todo.check()
    device = _device_of(model, optimizer)
    rank_link.progress.enter(Phase.LOAD)
    raise_open_file_limit()
    ranks = adopt(rank_link.world, device, timedelta(seconds=DistributedSection().timeout))
    shutdown.join_group(told.stop_grace if told else None, rank_link.tell_of_signal)
    patience = told.patience if told else ResilienceSection().patience
    storage_waits().configure(patience, shutdown.should_shutdown)
    with rank_link.progress.waiting("what the others are to do"):
        ranks.agree_on({"steps": todo.steps, "save_every": todo.save_every, "seed": todo.seed})
    ownership = take_run(run, ranks, rank_link.launch, section)
    attempt = ownership.attempt
    storage_waits().tell_to(partial(rank_link.tell_of_wait, attempt))
    open_log(run.log(attempt.number, ranks.world.rank), attempt=attempt.number)
    try:
        checkpoints = _open_checkpoints(run, model, optimizer, ranks, rank_link, attempt, todo)
        return Survivor(todo, rank_link, ownership, ranks, shutdown, checkpoints, last_words)
    except BaseException:
        ownership.release()
        raise


@dataclass(frozen=True)
class Todo:
    """What a loop is to do: so many `steps`, with a save every `save_every` of them, of which the
    last `keep_last` stay.
    """

    steps: int
    save_every: int
    seed: int
    keep_last: int

    def check(self) -> None:
        """Raise `UsageError` if it cannot be done."""
        least = {"steps": 1, "save_every": 1, "keep_last": 2, "seed": None}
        for name, smallest in least.items():
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, Integral):
                raise UsageError(f"survive({name}={given!r}): write a whole number")
            if smallest is not None and given < smallest:
                raise UsageError(f"survive({name}={given}): it must be at least {smallest}")


class Survivor:
    """The steps of a loop, to be iterated over once, on every rank."""

    def __init__(
        self,
        todo: Todo,
        rank_link: RankLink,
        ownership: Ownership,
        ranks: Ranks,
        shutdown: ShutdownHandler,
        checkpoints: CheckpointManager,
        last_words: LastWords,
    ) -> None:
        self._todo, self._rank_link, self._ownership = todo, rank_link, ownership
        self._last_words, self._begun = last_words, False
        self.ranks, self.shutdown, self.checkpoints = ranks, shutdown, checkpoints
        self.vote_group = VoteGroup(ranks.votes)
        self.train_state = checkpoints.restore() or TrainState()
        """How many steps are done."""
        self.suspicious = False
        """Always False: only the loop itself could judge its losses."""
        # Of every optimizer: another one may step other parts of the model.
        self._hook = register_optimizer_step_pre_hook(lambda *_: checkpoints.release_staging())

    def __iter__(self) -> Iterator[int]:
        if self._begun:
            raise UsageError("survive(...) was iterated over before; call it again to go on")
        self._begun = True
        if _at_prompt():
            self.shutdown.install()
        code: ExitCode | None = None
        try:
            code = yield from self._steps()
        finally:
            self._give_back(code)
        if code is not ExitCode.COMPLETED:
            if _at_prompt() and self.shutdown.reason() is StopReason.INTERRUPT:
                raise KeyboardInterrupt
            raise SystemExit(int(code))

    def _give_back(self, code: ExitCode | None) -> None:
        """Let go of the run and of what this process shares with whatever it does next."""
        self.checkpoints.release_staging()  # nothing waits for that any more once the hook is gone
        self._hook.remove()
        self._ownership.release()
        # Whom the supervisor stops has nothing left to do, and is not to die of a signal now.
        if code is None or code is ExitCode.COMPLETED or self._rank_link.launch is None:
            self.shutdown.uninstall()

    @property
    def _progress(self) -> Progress:
        return self._rank_link.progress

    def _steps(self) -> Generator[int, None, ExitCode]:
        """The steps that are left; then how the loop ended."""
        self._progress.step = self.train_state.step
        self._progress.enter(Phase.COMPILE)
        if self.train_state.step:
            self._say(f"resumed at step {self.train_state.step}")
        logger().info("ready", step=self.train_state.step, pid=os.getpid())
        agreed, unchecked = VoteResult(), True
        while self.train_state.step < self._todo.steps and not agreed.stop:
            step = self.train_state.step + 1
            ballot = self.vote_group.open(self.vote())
            set_rng(self._todo.seed, step, 0, self.ranks.world.rank)
            yield step
            with self._progress.waiting("the vote"):
                agreed = ballot.close()
            if unchecked:  # the optimizer has its state now
                self.checkpoints.check_state()
                unchecked = False
            self.train_state = replace(self.train_state, step=step, cursor=step)
            self._progress.made(step)
            if self._save_is_due(agreed):
                with self._progress.during(Phase.SAVE):
                    self.checkpoints.save(self.train_state, agreed.failed_saves)
        return self._leave(agreed)

    def vote(self) -> Vote:
        """This rank's vote at this moment."""
        return vote_to_go_on(self.shutdown, self.checkpoints)

    def record(self, event: LedgerEvent) -> None:
        """Record an event in the run's ledger."""
        self._rank_link.record(self._ownership.attempt, event)

    def _save_is_due(self, agreed: VoteResult) -> bool:
        limits = CheckpointSection().max_failures, storage_waits().patience
        refuse_to_go_on_unsaved(self.checkpoints, agreed, *limits)
        step = self.train_state.step
        on_interval = step % self._todo.save_every == 0
        due = agreed.save_again if agreed.failed_saves else on_interval
        return due and step < self._todo.steps and not agreed.stop

    def _leave(self, agreed: VoteResult) -> ExitCode:
        """Commit what can be, and part from the other ranks."""
        self._progress.phase = Phase.SAVE
        code, words = finish(self, agreed)
        self._say(words)
        self._progress.phase = Phase.EXIT
        self.ranks.final_barrier()
        self._last_words.code = code
        return code

    def _say(self, words: str) -> None:
        if self.ranks.world.rank == 0:
            say(words)


def _as_told(terms: LaunchTerms | None) -> SuperviseSection:
    """The supervisor's patience; without one nobody waits for anybody."""
    if terms is None:
        return SuperviseSection()
    return SuperviseSection(
        supervisor_timeout=terms.supervisor_timeout, stop_grace=terms.stop_grace
    )


def _at_prompt() -> bool:
    """Whether somebody types at this process, in a notebook, IPython or Python's own prompt."""
    return hasattr(sys, "ps1")


def _beside(script: str) -> Path:
    """The default run directory: as `kempner supervise` would name it.

    Raises `UsageError` without a script: another notebook's run would be taken for this one's.
    """
    name = Path(script).stem
    if _at_prompt() or name in ("", "-c", "-"):
        raise UsageError(
            'survive(): there is no script to name the run after; add run_dir="runs/NAME"'
        )
    return Path("runs") / name


def _device_of(model: nn.Module, optimizer: Optimizer) -> torch.device:
    """Where the model is. Raises `UsageError` if these are not a model and its optimizer."""
    for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(given, kind):
            home = "torch.nn.Module" if kind is nn.Module else "torch.optim.Optimizer"
            raise UsageError(f"survive({name}={type(given).__name__}): it must be a {home}")
    parameters = list(model.parameters())
    if not parameters:
        raise UsageError("survive(model): it has no parameters, so there is nothing to save")
    return parameters[0].device


def _open_checkpoints(
    run: RunDirectory,
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Ranks,
    rank_link: RankLink,
    attempt: Attempt,
    todo: Todo,
) -> CheckpointManager:
    history = read_history(run, attempt) if ranks.world.rank == 0 else RunHistory()
    identity = Identity(
        world=ranks.world.size,
        mesh={"ranks": ranks.world.size},
        seed=todo.seed,
        data_fingerprint="",
        model={},
        optimizer=type(optimizer).__name__.lower(),
        origin=Origin(host=host_facts(ranks.device), versions=versions()),
    )
    context = CheckpointContext(
        path=run.checkpoints,
        identity=identity,
        fence=Fence(run.attempts, attempt),
        group=ranks.saves,
        record=partial(rank_link.record, attempt),
        waiting=rank_link.progress.waiting,
        known=history.last_step,
        local_ranks=ranks.world.local_size,
    )
    return CheckpointManager(
        context, model, optimizer, keep=Keep(todo.keep_last), durations=history.durations
    )
