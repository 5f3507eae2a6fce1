"""Loss on held-out data, without any effect on training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from kempner.config.sections import Config
from kempner.data.files.token_bytes import token_bytes
from kempner.data.files.token_file import Corpus
from kempner.data.serve.loader import IGNORE, MicroBatch, eval_batches
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import DataError
from kempner.training.compute.forward_backward import sum_over_ranks, summed_loss
from kempner.training.compute.preferences import count_pairs, summed_over_pairs
from kempner.training.groups.process_groups import Ranks
from kempner.training.observe.metrics import Scores
from kempner.training.vote import Vote, VoteGroup, VoteResult


@dataclass(frozen=True)
class EvaluationResult:
    """The scores of each set by name, None if a stop interrupted the evaluation; the last vote."""

    scores: Mapping[str, Scores] | None
    agreed: VoteResult


@dataclass(frozen=True)
class Evaluation:
    """When to evaluate, and on which sets, by name."""

    config: Config
    held_out: Mapping[str, Corpus]

    @cached_property
    def sizes(self) -> Tensor | None:
        """The `token_sizes` of all sets, which share a tokenizer."""
        return token_sizes(next(iter(self.held_out.values())).directory)

    def run(
        self, model: nn.Module, ranks: Ranks, vote_group: VoteGroup, vote: Callable[[], Vote]
    ) -> EvaluationResult:
        """Evaluate, with a vote per batch, so that a stop does not wait for the end."""
        sums = {name: torch.zeros(3, dtype=torch.float64) for name in self.held_out}
        agreed = VoteResult()
        model.eval()
        with torch.no_grad():
            for name, corpus in self.held_out.items():
                agreed = self._add_set(sums[name], corpus, model, ranks, vote_group, vote)
                if agreed.stop:
                    break
        model.train()
        if agreed.stop:
            return EvaluationResult(None, agreed)
        together = sum_over_ranks(torch.stack(list(sums.values())).to(ranks.device)).tolist()
        of = _scores_of_pairs if self.config.preferences.on else _scores
        scores = {name: of(*row) for name, row in zip(sums, together, strict=True)}
        return EvaluationResult(scores, agreed)

    def _add_set(
        self,
        sums: Tensor,
        corpus: Corpus,
        model: nn.Module,
        ranks: Ranks,
        vote_group: VoteGroup,
        vote: Callable[[], Vote],
    ) -> VoteResult:
        agreed = VoteResult()
        for micro_batches in eval_batches(
            corpus,
            seq_len=self.config.train.seq_len,
            global_batch_size=self.config.train.global_batch_size,
            micro_batch_size=self.config.train.micro_batch_size,
            rank=ranks.data_rank,
            world=ranks.degrees.data_world,
            whole_slots=bool(self.config.train.same_on_any_world),
            max_batches=self.config.eval.max_batches,
        ):
            ballot = vote_group.open(vote())
            if (beta := self.config.preferences.beta) is None:
                _add_losses(sums, model, micro_batches, ranks.device, self.sizes)
            else:
                _add_pairs(sums, model, micro_batches, ranks.device, beta)
            agreed = ballot.close()
            if agreed.stop:
                break
        return agreed


def evaluate_alone(
    model: nn.Module,
    corpus: Corpus,
    device: torch.device,
    *,
    seq_len: int,
    global_batch_size: int,
    micro_batch_size: int,
    max_batches: int,
    beta: float | None = None,
) -> tuple[Scores, int]:
    """Evaluate in this process alone; returns the scores and the number of tokens, with `beta` of
    pairs, that they are means over. Raises `DataError` as `eval_batches`."""
    sums = torch.zeros(3, dtype=torch.float64)
    sizes = token_sizes(corpus.directory) if beta is None else None
    model.eval()
    with torch.no_grad():
        for micro_batches in eval_batches(
            corpus,
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            max_batches=max_batches,
        ):
            if beta is None:
                _add_losses(sums, model, micro_batches, device, sizes)
            else:
                _add_pairs(sums, model, micro_batches, device, beta)
    of = _scores if beta is None else _scores_of_pairs
    return of(*sums.tolist()), int(sums[1])


def token_sizes(folder: Path) -> Tensor | None:
    """The number of bytes of text per token id, int64 [vocab_size]; None if unknown."""
    try:
        found = token_bytes(folder)
    except DataError as error:
        logger().warning(f"bits per byte are left out: {error}")
        return None
    return None if found is None else torch.from_numpy(np.asarray(found, np.int64))


def _add_losses(
    sums: Tensor,
    model: nn.Module,
    micro_batches: list[MicroBatch],
    device: torch.device,
    sizes: Tensor | None,
) -> None:
    """Add summed loss, number of tokens, and number of bytes (NaN if unknown) to `sums` [3]."""
    for micro_batch in micro_batches:
        sums[0] += summed_loss(model, micro_batch, device).item()
        learned = micro_batch.targets != IGNORE
        sums[1] += learned.sum()
        sums[2] += math.nan if sizes is None else sizes[micro_batch.targets[learned]].sum()


def _add_pairs(
    sums: Tensor,
    model: nn.Module,
    micro_batches: list[MicroBatch],
    device: torch.device,
    beta: float,
) -> None:
    """Add summed loss, number of pairs, and number of those that are preferred rightly, [3]."""
    for micro_batch in micro_batches:
        assert micro_batch.documents is not None  # those of preferences
        loss, _, right = summed_over_pairs(model, micro_batch, device, beta).tolist()
        sums += torch.tensor([loss, count_pairs(micro_batch.documents).sum().item(), right])


def _scores_of_pairs(loss: float, pairs: float, right: float) -> Scores:
    return Scores(loss / pairs if pairs else math.nan, accuracy=right / pairs if pairs else None)


def _scores(loss: float, tokens: float, size: float) -> Scores:
    """The scores from sums over all ranks; `size` in bytes, NaN if some rank lacks it."""
    mean = loss / tokens if tokens else math.nan  # chats may be cut before their first answer
    return Scores(mean, loss / size / math.log(2) if size > 0 else None)
