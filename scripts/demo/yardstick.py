"""How well a trigram model predicts the demo's held-out text: what a network has to beat.

    python scripts/demo/yardstick.py data/demo/train data/demo/held_out --config CONFIG

Both folders are as `kempner prepare` wrote them. The trigram is fitted on the same tokens that the
network trains on, with interpolated modified Kneser-Ney smoothing, the strongest of the usual
ones (Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", 1998),
and is scored on the tokens that an evaluation of CONFIG predicts. Unlike the network, it sees the
two tokens before each of them even where a sample begins.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kempner.config.loading import load
from kempner.config.sections import Config
from kempner.data.files.token_file import Corpus

Codes = NDArray[np.int64]
"""n-grams as numbers: of tokens a, b, c over V the number (a V + b) V + c."""
Floats = NDArray[np.float64]

MOST_TOKEN_IDS = 1024
"""Sums over contexts are arrays of V * V."""


class Model(Protocol):
    """Probabilities of the last token of n-grams, given the tokens before it."""

    def probability(self, codes: Codes) -> Floats: ...


@dataclass(frozen=True)
class AddOne:
    """Counts of single tokens, each one higher than it is."""

    counts: NDArray[np.int64]

    def probability(self, codes: Codes) -> Floats:
        smoothed: Floats = (self.counts[codes] + 1) / (self.counts.sum() + len(self.counts))
        return smoothed


@dataclass(frozen=True)
class KneserNey:
    """n-grams that were seen, less a discount that the next shorter ones share.

    Args:
        vocab_size: V.
        seen: the n-grams, ascending.
        counts: how often each of them was seen, less its discount.
        totals: per context, how often it was seen at all; [V ** (n - 1)].
        freed: per context, the sum of the discounts; [V ** (n - 1)].
        shorter: the model of the (n - 1)-grams.
    """

    vocab_size: int
    seen: Codes
    counts: Floats
    totals: Floats
    freed: Floats
    shorter: Model

    def probability(self, codes: Codes) -> Floats:
        contexts = codes // self.vocab_size
        shorter = self.shorter.probability(codes % len(self.totals))
        places = np.searchsorted(self.seen, codes).clip(max=len(self.seen) - 1)
        counts = np.where(self.seen[places] == codes, self.counts[places], 0.0)
        totals = self.totals[contexts]
        mixed = (counts + self.freed[contexts] * shorter) / np.maximum(totals, 1.0)
        return np.where(totals > 0, mixed, shorter)


def fit(tokens: Codes, vocab_size: int, n: int = 3) -> Model:
    """An n-gram model of a token stream [k]."""
    seen, counts = np.unique(ngrams(tokens, vocab_size, n), return_counts=True)
    return smooth(seen, counts, vocab_size, n)


def smooth(seen: Codes, counts: NDArray[np.int64], vocab_size: int, n: int) -> Model:
    """The model of n-grams with these counts.

    A shorter n-gram counts once per token that it was seen after, not per occurrence.
    """
    if n == 1:
        return AddOne(np.bincount(seen, counts, vocab_size).astype(np.int64))
    places = vocab_size ** (n - 1)
    discounts = discounts_by_count(counts)[np.minimum(counts, 3)]
    contexts = seen // vocab_size
    return KneserNey(
        vocab_size,
        seen,
        counts - discounts,
        sums(contexts, counts, places),
        sums(contexts, discounts, places),
        smooth(*np.unique(seen % places, return_counts=True), vocab_size, n - 1),
    )


def sums(contexts: Codes, values: NDArray[Any], places: int) -> Floats:
    """The sum of the values of each context, [places]."""
    return np.bincount(contexts, values, places).astype(np.float64)


def discounts_by_count(counts: NDArray[np.int64]) -> Floats:
    """What is taken off a count of 0, 1, 2 and of 3 or more (Chen and Goodman, equation 26)."""
    n1, n2, n3, n4 = (max(1, int((counts == k).sum())) for k in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    two, more = 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
    # Bounds for tiny corpora: a discount of 0 would leave nothing for what was never seen.
    return np.array([0.0, y, min(max(two, y), 2.0), min(max(more, y), 3.0)])


def ngrams(tokens: Codes, vocab_size: int, n: int) -> Codes:
    """The n-grams of a stream [k], in its order; [k - n + 1]."""
    codes = np.zeros(len(tokens) - n + 1, np.int64)
    for place in range(n):
        codes = codes * vocab_size + tokens[place : place + len(codes)]
    return codes


def held_out_loss(train: Corpus, held_out: Corpus, config: Config | None) -> float:
    """The trigram's loss in nats per token on what an evaluation of `config` predicts.

    Without a configuration, on all held-out tokens but the first. Both streams are taken to follow
    the end of a document.
    """
    vocab_size, eot = train.index.vocab_size, train.index.eot
    model = fit(stream(train, train.index.tokens, eot), vocab_size)
    length = held_out.index.tokens if config is None else evaluated_tokens(held_out, config) + 1
    codes = ngrams(stream(held_out, length, eot), vocab_size, 3)
    return float(-np.log(model.probability(codes)).mean())


def evaluated_tokens(held_out: Corpus, config: Config) -> int:
    """How many tokens an evaluation predicts: the stream's, from the second one on."""
    most = config.eval.max_batches * config.train.global_batch_size
    seq_len = config.train.seq_len
    return min(held_out.samples(seq_len), most) * seq_len


def stream(corpus: Corpus, length: int, eot: int) -> NDArray[Any]:
    """The end of a document, and the first `length` tokens."""
    return np.concatenate(([eot], corpus.read(0, length))).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("train", type=Path, help="prepared tokens to fit on")
    parser.add_argument("held_out", type=Path, help="prepared tokens to predict")
    parser.add_argument("--config", type=Path, help="predict what its evaluation predicts")
    given = parser.parse_args()
    train, held_out = Corpus.open(given.train), Corpus.open(given.held_out)
    if train.index.vocab_size > MOST_TOKEN_IDS:
        parser.error(f"{given.train} has {train.index.vocab_size} token ids; made for bytes")
    loss = held_out_loss(train, held_out, load(given.config) if given.config else None)
    print(f"trigram held-out loss: {loss:.4f} nats per token")


if __name__ == "__main__":
    main()
