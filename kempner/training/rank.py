"""The life of a rank: find its place, build everything, train, leave with the right code."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

import kempner
from kempner.checkpoint.durations import Durations
from kempner.checkpoint.manager import CheckpointManager, Recorder
from kempner.checkpoint.manifest import Identity, Position
from kempner.cluster.world import World
from kempner.config.loading import digest, dumps
from kempner.config.sections import Config
from kempner.data.index import fingerprint
from kempner.data.loader import Feed
from kempner.data.tokens import Corpus
from kempner.model.sharding import build_model
from kempner.model.sizes import Shape, flops_per_token
from kempner.run.attempts import Attempt, Fence, begin_attempt
from kempner.run.exit_codes import DataError, ExitCode, RunError, UsageError
from kempner.run.files import replace_durable
from kempner.run.launch import Launch
from kempner.run.layout import RunDirectory
from kempner.run.ledger import Ledger, read_lines
from kempner.run.logs import logger, open_log
from kempner.run.messages import Phase
from kempner.training.anomalies import STARTED, Health, remembered
from kempner.training.council import Council
from kempner.training.display import open_display
from kempner.training.distributed import Ranks, connect
from kempner.training.evaluation import Evaluation
from kempner.training.faults import Faults, arm
from kempner.training.loop import Training, train
from kempner.training.memory import describe_shortage
from kempner.training.optimizer import build_optimizer
from kempner.training.presence import Presence
from kempner.training.shutdown import ShutdownHandler
from kempner.training.telemetry import Telemetry, peak_flops

_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Read error",
    "Timed out waiting",
    "Socket Timeout",
)
"""What Gloo and the store say when a peer is gone; they have no exception type for it."""


def main(config: Config, presence: Presence, shutdown: ShutdownHandler) -> NoReturn:
    """Run this process as one rank and end it; the exit code says how it went."""
    sentence = ""
    try:
        code = run_rank(config, presence, shutdown)
    except RunError as error:
        logger().error(str(error))
        code, sentence = error.code, str(error)
    except Exception as error:  # noqa: BLE001 - the process ends here, with a code for the cause
        code, sentence = classify(error, presence), f"{type(error).__name__}: {error}"
        if shortage := describe_shortage(error, presence.progress):
            logger().error(shortage)
            code, sentence = ExitCode.CRASHED, shortage
        elif code is ExitCode.PEERS_LOST:
            logger().error("lost another rank", reason=sentence.partition("\n")[0])
        else:
            logger().exception("unexpected exception")
    sys.stdout.flush()
    sys.stderr.flush()
    presence.leave(code, sentence)
    # Not sys.exit: a daemon thread in native code, Gloo's destructors or a loader worker that is
    # stuck on storage could turn a clean end into an abort or a hang.
    os._exit(code)


def classify(error: BaseException, presence: Presence) -> ExitCode:
    """The exit code for an exception that nobody expected: a lost peer, or a crash of our own.

    The supervisor's word comes first. What the error says decides where its word is not there yet,
    or there is no supervisor.
    """
    told = presence.link is not None and presence.link.peer_lost is not None
    lost = isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _PEER_GONE)
    )
    return ExitCode.PEERS_LOST if told or lost else ExitCode.CRASHED


def run_rank(config: Config, presence: Presence, shutdown: ShutdownHandler) -> ExitCode:
    """Connect, build, resume, train. Raises `RunError` for what a person can mend."""
    world, run, progress = presence.world, presence.run, presence.progress
    torch.set_num_threads(thread_count(config, world))
    torch.use_deterministic_algorithms(config.train.deterministic)
    faults = arm(config, presence)
    faults.strike(Phase.START)
    progress.enter(Phase.RENDEZVOUS)
    ranks = connect(world, config)
    shutdown.join_group(config.supervise.stop_grace if presence.launch is not None else None)
    attempt = _agree_on_attempt(run, ranks, presence.launch)
    open_log(run.log(attempt.number, world.rank), attempt=attempt.number, rank=world.rank)
    progress.enter(Phase.LOAD)
    faults.strike(Phase.LOAD)
    training = build(config, presence, ranks, attempt, shutdown, faults)
    progress.enter(Phase.STEP)
    logger().info("ready", step=training.position.step, reached=progress.reached, **_place(ranks))
    try:
        return train(training)
    finally:
        training.telemetry.close()
        training.feed.close()


def build(
    config: Config,
    presence: Presence,
    ranks: Ranks,
    attempt: Attempt,
    shutdown: ShutdownHandler,
    faults: Faults,
) -> Training:
    """Everything the loop needs, with the state of the newest checkpoint."""
    run = presence.run
    shards_open = config.data.num_shards_per_rank
    corpus = _open_tokens("data.dataset_path", config.data.dataset_path, max_open=shards_open)
    vocab_size = _vocabulary(config, corpus)
    shape = Shape.of(config.model, vocab_size)
    model = build_model(config, vocab_size, ranks.device, ranks.mesh)
    optimizer = build_optimizer(model, config.optimizer)
    record = _recorder(presence, attempt)
    checkpoints = CheckpointManager(
        Path(config.checkpoint.dir) if config.checkpoint.dir else run.checkpoints,
        model,
        optimizer,
        identity=_identity(config, corpus, shape, ranks),
        fence=Fence(run.attempts, attempt),
        group=ranks.saves,
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.keep_every,
        background=config.checkpoint.async_save,
        record=record,
        durations=Durations.from_ledger(read_lines(run.ledger))
        if ranks.world.rank == 0
        else Durations(),
    )
    if ranks.world.rank == 0:
        _snapshot_config(config, run, attempt)
    if faults.planned:
        record("faults_planned", faults=faults.planned)
    position = _resume(config, run, ranks, checkpoints, record)
    open_feed = partial(_open_feed, config, corpus, ranks)
    return Training(
        config=config,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        feed=open_feed(position),
        open_feed=open_feed,
        council=Council(ranks.votes),
        shutdown=shutdown,
        checkpoints=checkpoints,
        evaluation=_open_evaluation(config, vocab_size),
        progress=presence.progress,
        telemetry=_open_telemetry(config, run, ranks, attempt, shape, position),
        faults=faults,
        record=record,
        position=position,
        health=Health(position.losses),
    )


def thread_count(config: Config, world: World) -> int:
    """Threads for CPU kernels: as configured, else OMP_NUM_THREADS, else a share of the cores."""
    if config.train.threads is not None:
        return config.train.threads
    if asked := os.environ.get("OMP_NUM_THREADS", ""):
        if not asked.isdecimal() or int(asked) == 0:
            raise UsageError(f"OMP_NUM_THREADS={asked} is no number of threads; unset it")
        return int(asked)
    return max(1, len(os.sched_getaffinity(0)) // world.local_size)


def _agree_on_attempt(run: RunDirectory, ranks: Ranks, launch: Launch | None) -> Attempt:
    if launch is not None:
        return launch.attempt
    attempt: Attempt | None = None
    if ranks.world.rank == 0:
        attempt = begin_attempt(run)
        world = ranks.world
        Ledger(run.ledger).record(
            "attempt_started",
            attempt=attempt.number,
            ranks=world.size,
            launcher=world.launcher,
        )
    told = ranks.broadcast(attempt)
    assert isinstance(told, Attempt)  # rank 0 made one
    return told


def _resume(
    config: Config,
    run: RunDirectory,
    ranks: Ranks,
    checkpoints: CheckpointManager,
    record: Recorder,
) -> Position:
    """Load the newest checkpoint; where it stands, with every rollback that is known of.

    A checkpoint knows of those before it only, and after a rollback an older one may be next.
    """
    position = checkpoints.restore(config.checkpoint.accept_changes)
    if position is None:
        record(STARTED)
        return Position()
    told = ranks.broadcast(remembered(read_lines(run.ledger)) if ranks.world.rank == 0 else ())
    assert isinstance(told, tuple)  # rank 0's reading
    later = [rollback for rollback in told if rollback not in position.rollbacks]
    return dataclasses.replace(position, rollbacks=(*position.rollbacks, *later))


def _recorder(presence: Presence, attempt: Attempt) -> Recorder:
    def record(event: str, **fields: object) -> None:
        presence.record(attempt, event, fields)

    return record


def _vocabulary(config: Config, corpus: Corpus) -> int:
    wanted, there = config.model.vocab_size, corpus.index.vocab_size
    if wanted is not None and wanted < there:
        raise DataError(
            f"model.vocab_size={wanted} is too small for {config.data.dataset_path}, whose tokens "
            f"go up to {there - 1}; leave it out or set at least {there}"
        )
    return wanted or there


def _identity(config: Config, corpus: Corpus, shape: Shape, ranks: Ranks) -> Identity:
    model = dataclasses.asdict(shape)
    for free in ("dropout", "max_seq_len"):  # may change without touching a weight
        del model[free]
    return Identity(
        world=ranks.world.size,
        mesh=dict(zip(ranks.mesh.mesh_dim_names or (), ranks.mesh.shape, strict=True)),
        seed=config.train.seed,
        data_fingerprint=fingerprint(corpus.index, config.train.seq_len),
        model=model,
        config_hash=digest(config),
        host={
            "device": _device_name(ranks.device),
            "threads": torch.get_num_threads(),
            "dtype": config.train.dtype,
        },
        versions={
            "kempner": kempner.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        optimizer=config.optimizer.name,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _place(ranks: Ranks) -> dict[str, object]:
    world = ranks.world
    return {
        "pid": os.getpid(),
        "world": world.size,
        "local_rank": world.local_rank,
        "host": platform.node(),
        "device": str(ranks.device),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "threads": torch.get_num_threads(),
        "launcher": world.launcher,
    }


def _snapshot_config(config: Config, run: RunDirectory, attempt: Attempt) -> None:
    """Keep the configuration with the run; a changed one with the attempt that it is for."""
    content = dumps(config).encode()
    if not run.config.exists():
        replace_durable(run.config, content, unique=attempt.nonce)
    elif run.config.read_bytes() != content:
        replace_durable(run.attempt(attempt.number) / "config.toml", content, unique=attempt.nonce)


def _open_feed(config: Config, corpus: Corpus, ranks: Ranks, position: Position) -> Feed:
    return Feed(
        corpus,
        seq_len=config.train.seq_len,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        seed=config.train.seed,
        rank=ranks.world.rank,
        world=ranks.world.size,
        cursor=position.cursor,
        skips=tuple((rollback.start, rollback.end) for rollback in position.rollbacks),
        workers=config.data.num_dataloader_workers,
        shards_open=config.data.num_shards_per_rank,
        pin_memory=ranks.device.type == "cuda",
    )


def _open_tokens(key: str, folder: str, **options: int) -> Corpus:
    """Raises `DataError` with the key that names the folder."""
    try:
        return Corpus.open(folder, **options)
    except DataError as error:
        raise DataError(f"{key}={folder}: {error}") from error


def _open_evaluation(config: Config, vocab_size: int) -> Evaluation:
    if config.eval.dataset_path is None or config.eval.interval is None:
        return Evaluation(config, None)
    corpus = _open_tokens("eval.dataset_path", config.eval.dataset_path)
    if corpus.index.vocab_size > vocab_size:
        raise DataError(
            f"eval.dataset_path={config.eval.dataset_path} has {corpus.index.vocab_size} token "
            f"ids, the model knows {vocab_size}; prepare it with the training data's tokenizer"
        )
    return Evaluation(config, corpus)


def _open_telemetry(
    config: Config,
    run: RunDirectory,
    ranks: Ranks,
    attempt: Attempt,
    shape: Shape,
    position: Position,
) -> Telemetry:
    display = open_display(ranks.world.rank, position.step, config.train.max_steps)
    if position.step > 0:
        display.say(f"resumed at step {position.step}, sample {position.cursor}")
    run.samples(0).parent.mkdir(parents=True, exist_ok=True)
    telemetry = Telemetry(
        config,
        run,
        attempt=attempt.number,
        rank=ranks.world.rank,
        flops_per_second_at_peak=peak_flops(ranks.device, ranks.world.size),
        flops_per_token=flops_per_token(shape, config.train.seq_len),
        display=display,
    )
    telemetry.start(position)
    return telemetry
