"""Builds everything that a rank's step loop needs, and loads the checkpoint."""

from __future__ import annotations

import dataclasses
import gc
import os
import platform
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

import kempner
from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity, Origin, TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.slots.memory import open_slots
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.tensors.restore import beside_a_base
from kempner.checkpoint.tensors.step_slots import StepMemory
from kempner.config.loading import digest, dumps
from kempner.config.sections import Config
from kempner.data.files.index import check_held_out, check_samples, fingerprint, vocabulary
from kempner.data.files.token_file import Corpus
from kempner.data.order.batch_slices import Slicing
from kempner.data.serve.loader import Feed, MicroBatch, read_step
from kempner.model.factory import create, place
from kempner.model.factory import digest as weights_digest
from kempner.model.initial_weights import initialise
from kempner.model.sharding import build_model, compile_blocks, time_collectives
from kempner.model.spec.adapter import Adapter
from kempner.model.spec.communication import Choice
from kempner.model.spec.mesh import check_tensor_degree
from kempner.model.spec.shape import Shape, flops_per_token, model_record
from kempner.model.transformer import Transformer
from kempner.run.control.launch_env import keeps_no_steps
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import empty, storage_waits
from kempner.run.record.attempts import Attempt, Fence
from kempner.run.record.events import (
    CheckpointCommitted,
    CheckpointsCertified,
    FaultsPlanned,
    StartedAnew,
)
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import EventRecorder
from kempner.run.record.recorded_config import changes_since, describe_changes, used_before
from kempner.run.record.run_dir import RunDirectory
from kempner.training.anomalies import Health, remembered
from kempner.training.compute.forward_backward import choose_communication
from kempner.training.compute.optimizer import build_optimizer
from kempner.training.compute.slot_gradient import SlotGradient
from kempner.training.corruption import certified_step, doubted_step
from kempner.training.evaluation import Evaluation
from kempner.training.fault_injection import FaultInjector
from kempner.training.groups.process_groups import Ranks
from kempner.training.loop import Data, Tools, Training
from kempner.training.observe.metrics import StepMetrics, peak_flops
from kempner.training.observe.parts import StepParts
from kempner.training.observe.profiler import Profiler
from kempner.training.observe.progress_bar import open_display
from kempner.training.rank_link.rank_link import RankLink
from kempner.training.rank_link.shutdown import StopListener
from kempner.training.step_checks import StepChecks


def build(
    config: Config,
    rank_link: RankLink,
    ranks: Ranks,
    attempt: Attempt,
    shutdown: StopListener,
    faults: FaultInjector,
) -> Training:
    """Build everything for the loop, with the state of the newest checkpoint."""
    run, gpu = rank_link.run, ranks.device.type == "cuda"
    corpus, evaluation = _open_data(config, rank_link, ranks)
    vocab_size = vocabulary(config, corpus.index)
    choice = choose_communication(config, vocab_size, ranks)
    model = _build_model(config, corpus, ranks, rank_link, choice)
    trained = model, build_optimizer(model, config.optimizer, bool(config.train.same_on_any_world))
    gc.freeze()  # the imports' million objects: no later collection scans them
    gc.enable()  # disabled since the start of the process
    record = partial(rank_link.record, attempt)
    history = read_history(run, attempt) if ranks.world.rank == 0 else RunHistory()
    checkpoints = _open_checkpoints(config, rank_link, ranks, attempt, corpus, history, *trained)
    if ranks.world.rank == 0:  # last: all that it names exists
        storage_waits().retry(partial(_snapshot_config, config, run, attempt), worked=True)
    if faults.planned:
        record(FaultsPlanned(tuple(faults.planned)))
    state = _resume(config, ranks, checkpoints, record, history)
    flops = _flops_per_token(config, vocab_size, model)
    tools = Tools(
        Data(partial(_open_feed, config, corpus, ranks, choice), state),
        _open_telemetry(config, rank_link, ranks, attempt, flops, state, history),
        evaluation,
        faults,
        rank_link.progress,
        record,
        Profiler(config.profiling, run, attempt.number, ranks.world.rank, gpu),
        choice,
    )
    health = Health(state.losses)
    loop = Training(config, ranks, *trained, shutdown, checkpoints, tools, state, health)
    loop.parts, loop.checks = _open_parts(loop, run, attempt), _open_checks(loop, corpus, history)
    return loop


def _open_parts(loop: Training, run: RunDirectory, attempt: Attempt) -> StepParts | None:
    if (interval := loop.config.integrity.parts_interval) is None:
        return None
    assert isinstance(loop.gradient, SlotGradient)
    return StepParts(run, attempt.number, interval, loop.gradient)


def _open_checks(run: Training, corpus: Corpus, history: RunHistory) -> StepChecks | None:
    if (interval := run.config.integrity.recompute_interval) is None:
        return None
    assert isinstance(run.gradient, SlotGradient)
    known = certified_step(history)
    certified = min(known, run.train_state.step)
    if run.ranks.world.rank == 0 and known:
        run.checkpoints.pin_up_to(certified)
        if certified < known:  # what is made again is not
            run.record(CheckpointsCertified(certified))
    read = partial(_read_step, run.config, corpus.reopened(), run.ranks.degrees.data_world)
    trained = run.gradient, run.model, run.optimizer
    doubted = run.ranks.broadcast(doubted_step(history))  # which rank 0 alone has
    assert isinstance(doubted, int)
    return StepChecks(*trained, run.ranks, interval, read, certified, doubted)


def _read_step(
    config: Config, corpus: Corpus, world: int, before: TrainState, rank: int
) -> list[MicroBatch]:
    """The micro batches of a rank in the step that follows a train state."""
    slicing = _slicing(config, rank, world, before)
    seq_len, seed = config.train.seq_len, config.train.seed
    return read_step(corpus, slicing, seq_len=seq_len, seed=seed, cursor=before.cursor)


def _open_checkpoints(
    config: Config,
    rank_link: RankLink,
    ranks: Ranks,
    attempt: Attempt,
    corpus: Corpus,
    history: RunHistory,
    model: nn.Module,
    optimizer: Optimizer,
) -> CheckpointEngine:
    run, section = rank_link.run, config.checkpoint
    context = CheckpointContext(
        path=Path(section.dir) if section.dir else run.checkpoints,
        identity=_identity(config, corpus, vocabulary(config, corpus.index), ranks),
        fence=Fence(run.attempts, attempt),
        group=ranks.saves,
        record=partial(rank_link.record, attempt),
        waiting=rank_link.progress.waiting,
        known=history.last_step,
        known_here=used_before(run, "checkpoint.dir", section.dir),
        local_ranks=ranks.world.local_size,
    )
    if config.adapter.rank is not None:
        context = beside_a_base(context)
    memory = None
    if section.in_memory and not keeps_no_steps(
        os.environ
    ):  # unless the supervisor decided against it
        memory = StepMemory(open_slots(os.environ), ranks.votes)
    return CheckpointEngine(
        context,
        model,
        optimizer,
        keep=Keep.of(section),
        background=section.async_save,
        durations=history.durations,
        memory=memory,
        begin=partial(_begin, model, config.train.seed),
    )


def _begin(model: nn.Module, seed: int) -> None:
    """Give what trains its first values, as they were when the run began."""
    assert isinstance(model, Transformer)  # only that can have an adapter
    initialise(model, seed)


def _build_model(
    config: Config, corpus: Corpus, ranks: Ranks, rank_link: RankLink, choice: Choice
) -> nn.Module:
    """Build the model, ready to train. Raises `UsageError` if a user's function returns no
    model."""
    vocab_size = vocabulary(config, corpus.index)
    if config.model.factory is None:
        transformer = build_model(config, vocab_size, ranks.device, ranks.mesh, choice)
        ends = config.data.document_mask and corpus.index.kind == "text"  # chats have flags
        transformer.document_end = corpus.index.eot if ends else None
        if config.train.compile:
            compile_blocks(transformer)
        model: nn.Module = transformer
    else:
        model = create(config, vocab_size)
        with rank_link.progress.waiting("the others' initial weights"):
            fact = f"what model.factory={config.model.factory} made (the digest of its weights)"
            ranks.agree_on({fact: weights_digest(model)})
        model = place(model, config, vocab_size, ranks.device, ranks.mesh, choice)
    if ranks.device.type == "cpu" and ranks.world.size > 1:
        time_collectives(model, rank_link.progress.waiting)
    return model


def _flops_per_token(config: Config, vocab_size: int, model: nn.Module) -> float:
    """As `flops_per_token`; for a user's own model, 6 for each parameter."""
    if config.model.factory is None:
        shape, adapter = Shape.of(config.model, vocab_size), Adapter.of(config.adapter)
        trained = None if adapter is None else adapter.elements(shape)
        return flops_per_token(shape, config.train.seq_len, trained, config.preferences.on)
    return 6.0 * sum(parameter.numel() for parameter in model.parameters())


def _what_steps_depend_on(
    config: Config, corpus: Corpus, held_out: Mapping[str, Corpus]
) -> dict[str, object]:
    """The inputs that each rank reads by itself, to compare: a file may change while ranks
    start."""
    facts: dict[str, object] = {
        "the configuration (its digest)": digest(config),
        "data.dataset_path (its fingerprint)": fingerprint(corpus.index, config.train.seq_len),
    }
    for one in config.eval.due:
        index = held_out[one.name].index
        facts[f"{one.key} (its fingerprint)"] = fingerprint(index, config.train.seq_len)
    return facts


def _resume(
    config: Config,
    ranks: Ranks,
    checkpoints: CheckpointEngine,
    record: EventRecorder,
    history: RunHistory,
) -> TrainState:
    """Load the newest checkpoint; returns its train state with all rollbacks of the run. A
    checkpoint has only those before it, and after a rollback an older one may be loaded."""
    train_state = checkpoints.restore(config.checkpoint.accept_changes)
    if train_state is None:
        record(StartedAnew())
        return TrainState()
    agreed = ranks.broadcast(remembered(history))
    assert isinstance(agreed, tuple)  # read by rank 0
    later = [rollback for rollback in agreed if rollback not in train_state.rollbacks]
    return dataclasses.replace(train_state, rollbacks=(*train_state.rollbacks, *later))


def _identity(config: Config, corpus: Corpus, vocab_size: int, ranks: Ranks) -> Identity:
    adapter = Adapter.of(config.adapter)
    return Identity(
        world=ranks.world.size,
        mesh=ranks.degrees.dimensions(),
        seed=config.train.seed,
        data_fingerprint=fingerprint(corpus.index, config.train.seq_len),
        model=model_record(config.model, vocab_size),
        optimizer=config.optimizer.name,
        adapter=None if adapter is None else adapter.fixed(),
        origin=Origin(
            config_hash=digest(config),
            host={
                **host_facts(ranks.device),
                "dtype": config.train.dtype,
                **({"same_on_any_world": True} if config.train.same_on_any_world else {}),
            },
            versions=versions(),
        ),
    )


def host_facts(device: torch.device) -> dict[str, object]:
    """Facts about this host that affect the last bits of a result."""
    return {"device": _device_name(device), "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    return {
        "kempner": kempner.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _snapshot_config(config: Config, run: RunDirectory, attempt: Attempt) -> None:
    """Store the configuration with the run, or a changed one with its attempt."""
    content = dumps(config).encode()
    if not run.config.exists():
        replace_durable(run.config, content, unique=attempt.nonce)
    elif run.config.read_bytes() != content:
        replace_durable(run.changed_config(attempt.number), content, unique=attempt.nonce)


def _open_feed(
    config: Config, corpus: Corpus, ranks: Ranks, choice: Choice, train_state: TrainState
) -> Feed:
    turns = choice.turns(ranks.degrees.shard)
    return Feed(
        corpus,
        _slicing(config, ranks.data_rank, ranks.degrees.data_world, train_state, turns),
        seq_len=config.train.seq_len,
        seed=config.train.seed,
        cursor=train_state.cursor,
        workers=config.data.num_dataloader_workers,
        shards_open=config.data.num_shards_per_rank,
        pin_memory=ranks.device.type == "cuda",
    )


def _slicing(
    config: Config, rank: int, world: int, train_state: TrainState, turns: int = 1
) -> Slicing:
    return Slicing(
        config.train.global_batch_size,
        config.train.micro_batch_size,
        rank,
        world,
        skips=tuple((rollback.start, rollback.end) for rollback in train_state.rollbacks),
        whole_slots=bool(config.train.same_on_any_world),
        turns=turns,
    )


def _open_tokens(run: RunDirectory, key: str, folder: str) -> Corpus:
    """Open a folder of tokens. Raises `DataError` with the key that names it."""
    try:
        return Corpus.open(folder, worked=used_before(run, key, folder))
    except DataError as error:
        raise DataError(f"{key}={folder}: {error}") from error


def read_history(run: RunDirectory, attempt: Attempt) -> RunHistory:
    """The part of the ledger that a rank needs; raises as `StorageWaits.retry`. Later attempts know
    that a ledger exists, and wait for a while if it is missing."""

    def read() -> RunHistory:
        there = run.ledger.is_file() and run.ledger.stat().st_size
        if attempt.number > 1 and not there:
            raise empty(run.ledger)
        return RunHistory.to_resume(run.ledger)

    try:
        return storage_waits().retry(read, worked=True, path=run.ledger)
    except OSError:  # never written, as on a full disk
        return RunHistory()


def _open_data(config: Config, rank_link: RankLink, ranks: Ranks) -> tuple[Corpus, Evaluation]:
    corpus = _open_tokens(rank_link.run, "data.dataset_path", config.data.dataset_path)
    check_tensor_degree(config, vocabulary(config, corpus.index))
    check_samples(config, corpus.index)
    held_out: dict[str, Corpus] = {}
    for one in config.eval.due:
        held_out[one.name] = _open_tokens(rank_link.run, one.key, one.folder)
        check_held_out(config, corpus.index, one, held_out[one.name].index)
    with rank_link.progress.waiting("what the others have read"):
        ranks.agree_on(_what_steps_depend_on(config, corpus, held_out))
    return corpus, Evaluation(config, held_out)


def _open_telemetry(
    config: Config,
    rank_link: RankLink,
    ranks: Ranks,
    attempt: Attempt,
    flops: float,
    train_state: TrainState,
    history: RunHistory,
) -> StepMetrics:
    run = rank_link.run
    display = open_display(ranks.world.rank, train_state.step, config.train.max_steps)
    if train_state.step > 0:
        commits, now = history.entries(CheckpointCommitted), config.model_dump(exclude_none=True)
        changes = changes_since(run, commits[-1].attempt, now) if commits else []
        words = describe_changes(changes)
        display.say(f"resumed at step {train_state.step}, sample {train_state.cursor}{words}")
    step_metrics = StepMetrics(
        config,
        run,
        attempt=attempt.number,
        rank=ranks.world.rank,
        log_samples=config.train.log_samples and ranks.degrees.tensor_rank(ranks.world.rank) == 0,
        flops_per_second_at_peak=peak_flops(ranks.device, ranks.world.size),
        flops_per_token=flops,
        display=display,
        take_held_up=rank_link.progress.take_held_up,
    )
    step_metrics.start(train_state)
    return step_metrics
