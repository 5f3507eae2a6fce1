"""`survive`: a training loop of the user's own outlives stops, crashes and hangs.

    for step in survive(model, optimizer, steps=1000, save_every=50):
        ...

Iterating goes on where the newest checkpoint is, votes on every step, saves, and stops on the same
step on all ranks. Under `kempner supervise -- COMMAND` the ranks report to the supervisor, too.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kempner.checkpoint.durations import Durations
from kempner.checkpoint.manager import CheckpointManager
from kempner.checkpoint.manifest import Identity, Position
from kempner.config.sections import CheckpointSection, DistributedSection, SuperviseSection
from kempner.run import logs
from kempner.run.attempts import Attempt, Fence
from kempner.run.exit_codes import ExitCode, RunError
from kempner.run.launch import Launch, Terms
from kempner.run.layout import RunDirectory
from kempner.run.ledger import read_lines
from kempner.run.logs import logger, open_log
from kempner.run.messages import Phase
from kempner.training.assembly import host_facts, versions
from kempner.training.council import Council, Wish
from kempner.training.distributed import Ranks, adopt
from kempner.training.last_save import finish, refuse_to_go_on_unsaved
from kempner.training.presence import Presence, join
from kempner.training.rank import agree_on_attempt, classify
from kempner.training.seeds import set_rng
from kempner.training.shutdown import ShutdownHandler


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
    """What to iterate over in place of `range(1, steps + 1)`: the steps that are not done yet.

    Called once, on every rank, when `model` and `optimizer` are as they will be trained, after
    `init_process_group`; both are filled from the newest checkpoint, if there is one. A state is
    saved every `save_every` steps, of which the last `keep_last` stay. Each step begins with
    torch's generators seeded by `seed`, the step and the rank, so that a resumed step draws what
    the undisturbed one would have.

    `run_dir` is where everything is kept: as the supervisor says, or else `runs/<script>`.

    When the ranks were asked to stop, the state is committed, and iterating raises `SystemExit`
    with 75. Raises `UsageError`, `DataError` or `CheckpointWriteError` with a sentence, which is
    printed without a traceback.
    """
    logs.configure()
    shutdown = ShutdownHandler()
    shutdown.install()
    launch = Launch.from_environment(os.environ)
    told = launch.terms if launch is not None else None
    run = RunDirectory(Path(run_dir or (told.run if told else _beside(sys.argv[0]))))
    presence = join(run, _as_told(told), shutdown)
    last_words = _LastWords(presence)
    presence.progress.enter(Phase.LOAD)
    device = next(model.parameters()).device
    ranks = adopt(presence.world, device, timedelta(seconds=DistributedSection().timeout))
    shutdown.join_group(told.stop_grace if told else None, presence.tell_of_signal)
    attempt = agree_on_attempt(run, ranks, presence.launch)
    open_log(run.log(attempt.number, ranks.world.rank), attempt=attempt.number)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    checkpoints = _open_checkpoints(
        run, model, optimizer, ranks, presence, attempt, seed, keep_last
    )
    survivor = Survivor(
        presence, ranks, attempt, shutdown, checkpoints, last_words, steps, save_every, seed
    )
    optimizer.register_step_pre_hook(lambda *_: checkpoints.release_staging())
    return survivor


class Survivor:
    """The steps of a loop, to be iterated over once, on every rank alike."""

    def __init__(
        self,
        presence: Presence,
        ranks: Ranks,
        attempt: Attempt,
        shutdown: ShutdownHandler,
        checkpoints: CheckpointManager,
        last_words: _LastWords,
        steps: int,
        save_every: int,
        seed: int,
    ) -> None:
        self._presence, self._attempt, self._last_words = presence, attempt, last_words
        self._steps, self._save_every, self._seed = steps, save_every, seed
        self._progress = presence.progress
        self.ranks, self.shutdown, self.checkpoints = ranks, shutdown, checkpoints
        self.council = Council(ranks.votes)
        self.position = checkpoints.restore() or Position()
        """How many steps are done."""
        self.suspicious = False
        """What a loss means, only its loop knows."""

    def __iter__(self) -> Iterator[int]:
        self._progress.step = self.position.step
        self._progress.enter(Phase.COMPILE)
        if self.position.step:
            self._say(f"resumed at step {self.position.step}")
        logger().info("ready", step=self.position.step, pid=os.getpid())
        verdict = Wish()
        while self.position.step < self._steps and not verdict.stop:
            step = self.position.step + 1
            ballot = self.council.open(self.wish())
            set_rng(self._seed, step, 0, self.ranks.world.rank)
            yield step
            with self._progress.waiting("the vote"):
                verdict = ballot.close()
            self.position = replace(self.position, step=step, cursor=step)
            self._progress.made(step)
            if self._save_is_due(verdict):
                with self._progress.during(Phase.SAVE):
                    self.checkpoints.save(self.position)
        self._leave(verdict)

    def wish(self) -> Wish:
        """What this rank wants at this moment."""
        self.checkpoints.poll()
        return Wish(
            stop=self.shutdown.wish(),
            failed_saves=self.checkpoints.settled_failures,
            seconds_left=self.shutdown.seconds_left(),
        )

    def record(self, event: str, **fields: object) -> None:
        """A line for the run's ledger."""
        self._presence.record(self._attempt, event, fields)

    def _save_is_due(self, verdict: Wish) -> bool:
        refuse_to_go_on_unsaved(verdict, CheckpointSection().max_failures)
        step = self.position.step
        due = step % self._save_every == 0 or verdict.failed_saves == 1
        return due and step < self._steps and not verdict.stop

    def _leave(self, verdict: Wish) -> None:
        self._progress.phase = Phase.SAVE
        code, words = finish(self, verdict)
        self._say(words)
        self._progress.phase = Phase.EXIT
        self.ranks.farewell()
        self._last_words.code = code
        if code is not ExitCode.COMPLETED:
            raise SystemExit(int(code))

    def _say(self, words: str) -> None:
        if self.ranks.world.rank == 0:
            print(words, flush=True)


class _LastWords:
    """Tells the supervisor how this process ends: at its exit, or with the exception that ends it.

    At once in the latter case: an interpreter that goes down waits for threads, and those may wait
    for ranks that wait for this one.
    """

    def __init__(self, presence: Presence) -> None:
        self.code: ExitCode | None = None
        """How the loop ended, if it did; without that the exit status says more."""
        self._presence, self._earlier_hook = presence, sys.excepthook
        sys.excepthook = self._hook
        atexit.register(self._say)

    def _say(self) -> None:
        if self.code is not None:
            self._presence.leave(self.code, "")

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.code = None
        if isinstance(error, RunError):
            print(f"kempner: {error}", file=sys.stderr, flush=True)
            self._presence.accuse(error)
            self._presence.leave(error.code, str(error))
            return
        self._earlier_hook(kind, error, trace)
        self._presence.leave(classify(error, self._presence), f"{kind.__name__}: {error}")


def _as_told(terms: Terms | None) -> SuperviseSection:
    """The supervisor's patience; without one nobody waits for anybody."""
    if terms is None:
        return SuperviseSection()
    return SuperviseSection(silence_limit=terms.silence_limit, stop_grace=terms.stop_grace)


def _beside(script: str) -> Path:
    """Where a run is kept of which nobody says where: as `kempner supervise` would name it."""
    return Path("runs") / (Path(script).stem or "run")


def _open_checkpoints(
    run: RunDirectory,
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Ranks,
    presence: Presence,
    attempt: Attempt,
    seed: int,
    keep_last: int,
) -> CheckpointManager:
    identity = Identity(
        world=ranks.world.size,
        mesh={"ranks": ranks.world.size},
        seed=seed,
        data_fingerprint="",
        model={},
        config_hash="",
        host=host_facts(ranks.device),
        versions=versions(),
        optimizer=type(optimizer).__name__.lower(),
    )
    return CheckpointManager(
        run.checkpoints,
        model,
        optimizer,
        identity=identity,
        fence=Fence(run.attempts, attempt),
        group=ranks.saves,
        keep_last=keep_last,
        record=lambda event, **fields: presence.record(attempt, event, fields),
        durations=Durations.from_ledger(read_lines(run.ledger) if ranks.world.rank == 0 else ()),
        waiting=presence.progress.waiting,
    )
