"""The trigram that the demo has to beat is a probability, the right one, on the right tokens."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kempner.config.sections import Config, EvalSection, TrainSection
from kempner.data.files.token_file import Corpus
from kempner.data.prepare.pipeline import prepare
from kempner.data.serve.loader import IGNORE, eval_batches

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "demo"))
import yardstick

VOCAB = 30


def stream(length: int = 1500) -> NDArray[np.int64]:
    """Tokens of which some are rare and some follow each other; the last id never occurs."""
    random = np.random.default_rng(4)
    common_to_rare = 1 / np.arange(1, VOCAB)
    draws = random.choice(VOCAB - 1, length, p=common_to_rare / common_to_rare.sum())
    follows = random.random(length) < 0.3
    return np.where(follows, (np.roll(draws, 1) + 1) % (VOCAB - 1), draws).astype(np.int64)


def by_the_book(tokens: list[int], a: int, b: int, c: int) -> float:
    """Modified Kneser-Ney, from Chen and Goodman's formulas, with dictionaries."""
    trigrams = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))
    bigrams = Counter((y, z) for _, y, z in trigrams)
    unigrams = Counter(z for _, z in bigrams)
    p1 = (unigrams[c] + 1) / (sum(unigrams.values()) + VOCAB)
    p2 = mixed({z: n for (y, z), n in bigrams.items() if y == b}, bigrams, c, p1)
    here = {z: n for (x, y, z), n in trigrams.items() if (x, y) == (a, b)}
    return mixed(here, trigrams, c, p2)


def mixed(here: dict[int, int], level: Counter, token: int, shorter: float) -> float:
    if not here:
        return shorter
    n = {k: sum(count == k for count in level.values()) for k in (1, 2, 3, 4)}
    y = n[1] / (n[1] + 2 * n[2])
    discount = {k: k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3)}
    assert all(y - 1e-12 <= discount[k] <= k for k in discount), "an ordinary corpus"
    total = sum(here.values())
    freed = sum(discount[min(count, 3)] for count in here.values())
    left = here[token] - discount[min(here[token], 3)] if token in here else 0.0
    return (left + freed * shorter) / total


def test_probabilities_are_those_of_the_formula() -> None:
    tokens = stream()
    model = yardstick.fit(tokens, VOCAB)
    seen = list(zip(tokens, tokens[1:], tokens[2:], strict=False))[:20]
    unseen = [(29, 1, 2), (1, 29, 29), (28, 27, 26), (0, 0, 29), (0, 1, 28)]
    for a, b, c in [*seen, *unseen]:
        code = np.array([(a * VOCAB + b) * VOCAB + c])
        expected = by_the_book(tokens.tolist(), a, b, c)
        assert model.probability(code)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("length", [3, 20, 1500])
def test_probabilities_of_every_context_add_up_to_one(length: int) -> None:
    model = yardstick.fit(stream(length), VOCAB)
    every = model.probability(np.arange(VOCAB**3)).reshape(-1, VOCAB)
    assert every.min() > 0
    np.testing.assert_allclose(every.sum(-1), 1.0, rtol=1e-9)


@pytest.fixture
def tokens(tmp_path: Path) -> Corpus:
    """A prepared text of 1,001 tokens, end of document included."""
    text = tmp_path / "text.txt"
    text.write_text(("one two three four " * 60)[:1000])
    prepare(tmp_path / "tokens", [text])
    return Corpus.open(tmp_path / "tokens")


@pytest.mark.parametrize("max_batches", [2, 100])
def test_predicts_what_an_evaluation_predicts(tokens: Corpus, max_batches: int) -> None:
    config = Config(
        train=TrainSection(seq_len=48, global_batch_size=3),
        eval=EvalSection(max_batches=max_batches),
    )
    batches = eval_batches(
        tokens, seq_len=48, global_batch_size=3, micro_batch_size=2, max_batches=max_batches
    )
    targets = [m.targets[m.targets != IGNORE].tolist() for batch in batches for m in batch]
    predicted = [token for micro_batch in targets for token in micro_batch]
    count = yardstick.evaluated_tokens(tokens, config)
    codes = yardstick.ngrams(yardstick.stream(tokens, count + 1, eot=256), 257, 3)
    assert (codes % 257).tolist() == predicted


def test_loss_is_the_mean_surprise_in_nats(tokens: Corpus) -> None:
    loss = yardstick.held_out_loss(tokens, tokens, None)
    model = yardstick.fit(yardstick.stream(tokens, 1001, eot=256), 257)
    codes = yardstick.ngrams(yardstick.stream(tokens, 1001, eot=256), 257, 3)
    assert len(codes) == 1000
    surprise = [-math.log(p) for p in model.probability(codes)]
    assert loss == pytest.approx(sum(surprise) / 1000)
    assert loss < 0.5
