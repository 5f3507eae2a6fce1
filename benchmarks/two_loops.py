"""The programs that `step_overhead.py` compares: a supervisor with its ranks, and plain ranks.

Each trains in turns that the benchmark gives out over a store, and says how long they took.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist
from in_memory.buddy_here import BuddyHere
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kempner.checkpoint.format.manifest import TrainState
from kempner.cluster.world import World
from kempner.config.loading import load
from kempner.config.sections import Config
from kempner.data.files.token_file import Corpus
from kempner.model.sharding import build_model
from kempner.model.spec.communication import EACH_MICRO_BATCH
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import inbox
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.daemon import supervise
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.launchers.local import this_machine
from kempner.training import build, loop
from kempner.training import main as rank_main
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.optimizer import build_optimizer, clip_gradients
from kempner.training.groups.process_groups import Ranks, connect
from kempner.training.loop import Training
from kempner.training.rank_link.rank_link import open_rank_link
from kempner.training.rank_link.shutdown import StopListener
from kempner.training.vote import Ballot, Vote, VoteResult

NAME = "TWO_LOOPS_NAME"
"""Variable of a supervisor and its ranks: what the benchmark calls them."""
STORE_PORT = "OVERHEAD_PORT"
"""The variable with the port of the store on which turns are given out."""
PATIENCE = timedelta(hours=6)


class What(StrEnum):
    """What a turn is made of."""

    STEPS = "steps"
    REDUCED = "gradients, each followed by a synchronous all-reduce of a vote's size"
    REDUCTIONS = "such all-reduces alone"


@dataclass(frozen=True)
class Turn:
    """`count` of them."""

    count: int
    what: What = What.STEPS


@dataclass(frozen=True)
class Result:
    """What a rank says of a turn: its wall and processor time, and that of each wait for the vote
    or the all-reduce, in seconds.
    """

    wall: float
    busy: float
    waits: list[float]


class Turns:
    """A rank's side: its program's turns, one by one."""

    def __init__(self, program: str) -> None:
        self._program = program
        port = int(os.environ[STORE_PORT])
        self._store = TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
        self._waits: list[float] = []

    def take(self, work: Callable[[Turn], None]) -> None:
        """Do as told until told that it is over."""
        number = 0
        while told := json.loads(self._store.get(f"{self._program}/{number}")):
            self._waits.clear()
            dist.barrier()
            wall, busy = time.perf_counter(), time.process_time()
            work(Turn(**told))
            dist.barrier()
            wall, busy = time.perf_counter() - wall, time.process_time() - busy
            said = json.dumps(asdict(Result(wall, busy, self._waits)))
            self._store.set(f"{self._program}/{number}/{dist.get_rank()}", said)
            number += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note how long the block takes."""
        start = time.perf_counter()
        yield
        self._waits.append(time.perf_counter() - start)


def be_kempner(file: Path) -> None:
    """A rank as `kempner train` is one, but for the turns that its loop is cut into."""
    shutdown = StopListener()
    shutdown.install()
    config = load(file, [])
    turns, close_ballot = Turns(os.environ[NAME]), Ballot.close

    def close(ballot: Ballot) -> VoteResult:
        with turns.waiting():
            return close_ballot(ballot)

    def train(run: Training) -> ExitCode:
        def work(turn: Turn) -> None:
            until = {"max_steps": run.train_state.step + turn.count}
            section = run.config.train.model_copy(update=until)
            run.config = run.config.model_copy(update={"train": section})
            loop.train(run)

        turns.take(work)
        return ExitCode.COMPLETED

    Ballot.close = close  # type: ignore[method-assign, assignment]
    loop.finish_run = lambda run, agreed: ExitCode.COMPLETED  # between turns nothing is saved
    rank_main.train = train  # type: ignore[attr-defined]
    rank_main.main(config, open_rank_link(config, shutdown), shutdown)


class Plain:
    """The loop with nothing around it, over what a rank of kempner builds."""

    def __init__(self, config: Config, ranks: Ranks, turns: Turns) -> None:
        self._config, self._ranks, self._turns = config, ranks, turns
        corpus = Corpus.open(str(config.data.dataset_path))
        self._model = build_model(config, corpus.index.vocab_size, ranks.device, ranks.mesh)
        self._optimizer = build_optimizer(self._model, config.optimizer)
        self._feed = build._open_feed(config, corpus, ranks, EACH_MICRO_BATCH, TrainState())
        self._step = 0

    def work(self, turn: Turn) -> None:
        """Take a turn."""
        for _ in range(turn.count):
            match turn.what:
                case What.STEPS:
                    self._train()
                case What.REDUCED:
                    self._gradient()
                    self._reduce()
                    self._optimizer.zero_grad()
                case What.REDUCTIONS:
                    self._reduce()

    def _train(self) -> None:
        loss = self._gradient()
        clip_gradients(self._model, self._config.train.clip_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss.item()

    def _reduce(self) -> None:
        votes = torch.tensor(Vote().encode(self._ranks.world.rank), dtype=torch.int64)
        with self._turns.waiting():
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._ranks.votes)

    def _gradient(self) -> torch.Tensor:
        self._step += 1
        batch = self._feed.take()
        assert batch is not None  # it does not give up
        seed, rank = self._config.train.seed, self._ranks.world.rank
        gradient = StepGradient(self._model, self._ranks.device, seed, rank)
        return gradient.add(batch.micro, self._step)


def be_plain(file: Path, program: str, place: int, size: int) -> None:
    """A rank of `plain` or `control`."""
    config, world = load(file, []), World(place, size, place, size, launcher="kempner")
    torch.set_num_threads(rank_main.thread_count(config, world))
    turns, ranks = Turns(program), connect(world, config)
    plain = Plain(config, ranks, turns)
    turns.take(plain.work)
    os._exit(0)


def be_supervisor(file: Path, size: int) -> None:
    """What `kempner supervise --nproc size` does, with this file in place of `kempner train`."""
    inbox().install()
    config = load(file, [])
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    ranks = Program((sys.executable, __file__, "rank", str(file)), ours=True)
    if config.checkpoint.buddy:
        launcher: Launcher = BuddyHere(run, size, config.checkpoint.buddy_share)
    else:
        launcher = Launcher(*this_machine(run, size))
    sys.exit(supervise(run, launcher, ranks, config, inbox()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", help="supervisor, its rank, or the name of a plain program")
    parser.add_argument("config", type=Path)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--place", type=int, default=0)
    arguments = parser.parse_args()
    match arguments.program:
        case "supervisor":
            be_supervisor(arguments.config, arguments.size)
        case "rank":
            be_kempner(arguments.config)
        case program:
            be_plain(arguments.config, program, arguments.place, arguments.size)


if __name__ == "__main__":
    main()
