"""The real loop in this process: what is dropped, which samples come, what an evaluation does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import write_tokens
from saved import open_manager

from kempner.checkpoint.format.manifest import TrainState
from kempner.cluster.world import World
from kempner.config.resilience import ResilienceSection, parse_faults
from kempner.config.sections import (
    CheckpointSection,
    Config,
    EvalSection,
    ModelSection,
    OptimizerSection,
    TrainSection,
)
from kempner.config.site import DistributedSection
from kempner.data.files.token_file import Corpus
from kempner.model.sharding import build_model
from kempner.model.spec.communication import EACH_MICRO_BATCH
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.transformer import Transformer
from kempner.run.control.heartbeat import Progress
from kempner.run.process.exit_codes import ExitCode, StopReason
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.training.anomalies import Health
from kempner.training.build import _open_feed
from kempner.training.compute.optimizer import build_optimizer
from kempner.training.evaluation import Evaluation
from kempner.training.fault_injection import FaultInjector
from kempner.training.groups.process_groups import Ranks, adopt
from kempner.training.loop import Data, Tools, Training, train
from kempner.training.observe.metrics import StepMetrics
from kempner.training.observe.profiler import Profiler
from kempner.training.observe.progress_bar import Display
from kempner.training.rank_link.shutdown import StopListener
from kempner.training.vote import Vote, VoteGroup

SEQ_LEN, BATCH, VOCAB = 8, 4, 31
CPU = torch.device("cpu")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Of a world of one, which is this process."""
    yield adopt(World(0, 1, 0, 1, "none"), CPU, DistributedSection(timeout=60.0))
    dist.destroy_process_group()


def corpus_of(folder: Path, tokens: Sequence[int]) -> Corpus:
    write_tokens(folder, [tokens], vocab_size=VOCAB)
    return Corpus.open(folder)


def config_for(steps: int, dropout: float) -> Config:
    return Config(
        model=ModelSection(dim=16, n_layers=1, n_heads=2, ffn_dim=24, dropout=dropout),
        train=TrainSection(
            max_steps=steps,
            global_batch_size=BATCH,
            micro_batch_size=2,
            seq_len=SEQ_LEN,
            log_samples=True,
        ),
        optimizer=OptimizerSection(lr=1e-30),  # the weights stay what they are
        checkpoint=CheckpointSection(interval=2),
        resilience=ResilienceSection(rollback_after=3),
        eval=EvalSection(dataset_path="held-out", max_batches=2),
    )


def small_model(config: Config) -> Transformer:
    return build_model(config, VOCAB, CPU, None)


def run_loop(
    folder: Path, corpus: Corpus, config: Config, ranks: Ranks, faults: Sequence[str] = ()
) -> TrainState:
    """Begin at the newest checkpoint of the run in `folder`; where it stands at the end."""
    run, rank = RunDirectory(folder), ranks.world.rank
    run.samples(rank).parent.mkdir(parents=True, exist_ok=True)
    model = small_model(config)
    optimizer = build_optimizer(model, config.optimizer)
    checkpoints = open_manager(run, model, optimizer, ranks.saves)
    state = checkpoints.restore() or TrainState()
    progress = Progress()
    metrics = StepMetrics(
        config,
        run,
        attempt=1,
        rank=rank,
        log_samples=config.train.log_samples,
        flops_per_second_at_peak=None,
        flops_per_token=1.0,
        display=Display(),
        take_held_up=progress.take_held_up,
    )
    training = Training(
        config=config,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        shutdown=StopListener(),
        checkpoints=checkpoints,
        tools=Tools(
            data=Data(partial(_open_feed, config, corpus, ranks, EACH_MICRO_BATCH), state),
            step_metrics=metrics,
            evaluation=Evaluation(config, {}),
            faults=FaultInjector(parse_faults(faults), rank, attempt=1),
            progress=progress,
            profiler=Profiler(config.profiling, run, attempt=1, rank=rank, gpu=False),
            record=lambda event: None,
        ),
        train_state=state,
        health=Health(state.losses),
    )
    assert train(training) is ExitCode.COMPLETED
    training.tools.data.feed.close()
    return training.train_state


def test_each_step_of_each_rank_drops_neurons_of_its_own(tmp_path: Path, ranks: Ranks) -> None:
    """All samples are alike and the weights stand still: only what is dropped can differ."""
    corpus, config = corpus_of(tmp_path / "tokens", [7] * 400), config_for(2, dropout=0.5)
    pair = replace(ranks, degrees=MeshDegrees(shard=2))
    losses = {
        name: run_loop(
            tmp_path / name, corpus, config, replace(pair, world=World(rank, 2, 0, 2, "none"))
        ).losses
        for name, rank in (("first", 0), ("first again", 0), ("second", 1))
    }
    assert losses["first"] == losses["first again"]
    assert len({*losses["first"], *losses["second"]}) == 4


def test_what_a_rollback_left_out_moves_every_later_step(tmp_path: Path, ranks: Ranks) -> None:
    """And those of a resume from a commit that was made after the rollback."""
    corpus = corpus_of(tmp_path / "tokens", [n % VOCAB for n in range(800)])
    folder = tmp_path / "run"
    bad = [f"nan rank 0 at step {step}" for step in (4, 5, 6)]
    ended = run_loop(folder, corpus, config_for(8, dropout=0.0), ranks, bad)
    assert (ended.step, ended.cursor) == (8, 12 * BATCH)  # eight steps, and the four left out
    assert [rollback.to for rollback in ended.rollbacks] == [2]
    run_loop(folder, corpus, config_for(10, dropout=0.0), ranks)
    taken = {line["step"]: line["samples"] for line in read_lines(RunDirectory(folder).samples(0))}
    begins = {step: min(samples) for step, samples in taken.items()}
    assert begins == {1: 0, 2: 4} | {step: BATCH * (step + 3) for step in range(3, 11)}


def test_a_held_out_loss_is_the_mean_over_the_tokens_that_are_there(
    tmp_path: Path, ranks: Ranks
) -> None:
    """Two batches for six samples: of the last one a half is padding. Each of two sets has its own;
    the end of a document is a token, but no text."""
    sets = {
        "": [(7 * n + n // 5) % VOCAB for n in range(6 * SEQ_LEN + 1)],
        "code": [(3 * n) % VOCAB for n in range(5 * SEQ_LEN + 1)],
    }
    config = config_for(1, dropout=0.5)
    found = {name: corpus_of(tmp_path / f"set{name}", tokens) for name, tokens in sets.items()}
    model = small_model(config)
    told = Evaluation(config, found).run(model, ranks, VoteGroup(ranks.votes), Vote)
    assert model.training
    assert told.scores is not None
    for name, tokens in sets.items():
        rows = torch.tensor(tokens[:-1]).view(-1, SEQ_LEN)
        logits, targets = model.eval()(rows).flatten(0, 1), torch.tensor(tokens[1:])
        loss = F.cross_entropy(logits, targets).item()
        text = len(targets) - tokens[1:].count(found[name].index.eot)
        scores = told.scores[name]
        assert scores.loss == pytest.approx(loss)
        assert scores.perplexity == pytest.approx(math.exp(loss))
        bits = loss * len(targets) / text / math.log(2)
        assert scores.bits_per_byte == pytest.approx(bits)


def test_an_evaluation_that_is_cut_short_ends_like_any_other(tmp_path: Path, ranks: Ranks) -> None:
    config = config_for(1, dropout=0.5)
    evaluation = Evaluation(config, {"": corpus_of(tmp_path / "set", [5] * (6 * SEQ_LEN + 1))})
    model = small_model(config)
    stop = partial(Vote, StopReason.SIGNAL)
    told = evaluation.run(model, ranks, VoteGroup(ranks.votes), stop)
    assert (told.scores, told.agreed.stop) == (None, StopReason.SIGNAL)
    assert model.training
