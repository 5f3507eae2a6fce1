"""Lightning's `Trainer` under kempner.

    from kempner.integrations.lightning import KempnerEnvironment, Survive

    trainer = Trainer(plugins=[KempnerEnvironment()], callbacks=[Survive(save_every=100)], ...)
    trainer.fit(model, loader)

Lightning writes its own checkpoint, and kempner adds the state that it leaves out
(`lightning_state.py`) and commits it. The loader is the user's (`lightning_loop.py`).
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

try:
    import lightning
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as error:
    from kempner.integrations.extras import without_extra

    raise without_extra(error, "lightning") from None

from kempner.checkpoint.manager import FolderCheckpoints
from kempner.checkpoint.store.retention import Keep
from kempner.cluster.world import discover
from kempner.config.sections import CheckpointSection
from kempner.integrations.lightning_loop import BATCH, FitProgress
from kempner.integrations.lightning_state import ModelFiles
from kempner.run.control.protocol import Phase
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.training.compute.forward_backward import program_seed
from kempner.training.own_loop import OwnLoop
from kempner.training.session import RunEntry, Session
from kempner.training.vote import VoteResult

_FILE = "lightning.ckpt"

_SEED_BEFORE = 0
"""The seed of runs of earlier versions of kempner without a given seed."""

_LONG = 20.0
"""Seconds of an evaluation from which on a step is committed before it; also before the first
one."""

_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
"""Signals that both Lightning and kempner trap."""


def _check_version() -> None:
    """Raise `UsageError` unless this version of Lightning is supported."""
    version = tuple(int(part) for part in lightning.__version__.split(".")[:2])
    if not (2, 5) <= version < (2, 7):
        raise UsageError(
            f"this is Lightning {lightning.__version__}, and kempner knows 2.5 and 2.6: "
            "pip install 'lightning>=2.5,<2.7'"
        )


class KempnerEnvironment(TorchElasticEnvironment):
    """Tells Lightning that kempner has started the ranks, and handles signals and requeues: in a
    Slurm job Lightning would otherwise requeue the job itself. Without a launcher there is one
    rank. A `Trainer` or `Fabric` must be given these `devices`, `num_nodes` and `strategy`."""

    def __init__(self) -> None:
        _check_version()
        super().__init__()
        self._world = discover(os.environ)

    @property
    def devices(self) -> int:
        """Ranks on this node."""
        return self._world.local_size

    @property
    def num_nodes(self) -> int:
        """Nodes with ranks."""
        return self._world.size // self._world.local_size

    @property
    def strategy(self) -> str:
        """`ddp` for more than one rank, else `auto`."""
        return "ddp" if self._world.size > 1 else "auto"

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

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise `UsageError` unless Lightning is configured for the ranks that were started."""
        if num_devices * num_nodes != self._world.size:
            raise UsageError(
                f"{self._world.size} ranks were started, and Lightning has devices={num_devices}, "
                f"num_nodes={num_nodes}: give it devices={self.devices}, "
                f'num_nodes={self.num_nodes}, strategy="{self.strategy}"'
            )


class Survive(Callback):
    """Lets `trainer.fit` stop, save and resume.

    `fit` resumes from the newest checkpoint that verifies; `ckpt_path` counts only if the run has
    none. All ranks vote in each optimizer step, and stop after the same one; then the checkpoint is
    committed and `fit` raises `SystemExit` with 75. A checkpoint is saved every `save_every`
    optimizer steps and at the end, and the last `keep_last` are kept. Work that follows a step,
    such as a validation, does not delay a stop: the next start makes it up.

    kempner determines the order of the training data, and restores the place in it on any number of
    ranks. The generators of torch, NumPy and `random` are seeded for each batch, for what follows
    it, and for its samples, from `seed`, their number and the rank, so that a repeated step draws
    the same numbers. By default `seed` is the one that the program gave to torch.

    `run_dir` is the run directory; by default the supervisor's, or else `runs/<script>`."""

    def __init__(
        self,
        save_every: int,
        *,
        keep_last: int = CheckpointSection().keep_last,
        seed: int | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        for name, given, least in (("save_every", save_every, 1), ("keep_last", keep_last, 2)):
            if given < least:
                raise UsageError(f"Survive({name}={given}): it must be at least {least}")
        self._save_every, self._keep, self._seed = save_every, Keep(keep_last), seed
        self._run_dir = run_dir
        self._fit: _Fit | None = None
        self._evaluation = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Join the run after the rendezvous, and have its newest checkpoint loaded."""
        if stage != "fit":
            return
        _check_version()
        entry = RunEntry("Survive", self._run_dir)
        with entry.guard():
            KempnerEnvironment().validate_settings(trainer.world_size, 1)
            agree_on: dict[str, object] = {"save_every": self._save_every, "seed": self._seed}
            agree_on |= {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs or 0}
            facts = {} if self._seed is None else {"seed": self._seed}
            session = entry.meet(trainer.strategy.root_device, agree_on, facts)
            self._fit = _Fit(trainer, session, self._save_every, self._keep, self._seed)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Called before the other callbacks load their states."""
        if self._fit is not None:
            self._fit.files.restore_folders(checkpoint.get("callbacks", {}))

    def on_train_start(self, *_: Any, **__: Any) -> None:
        self._running.begin()

    def on_train_epoch_start(self, *_: Any, **__: Any) -> None:
        self._running.progress.begin_epoch()

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Open the vote with the first batch of a step."""
        fit = self._running
        if not fit.loop.voting:
            fit.loop.begin_step()
        fit.progress.seed_generators(BATCH)

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        if self._fit is not None:
            self._evaluation.enter_context(self._fit.evaluating())

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Leave the validation if a stop was requested."""
        if self._fit is not None:
            self._fit.leave_evaluation()

    def on_validation_end(self, *_: Any, **__: Any) -> None:
        self._evaluation.close()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._running.complete()

    def on_exception(self, *_: Any, **__: Any) -> None:
        self._give_back()

    def teardown(self, *_: Any, **__: Any) -> None:
        self._give_back()

    @property
    def _running(self) -> _Fit:
        assert self._fit is not None  # `setup` is called first
        return self._fit

    def _give_back(self) -> None:
        if self._fit is not None:
            fit, self._fit = self._fit, None
            fit.give_back()


class _Fit:
    """The run of one `trainer.fit`: its loop and its checkpoints."""

    def __init__(
        self, trainer: Trainer, session: Session, save_every: int, keep: Keep, seed: int | None
    ) -> None:
        self._trainer, self.session, self._save_every = trainer, session, save_every
        context = session.context(optimizer=None, seed=seed)
        self._checkpoints = FolderCheckpoints(
            context, self._write, keep=keep, durations=session.durations
        )
        self.files = ModelFiles(trainer, context.path.parent / "model_files.txt")
        self.files.attach(context.broadcast_from_rank0(self.files.recorded))
        train_state, path = self._checkpoints.restore() or (None, None)
        saved = None if path is None else _load(path, context.rank)
        place = context.rank, context.world
        self.progress = FitProgress(trainer, place, self._choose(seed, saved), saved, self.files)
        self._tail_due = bool(saved and saved["tail_due"])
        self.loop = OwnLoop(session, self._checkpoints, train_state)
        self._agreed = VoteResult()
        self._code: ExitCode | None = None
        self._evaluated_for = math.inf
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self.progress.attach(self._after_batch, self._find_complete)
        if path is not None:
            _load_instead(trainer, path / _FILE)

    def _choose(self, seed: int | None, saved: dict[str, Any] | None) -> int:
        """The seed: as given, else as in the checkpoint, else torch's on rank 0."""
        if seed is not None:
            return seed
        if saved is not None:
            return int(saved.get("seed", _SEED_BEFORE))
        from_rank_0 = self.session.ranks.broadcast(program_seed())
        assert isinstance(from_rank_0, int)
        return from_rank_0

    def begin(self) -> None:
        for number, handler in self._handlers.items():  # Lightning has installed its own
            signal.signal(number, handler)
        self.loop.begin()

    def _after_batch(self, evaluation_due: bool) -> None:
        """Between a batch and its tail: if a step has ended, close the vote, and save or stop."""
        loop, step = self.loop, self._trainer.global_step
        before = loop.train_state.step
        if step <= before:
            return
        agreed = self._agreed = loop.end_step(step)
        self._tail_due = True
        if agreed.stop:
            self._leave()
        on_interval = step // self._save_every > before // self._save_every
        wanted = on_interval and not self.progress.is_last_step()
        if loop.save_is_due(agreed, wanted or self._is_long(evaluation_due)):
            loop.save(agreed)

    def _is_long(self, evaluation_due: bool) -> bool:
        """Whether a long evaluation follows, so that the step should be committed first."""
        return bool(evaluation_due and self.session.ranks.broadcast(self._evaluated_for > _LONG))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The context of an evaluation, which measures its duration."""
        started = time.monotonic()
        with self.session.progress.during(Phase.EVAL):
            yield
        if not self._trainer.sanity_checking:
            self._evaluated_for = time.monotonic() - started

    def leave_evaluation(self) -> None:
        """Stop now, if there is only this rank, a stop was requested and the step is committed; the
        next start makes up the evaluation. Several ranks stop together, at the vote of the next
        step."""
        saved = self._checkpoints.committed_step == self.loop.train_state.step
        if self.session.ranks.world.size == 1 and saved and self.session.shutdown.reason():
            self._agreed = self.loop.vote_group.open(self.loop.vote()).close()
            self._leave()

    def _leave(self) -> None:
        self._code = self.loop.leave(self._agreed)
        raise SystemExit(int(self._code))

    def _find_complete(self) -> None:
        self.begin()
        self.complete()

    def complete(self) -> None:
        """Commit the last step, including its tail."""
        saved = self._checkpoints.committed_step == self.loop.train_state.step
        if saved and self._tail_due and not self.session.shutdown.reason():
            self._checkpoints.make_again()  # the present commit lacks the tail
        self._tail_due = False
        self._code = self.loop.leave(self._agreed)

    def give_back(self) -> None:
        self.progress.detach()
        self.files.detach()
        self.session.give_back(self._code)

    def _write(self, path: Path) -> None:
        self._trainer.save_checkpoint(path / _FILE)
        name = _name(self.session.ranks.world.rank)
        torch.save(self.progress.state(self._tail_due), path / name)


def _name(rank: int) -> str:
    return f"kempner-{rank:05}.pt"


def _load(path: Path, rank: int) -> dict[str, Any]:
    """The state that kempner has added to a checkpoint; empty for one of an earlier version."""
    for name in (_name(rank), _name(0)):  # rank 0's if there were fewer ranks
        if (path / name).exists():
            loaded: dict[str, Any] = torch.load(path / name, map_location="cpu", weights_only=True)
            return loaded
    return {}


def _load_instead(trainer: Trainer, path: Path) -> None:
    """Have Lightning load this checkpoint instead of the one that it chose before calling any
    callback."""
    connector = trainer._checkpoint_connector
    start = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *arguments: Any, **options: Any) -> None:
        del connector.resume_start  # only once
        start(path, *arguments, **options)

    connector.resume_start = resume_start  # type: ignore[method-assign]
