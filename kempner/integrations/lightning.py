"""Lightning's `Trainer` under kempner.

    from kempner.integrations.lightning import KempnerEnvironment, Survive

    trainer = Trainer(plugins=[KempnerEnvironment()], callbacks=[Survive(save_every=100)], ...)
    trainer.fit(model, loader)

Lightning writes its own checkpoint, and kempner commits it. A loader that continues at the exact
sample is `kempner.ResumableDataLoader`, whose state Lightning saves. Written against Lightning 2.6.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer

from kempner.checkpoint.folders import FolderCheckpoints
from kempner.checkpoint.store.retention import Keep
from kempner.cluster.world import discover
from kempner.config.sections import CheckpointSection
from kempner.run.control.protocol import Phase
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.training.own_loop import OwnLoop
from kempner.training.session import Entry
from kempner.training.vote.vote import VoteResult

_FILE = "lightning.ckpt"

_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
"""Those that Lightning may trap, and kempner does."""


class KempnerEnvironment(TorchElasticEnvironment):
    """Tells Lightning that kempner has started the ranks, and leaves signals and requeues to it.

    In a Slurm job Lightning would otherwise requeue the job itself. Without a launcher there is one
    rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._world = discover(os.environ)

    @staticmethod
    def detect() -> bool:
        return discover(os.environ).launcher != "none"

    def world_size(self) -> int:
        return self._world.size

    def global_rank(self) -> int:
        return self._world.rank

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", self._world.rank // self._world.local_size))


class Survive(Callback):
    """Lets `trainer.fit` stop, save and resume.

    `fit` goes on from the newest checkpoint that verifies, whatever `ckpt_path` says (which counts
    for a run that has none). All ranks vote in each optimizer step, and stop after the same one;
    then the checkpoint is committed and `fit` raises `SystemExit` with 75. A checkpoint is saved
    every `save_every` optimizer steps and at the end, and the last `keep_last` are kept: leave
    Lightning's own, `Trainer(enable_checkpointing=False)`, to what you want of the best ones.

    Torch's generators are seeded for each batch by `seed`, its number and the rank, since
    Lightning's checkpoints do not hold them: a step that is made again draws the same numbers.

    `run_dir` is the run directory; by default the supervisor's, or else `runs/<script>`.
    """

    def __init__(
        self,
        save_every: int,
        *,
        keep_last: int = CheckpointSection().keep_last,
        seed: int = 0,
        run_dir: str | Path | None = None,
    ) -> None:
        for name, given, least in (("save_every", save_every, 1), ("keep_last", keep_last, 2)):
            if given < least:
                raise UsageError(f"Survive({name}={given}): it must be at least {least}")
        self._save_every, self._keep, self._seed = save_every, Keep(keep_last), seed
        self._run_dir = run_dir
        self._agreed = VoteResult()
        self._code: ExitCode | None = None
        self._loop: OwnLoop | None = None
        self._evaluation = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Enter the run, once the ranks have met, and have its newest checkpoint loaded."""
        if stage != "fit":
            return
        entry = Entry("Survive", self._run_dir)
        with entry.guard():
            facts = {"save_every": self._save_every, "seed": self._seed}
            facts |= {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs or 0}
            self._session = entry.meet(trainer.strategy.root_device, facts)
            self._checkpoints = FolderCheckpoints(
                self._session.context(optimizer=None, seed=self._seed),
                lambda path: trainer.save_checkpoint(path / _FILE),
                keep=self._keep,
                durations=self._session.durations,
            )
            found = self._checkpoints.restore()
        train_state, path = found or (None, None)
        self._loop = OwnLoop(self._session, self._checkpoints, train_state)
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        if path is not None:
            _load_instead(trainer, path / _FILE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on from here."""
        for number, handler in self._handlers.items():  # Lightning has put its own in front
            signal.signal(number, handler)
        self._running.begin()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Open the vote, with the first batch of a step."""
        if not self._running.voting:
            self._running.begin_step()
        self._session.seed_step(self._seed, trainer.fit_loop.total_batch_idx)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Close the vote, with the last batch of a step, and do as the ranks agree."""
        loop, step = self._running, trainer.global_step
        if step <= loop.train_state.step:
            return
        before = loop.train_state.step
        agreed = self._agreed = loop.end_step(step)
        if agreed.stop:
            raise SystemExit(int(self._leave()))
        on_interval = step // self._save_every > before // self._save_every
        if loop.save_is_due(agreed, on_interval):
            loop.save(agreed)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation is no step, however long it takes."""
        if self._loop is not None:
            self._evaluation.enter_context(self._session.progress.during(Phase.EVAL))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to steps."""
        self._evaluation.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Commit the last step."""
        self._leave()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Let go of the run, whatever ends it."""
        self._give_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the run."""
        self._give_back()

    @property
    def _running(self) -> OwnLoop:
        assert self._loop is not None  # `setup` comes before all else
        return self._loop

    def _leave(self) -> ExitCode:
        code = self._code = self._running.leave(self._agreed)
        return code

    def _give_back(self) -> None:
        if self._loop is not None:
            self._loop = None
            self._session.give_back(self._code)


def _load_instead(trainer: Trainer, path: Path) -> None:
    """Have Lightning load this checkpoint: it has chosen one before it called any callback."""
    connector = trainer._checkpoint_connector
    start = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *arguments: Any, **options: Any) -> None:
        del connector.resume_start  # for this once
        start(path, *arguments, **options)

    connector.resume_start = resume_start  # type: ignore[method-assign]
