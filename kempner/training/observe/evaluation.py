"""Evaluation: loss on held-out data, without any effect on training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from kempner.config.sections import Config
from kempner.data.files.token_file import Corpus
from kempner.data.serve.loader import IGNORE, MicroBatch, eval_batches
from kempner.training.compute.forward_backward import sum_over_ranks, summed_loss
from kempner.training.groups.process_groups import Ranks
from kempner.training.vote.vote import Vote, VoteGroup, VoteResult


@dataclass(frozen=True)
class EvaluationResult:
    """Mean loss in nats per token, or None if a stop cut it short; and the last agreed."""

    loss: float | None
    agreed: VoteResult


@dataclass(frozen=True)
class Evaluation:
    """When to evaluate, and on what."""

    config: Config
    corpus: Corpus | None

    def due(self, step: int) -> bool:
        """Whether the weights after `step` are to be evaluated."""
        interval = self.config.eval.interval
        if interval is None or step == 0:
            return False
        return step % interval == 0 or step == self.config.train.max_steps

    def run(
        self, model: nn.Module, ranks: Ranks, vote_group: VoteGroup, vote: Callable[[], Vote]
    ) -> EvaluationResult:
        """Evaluate, with a vote per batch: a stop does not wait for the end."""
        assert self.corpus is not None  # due() is false without held-out data
        sums = torch.zeros(2, dtype=torch.float64)
        agreed = VoteResult()
        model.eval()
        with torch.no_grad():
            for micro_batches in eval_batches(
                self.corpus,
                seq_len=self.config.train.seq_len,
                global_batch_size=self.config.train.global_batch_size,
                micro_batch_size=self.config.train.micro_batch_size,
                rank=ranks.data_rank,
                world=ranks.degrees.data_world,
                max_batches=self.config.eval.max_batches,
            ):
                ballot = vote_group.open(vote())
                _add_losses(sums, model, micro_batches, ranks.device)
                agreed = ballot.close()
                if agreed.stop:
                    break
        model.train()
        if agreed.stop:
            return EvaluationResult(None, agreed)
        total, tokens = sum_over_ranks(sums.to(ranks.device)).tolist()
        return EvaluationResult(total / tokens, agreed)


def evaluate_alone(
    model: nn.Module,
    corpus: Corpus,
    device: torch.device,
    *,
    seq_len: int,
    global_batch_size: int,
    micro_batch_size: int,
    max_batches: int,
) -> tuple[float, int]:
    """The loss, in nats per token, that a run has on held-out data, by this process alone; and of
    how many tokens it is the mean. Raises `DataError` as `eval_batches`."""
    sums = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for micro_batches in eval_batches(
            corpus,
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            max_batches=max_batches,
        ):
            _add_losses(sums, model, micro_batches, device)
    total, tokens = sums.tolist()
    return total / tokens, int(tokens)


def _add_losses(
    sums: torch.Tensor, model: nn.Module, micro_batches: list[MicroBatch], device: torch.device
) -> None:
    """Add the summed loss and the number of tokens to `sums` [2]."""
    for micro_batch in micro_batches:
        sums[0] += summed_loss(model, micro_batch, device).item()
        sums[1] += (micro_batch.targets != IGNORE).sum()
