"""Loss on held-out data. Draws no random number and leaves no trace in the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kempner.config.sections import Config
from kempner.data.loader import IGNORE, eval_batches
from kempner.data.tokens import Corpus
from kempner.model.transformer import Transformer
from kempner.training.council import Council, Wish
from kempner.training.distributed import Ranks
from kempner.training.step import sum_over_ranks, summed_loss


@dataclass(frozen=True)
class Evaluated:
    """Mean loss in nats per token, or None if a stop cut it short; and the last verdict."""

    loss: float | None
    verdict: Wish


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
        self, model: Transformer, ranks: Ranks, council: Council, wish: Callable[[], Wish]
    ) -> Evaluated:
        """Evaluate, with a vote per batch: a stop does not wait for the end."""
        assert self.corpus is not None  # due() is false without held-out data
        sums = torch.zeros(2, dtype=torch.float64)
        verdict = Wish()
        model.eval()
        with torch.no_grad():
            for micro_batches in eval_batches(
                self.corpus,
                seq_len=self.config.train.seq_len,
                global_batch_size=self.config.train.global_batch_size,
                micro_batch_size=self.config.train.micro_batch_size,
                rank=ranks.world.rank,
                world=ranks.world.size,
                max_batches=self.config.eval.max_batches,
            ):
                ballot = council.open(wish())
                for micro_batch in micro_batches:
                    sums[0] += summed_loss(model, micro_batch, ranks.device).item()
                    sums[1] += (micro_batch.targets != IGNORE).sum()
                verdict = ballot.close()
                if verdict.stop:
                    break
        model.train()
        if verdict.stop:
            return Evaluated(None, verdict)
        total, tokens = sum_over_ranks(sums.to(ranks.device)).tolist()
        return Evaluated(total / tokens, verdict)
