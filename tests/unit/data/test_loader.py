"""What a rank gets follows from the position alone; every sample comes once per epoch."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import scaled

from kempner.data.files.token_file import Corpus
from kempner.data.order.batch_slices import Slicing
from kempner.data.order.shuffle import SampleOrder
from kempner.data.prepare import sources
from kempner.data.prepare.pipeline import prepare
from kempner.data.serve.loader import IGNORE, Feed, StepBatch, eval_batches
from kempner.run.process.exit_codes import DataError

SEQ_LEN = 8
SAMPLES = 23


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """23 samples of eight tokens, no two alike, in four shards."""
    monkeypatch.setattr(sources, "_UNIT", 50)
    text = b"".join(b"sample%02d" % number for number in range(SAMPLES))
    (tmp_path / "a.txt").write_bytes(text)
    prepare(tmp_path / "tokens", [tmp_path / "a.txt"])
    return tmp_path / "tokens"


def feed(
    tokens: Path,
    *,
    rank: int = 0,
    world: int = 1,
    cursor: int = 0,
    batch: int = 8,
    micro: int = 2,
    seed: int = 1,
) -> Feed:
    return Feed(
        tokens,
        Slicing(batch, micro, rank, world),
        seq_len=SEQ_LEN,
        seed=seed,
        cursor=cursor,
        shards_open=2,
    )


def steps(source: Feed, count: int) -> list[StepBatch]:
    with closing(source):
        taken = [source.take() for _ in range(count)]
    assert all(step is not None for step in taken)
    return taken  # type: ignore[return-value]


def texts(step: StepBatch) -> list[bytes]:
    """The inputs of a step's rows that are no padding."""
    return [
        bytes(inputs.tolist())
        for micro in step.micro
        for inputs, targets in zip(micro.inputs, micro.targets, strict=True)
        if IGNORE not in targets
    ]


def name(sample: int) -> bytes:
    return b"sample%02d" % sample


def test_a_step_holds_the_samples_that_the_order_names(tokens: Path) -> None:
    order = SampleOrder(SAMPLES, 1)
    for number, step in enumerate(steps(feed(tokens), 5)):
        assert step.positions == list(range(8 * number, 8 * number + 8))
        assert step.cursor_after == 8 * number + 8
        assert texts(step) == [name(order.locate(position)[1]) for position in step.positions]
        for micro in step.micro:
            assert micro.inputs.shape == micro.targets.shape == (2, SEQ_LEN)
            assert micro.inputs.dtype == micro.targets.dtype == torch.int64
            assert torch.equal(micro.inputs[:, 1:], micro.targets[:, :-1])


def test_targets_are_one_token_later_across_samples(tokens: Path) -> None:
    whole = Corpus.open(tokens).read(0, SAMPLES * SEQ_LEN + 1).tolist()
    order = SampleOrder(SAMPLES, 1)
    (step,) = steps(feed(tokens), 1)
    last = torch.cat([micro.targets for micro in step.micro])[:, -1].tolist()
    assert last == [whole[(order.locate(i)[1] + 1) * SEQ_LEN] for i in step.positions]


def test_five_epochs_have_five_orders_and_every_sample_once_in_each(tokens: Path) -> None:
    taken = [text for step in steps(feed(tokens), 15) for text in texts(step)]  # 120 of 115
    epochs = [taken[at : at + SAMPLES] for at in range(0, 5 * SAMPLES, SAMPLES)]
    for epoch in epochs:
        assert sorted(epoch) == [name(sample) for sample in range(SAMPLES)]
    assert len({tuple(epoch) for epoch in epochs}) == 5


@pytest.mark.parametrize("cursor", [8, 16, 24, 184, 3])
def test_any_position_is_the_start_of_the_same_stream(tokens: Path, cursor: int) -> None:
    whole = [text for step in steps(feed(tokens), 26) for text in texts(step)]
    resumed = [text for step in steps(feed(tokens, cursor=cursor), 2) for text in texts(step)]
    assert resumed == whole[cursor : cursor + 16]


@pytest.mark.parametrize(
    ("batch", "world", "micro"), [(8, 1, 3), (8, 2, 4), (8, 3, 2), (32, 28, 1), (3, 5, 2)]
)
def test_ranks_share_each_batch_exactly(tokens: Path, batch: int, world: int, micro: int) -> None:
    ranks = [
        steps(feed(tokens, rank=rank, world=world, batch=batch, micro=micro), 3)
        for rank in range(world)
    ]
    whole = steps(feed(tokens, batch=batch), 3)
    for number, step in enumerate(whole):
        together = [rank[number] for rank in ranks]
        assert [i for part in together for i in part.positions] == step.positions
        assert [text for part in together for text in texts(part)] == texts(step)
        assert len({len(part.micro) for part in together}) == 1
        assert {part.cursor_after for part in together} == {step.cursor_after}
        shapes = {micro.inputs.shape for part in together for micro in part.micro}
        assert shapes == {(micro, SEQ_LEN)}


def test_the_world_may_change_between_steps(tokens: Path) -> None:
    seen: Counter[int] = Counter()
    cursor = 0
    for world in (2, 1, 3, 28):
        parts = [
            steps(feed(tokens, rank=rank, world=world, cursor=cursor), 2) for rank in range(world)
        ]
        seen.update(i for part in parts for step in part for i in step.positions)
        cursor = parts[0][-1].cursor_after
    assert seen == Counter(range(cursor))
    assert cursor == 4 * 2 * 8


def test_padding_weighs_nothing(tokens: Path) -> None:
    (step,) = steps(feed(tokens, rank=0, world=5, batch=3, micro=2), 1)
    assert step.positions == []
    assert all((micro.targets == IGNORE).all() for micro in step.micro)
    (step,) = steps(feed(tokens, rank=4, world=5, batch=3, micro=2), 1)
    (micro,) = step.micro
    assert not (micro.targets[0] == IGNORE).any()
    assert (micro.targets[1] == IGNORE).all()


def test_the_seed_changes_the_order(tokens: Path) -> None:
    (one,), (other,) = steps(feed(tokens, seed=1), 1), steps(feed(tokens, seed=2), 1)
    assert texts(one) != texts(other)


def test_no_global_random_state_is_touched(tokens: Path) -> None:
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    steps(feed(tokens), 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), repr(np.random.get_state()))


def test_too_little_text_is_refused(tokens: Path) -> None:
    with pytest.raises(DataError, match=r"prepare more text or lower train\.seq_len"):
        Feed(tokens, Slicing(1, 1), seq_len=1000, seed=0)


def test_a_lost_shard_ends_the_feed_with_its_name(tokens: Path) -> None:
    (tokens / "shard-00002.tokens").unlink()
    with closing(feed(tokens)) as source:
        for _ in range(2):
            with pytest.raises(DataError, match=r"shard-00002\.tokens cannot be read: No such"):
                drain(source)


def drain(source: Feed) -> None:
    while True:
        source.take()


def test_a_closed_feed_says_so(tokens: Path) -> None:
    source = feed(tokens)
    source.take()
    source.close()
    source.close()
    assert "data feed" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        source.take()


def test_a_batch_that_is_there_is_taken_even_when_giving_up(tokens: Path) -> None:
    with closing(feed(tokens)) as source:
        assert source.take() is not None
        deadline = time.monotonic() + scaled(30)
        while source.take(give_up=lambda: True) is None:
            assert time.monotonic() < deadline


@pytest.fixture
def stuck(tokens: Path) -> Iterator[Path]:
    """A corpus on storage that does not answer: opening a shard blocks."""
    for shard in tokens.glob("*.tokens"):
        shard.unlink()
        os.mkfifo(shard)
    yield tokens
    for shard in tokens.glob("*.tokens"):
        os.close(os.open(shard, os.O_RDWR | os.O_NONBLOCK))  # lets the thread go


def test_stuck_storage_holds_up_neither_take_nor_close(stuck: Path) -> None:
    asked = []

    def give_up() -> bool:
        asked.append(time.monotonic())
        return len(asked) == 3

    source = feed(stuck)
    assert source.take(give_up) is None
    assert len(asked) == 3
    source.close()


def test_held_out_batches_are_in_file_order_and_padded(tokens: Path) -> None:
    corpus = Corpus.open(tokens)

    def batches(rank: int, world: int, max_batches: int = 99) -> list[list[list[bytes]]]:
        return [
            [[bytes(row.tolist()) for row in micro.inputs] for micro in batch]
            for batch in eval_batches(
                corpus,
                seq_len=SEQ_LEN,
                global_batch_size=8,
                micro_batch_size=3,
                rank=rank,
                world=world,
                max_batches=max_batches,
            )
        ]

    none = bytes(SEQ_LEN)
    rows = [row for batch in batches(0, 1) for micro in batch for row in micro]
    assert [row for row in rows if row != none] == [name(sample) for sample in range(SAMPLES)]
    per_rank = [batches(rank, 3) for rank in range(3)]
    for rank in per_rank:
        assert [len(batch) for batch in rank] == [1, 1, 1]
        assert {len(micro) for batch in rank for micro in batch} == {3}
    together = [
        row
        for number in range(3)
        for rank in per_rank
        for micro in rank[number]
        for row in micro
        if row != none
    ]
    assert together == [name(sample) for sample in range(SAMPLES)]
    assert len(batches(0, 1, max_batches=2)) == 2


def test_held_out_padding_is_ignored(tokens: Path) -> None:
    *_, last = eval_batches(
        Corpus.open(tokens), seq_len=SEQ_LEN, global_batch_size=8, micro_batch_size=8, max_batches=9
    )
    (micro,) = last
    assert (micro.targets == IGNORE).all(dim=1).tolist() == [False] * 7 + [True]
