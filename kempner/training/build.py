"""Builds everything that the step loop of a rank needs, and loads the checkpoint."""

from __future__ import annotations

import dataclasses
import gc
import os
import platform
from functools import partial
from pathlib import Path

import torch
from torch import nn

import kempner
from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity, Origin, TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.slots.memory import open_slots
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.tensors.step_slots import StepMemory
from kempner.config.loading import digest, dumps
from kempner.config.sections import CheckpointSection, Config
from kempner.data.files.index import check_held_out, fingerprint, vocabulary
from kempner.data.files.token_file import Corpus
from kempner.data.order.batch_slices import Slicing
from kempner.data.serve.loader import Feed
from kempner.model.compilation import compile_blocks
from kempner.model.factory import create, place
from kempner.model.factory import digest as weights_digest
from kempner.model.sharding import build_model
from kempner.model.spec.communication import Choice
from kempner.model.spec.mesh import check_tensor_degree
from kempner.model.spec.shape import Shape, flops_per_token, model_record
from kempner.run.control.launch_env import keeps_no_steps
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import empty, storage_waits
from kempner.run.record.attempts import Attempt, Fence
from kempner.run.record.events import CheckpointCommitted, FaultsPlanned, StartedAnew
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import EventRecorder
from kempner.run.record.recorded_config import changes_since, describe_changes, used_before
from kempner.run.record.run_dir import RunDirectory
from kempner.training.compute.forward_backward import choose_communication
from kempner.training.compute.optimizer import build_optimizer
from kempner.training.fault_injection import FaultInjector
from kempner.training.groups.process_groups import Ranks
from kempner.training.loop import Data, LoopState, Tools, Training
from kempner.training.observe.evaluation import Evaluation
from kempner.training.observe.metrics import StepMetrics, peak_flops
from kempner.training.observe.profiler import Profiler
from kempner.training.observe.progress_bar import open_display
from kempner.training.policy.anomalies import Health, remembered
from kempner.training.rank_link.rank_link import RankLink
from kempner.training.rank_link.shutdown import StopListener


def build(
    config: Config,
    rank_link: RankLink,
    ranks: Ranks,
    attempt: Attempt,
    shutdown: StopListener,
    faults: FaultInjector,
) -> Training:
    """Everything the loop needs, with the state of the newest checkpoint."""
    run = rank_link.run
    corpus = _open_tokens(run, "data", config.data.dataset_path)
    vocab_size = vocabulary(config, corpus.index)
    check_tensor_degree(config, vocab_size)
    evaluation = _open_evaluation(config, run, corpus)
    with rank_link.progress.waiting("what the others have read"):
        ranks.agree_on(_what_steps_depend_on(config, corpus, evaluation.corpus))
    choice = choose_communication(config, vocab_size, ranks)
    model = _build_model(config, corpus, ranks, rank_link, choice)
    if ranks.device.type == "cpu" and ranks.world.size > 1:
        from kempner.training.groups.collective_timer import time_collectives  # imports FSDP

        time_collectives(model, rank_link.progress.waiting)
    optimizer = build_optimizer(model, config.optimizer)
    _collect_garbage_again()
    flops = _flops_per_token(config, vocab_size, model)
    record = partial(rank_link.record, attempt)
    history = read_history(run, attempt) if ranks.world.rank == 0 else RunHistory()
    section = config.checkpoint
    checkpoints = CheckpointEngine(
        CheckpointContext(
            path=Path(section.dir) if section.dir else run.checkpoints,
            identity=_identity(config, corpus, vocab_size, ranks),
            fence=Fence(run.attempts, attempt),
            group=ranks.saves,
            record=record,
            waiting=rank_link.progress.waiting,
            known=_known_checkpoint(config, run, history),
            local_ranks=ranks.world.local_size,
        ),
        model,
        optimizer,
        keep=Keep(section.keep_last, section.keep_every),
        background=section.async_save,
        durations=history.durations,
        memory=_step_memory(section, ranks),
    )
    if ranks.world.rank == 0:  # last: what it names was found
        storage_waits().retry(partial(_snapshot_config, config, run, attempt), worked=True)
    if faults.planned:
        record(FaultsPlanned(tuple(faults.planned)))
    train_state = _resume(config, ranks, checkpoints, record, history)
    return Training(
        config=config,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        shutdown=shutdown,
        checkpoints=checkpoints,
        tools=Tools(
            data=Data(partial(_open_feed, config, corpus, ranks), train_state),
            step_metrics=_open_telemetry(config, run, ranks, attempt, flops, train_state, history),
            evaluation=evaluation,
            faults=faults,
            progress=rank_link.progress,
            record=record,
            profiler=_open_profiler(config, run, ranks, attempt),
            communication=choice,
        ),
        state=LoopState(train_state, Health(train_state.losses)),
    )


def _step_memory(section: CheckpointSection, ranks: Ranks) -> StepMemory | None:
    """Where each step is kept; None if it is not to be, or the supervisor has decided against."""
    if not section.in_memory or keeps_no_steps(os.environ):
        return None
    return StepMemory(open_slots(os.environ), ranks.votes)


def _open_profiler(config: Config, run: RunDirectory, ranks: Ranks, attempt: Attempt) -> Profiler:
    gpu = ranks.device.type == "cuda"
    return Profiler(config.profiling, run, attempt.number, ranks.world.rank, gpu)


def _build_model(
    config: Config, corpus: Corpus, ranks: Ranks, rank_link: RankLink, choice: Choice
) -> nn.Module:
    """The model, ready to train. Raises `UsageError` if a user's own function returns no model."""
    vocab_size = vocabulary(config, corpus.index)
    if config.model.factory is None:
        transformer = build_model(config, vocab_size, ranks.device, ranks.mesh, choice)
        transformer.document_end = corpus.index.eot if config.data.document_mask else None
        if config.train.compile:
            compile_blocks(transformer)
        return transformer
    model = create(config, vocab_size)
    with rank_link.progress.waiting("the others' initial weights"):
        fact = f"what model.factory={config.model.factory} made (the digest of its weights)"
        ranks.agree_on({fact: weights_digest(model)})
    return place(model, config, vocab_size, ranks.device, ranks.mesh, choice)


def _flops_per_token(config: Config, vocab_size: int, model: nn.Module) -> float:
    """As `flops_per_token`; of a model of the user's own, 6 for each parameter."""
    if config.model.factory is None:
        return flops_per_token(Shape.of(config.model, vocab_size), config.train.seq_len)
    return 6.0 * sum(parameter.numel() for parameter in model.parameters())


def _what_steps_depend_on(
    config: Config, corpus: Corpus, held_out: Corpus | None
) -> dict[str, object]:
    """What each rank has read for itself: a file may be edited while the ranks start."""
    facts: dict[str, object] = {
        "the configuration (its digest)": digest(config),
        "data.dataset_path (its fingerprint)": fingerprint(corpus.index, config.train.seq_len),
    }
    if held_out is not None:
        held_out_print = fingerprint(held_out.index, config.train.seq_len)
        facts["eval.dataset_path (its fingerprint)"] = held_out_print
    return facts


def _collect_garbage_again() -> None:
    """End the pause that began with the process, once the imports are done.

    What they left stays: no later collection looks through its million objects again.
    """
    gc.freeze()
    gc.enable()


def _resume(
    config: Config,
    ranks: Ranks,
    checkpoints: CheckpointEngine,
    record: EventRecorder,
    history: RunHistory,
) -> TrainState:
    """Load the newest checkpoint; where it stands, with every rollback that is known of.

    A checkpoint knows of those before it only, and after a rollback an older one may be next.
    """
    train_state = checkpoints.restore(config.checkpoint.accept_changes)
    if train_state is None:
        record(StartedAnew())
        return TrainState()
    told = ranks.broadcast(remembered(history))
    assert isinstance(told, tuple)  # rank 0's reading
    later = [rollback for rollback in told if rollback not in train_state.rollbacks]
    return dataclasses.replace(train_state, rollbacks=(*train_state.rollbacks, *later))


def _identity(config: Config, corpus: Corpus, vocab_size: int, ranks: Ranks) -> Identity:
    return Identity(
        world=ranks.world.size,
        mesh=ranks.degrees.dimensions(),
        seed=config.train.seed,
        data_fingerprint=fingerprint(corpus.index, config.train.seq_len),
        model=model_record(config.model, vocab_size),
        optimizer=config.optimizer.name,
        origin=Origin(
            config_hash=digest(config),
            host={**host_facts(ranks.device), "dtype": config.train.dtype},
            versions=versions(),
        ),
    )


def host_facts(device: torch.device) -> dict[str, object]:
    """What of this host the last bits of a result depend on."""
    return {"device": _device_name(device), "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    """The software that a checkpoint is made with."""
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
    """Keep the configuration with the run; a changed one with the attempt that it is for."""
    content = dumps(config).encode()
    if not run.config.exists():
        replace_durable(run.config, content, unique=attempt.nonce)
    elif run.config.read_bytes() != content:
        replace_durable(run.changed_config(attempt.number), content, unique=attempt.nonce)


def _open_feed(config: Config, corpus: Corpus, ranks: Ranks, train_state: TrainState) -> Feed:
    slicing = Slicing(
        config.train.global_batch_size,
        config.train.micro_batch_size,
        ranks.data_rank,
        ranks.degrees.data_world,
        skips=tuple((rollback.start, rollback.end) for rollback in train_state.rollbacks),
    )
    return Feed(
        corpus,
        slicing,
        seq_len=config.train.seq_len,
        seed=config.train.seed,
        cursor=train_state.cursor,
        workers=config.data.num_dataloader_workers,
        shards_open=config.data.num_shards_per_rank,
        pin_memory=ranks.device.type == "cuda",
    )


def _open_tokens(run: RunDirectory, section: str, folder: str) -> Corpus:
    """Raises `DataError` with the key that names the folder."""
    key = "dataset_path"
    try:
        worked = used_before(run, section, key, folder)
        return Corpus.open(folder, worked=worked)
    except DataError as error:
        raise DataError(f"{section}.{key}={folder}: {error}") from error


def read_history(run: RunDirectory, attempt: Attempt) -> RunHistory:
    """What the ledger tells; raises as `StorageWaits.retry` where it cannot be read now.

    Later attempts know that there is one, and wait for a while if they do not see it.
    """

    def read() -> RunHistory:
        there = run.ledger.is_file() and run.ledger.stat().st_size
        if attempt.number > 1 and not there:
            raise empty(run.ledger)
        return RunHistory.read(run.ledger)

    try:
        return storage_waits().retry(read, worked=True, path=run.ledger)
    except OSError:  # it was never written: the disk was full, say
        return RunHistory()


def _known_checkpoint(config: Config, run: RunDirectory, history: RunHistory) -> int | None:
    """The step of the newest checkpoint that must be there; none in a folder that is new."""
    return (
        history.last_step if used_before(run, "checkpoint", "dir", config.checkpoint.dir) else None
    )


def _open_evaluation(config: Config, run: RunDirectory, corpus: Corpus) -> Evaluation:
    if config.eval.dataset_path is None or config.eval.interval is None:
        return Evaluation(config, None)
    held_out = _open_tokens(run, "eval", config.eval.dataset_path)
    check_held_out(config, corpus.index, held_out.index)
    return Evaluation(config, held_out)


def _changes(config: Config, run: RunDirectory, history: RunHistory) -> list[str]:
    """What is configured otherwise than when the last checkpoint was committed."""
    commits = history.entries(CheckpointCommitted)
    now = config.model_dump(exclude_none=True)
    return changes_since(run, commits[-1].attempt, now) if commits else []


def _open_telemetry(
    config: Config,
    run: RunDirectory,
    ranks: Ranks,
    attempt: Attempt,
    flops: float,
    train_state: TrainState,
    history: RunHistory,
) -> StepMetrics:
    display = open_display(ranks.world.rank, train_state.step, config.train.max_steps)
    if train_state.step > 0:
        changes = describe_changes(_changes(config, run, history))
        display.say(f"resumed at step {train_state.step}, sample {train_state.cursor}{changes}")
    step_metrics = StepMetrics(
        config,
        run,
        attempt=attempt.number,
        rank=ranks.world.rank,
        log_samples=config.train.log_samples and ranks.degrees.tensor_rank(ranks.world.rank) == 0,
        flops_per_second_at_peak=peak_flops(ranks.device, ranks.world.size),
        flops_per_token=flops,
        display=display,
    )
    step_metrics.start(train_state)
    return step_metrics
