"""Token files on storage that fails for a moment: read again, and never called damaged."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until, write_tokens
from patience import scaled

from kempner.data.files.token_file import Corpus, verify
from kempner.data.order.batch_slices import Slicing
from kempner.data.serve.loader import IGNORE, Feed, eval_batches
from kempner.run.process.retry import StorageUnavailableError, StorageWaits, storage_waits


def write_corpus(directory: Path) -> None:
    write_tokens(directory, [[1, 2, 3, 4, 5], [6], [], [7, 8, 9, 10, 11]], "uint16", 257)


def fail_reads(monkeypatch: pytest.MonkeyPatch, code: int, times: int) -> list[int]:
    """Have the next reads fail with this error; the descriptors that were asked."""
    whole, asked = os.preadv, list[int]()

    def fail(descriptor: int, *arguments: Any) -> int:
        asked.append(descriptor)
        if len(asked) <= times:
            raise OSError(code, os.strerror(code))
        return whole(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", fail)
    return asked


def test_an_io_error_names_the_file_and_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    fail_reads(monkeypatch, errno.EIO, times=1000)
    for use in (lambda: Corpus.open(tmp_path).read(6, 1), lambda: verify(tmp_path)):
        with pytest.raises(StorageUnavailableError, match=r"part-\d\.tokens: Input/output error"):
            use()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_a_failed_read_is_made_again_with_a_file_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    write_corpus(tmp_path)
    corpus = Corpus.open(tmp_path)
    assert corpus.read(6, 1).tolist() == [7]
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda *a, **k: opened.append(a[0]) or real(*a, **k))
    fail_reads(monkeypatch, code, times=3)
    assert corpus.read(6, 1).tolist() == [7]
    ours = [path for path in opened if tmp_path in Path(path).parents]  # not those of other threads
    assert ours == [tmp_path / "part-3.tokens"] * 3
    assert len(corpus._open) == 1


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("read_first", [True, False])
def test_a_folder_that_is_away_is_waited_for(tmp_path: Path, read_first: bool) -> None:
    """`worked`: an earlier attempt has read it."""
    here, away = tmp_path / "data", tmp_path / "away"
    write_corpus(here)
    corpus = Corpus.open(here)
    if read_first:
        corpus.read(0, 1)
    corpus.close()
    here.rename(away)
    with ThreadPoolExecutor(2) as pool:
        read = pool.submit(corpus.read, 6, 2)
        opened = pool.submit(Corpus.open, here, worked=True)
        wait_until(lambda: len(storage_waits()._waiting) == 2, "both to wait")
        away.rename(here)
        assert read.result(scaled(30)).tolist() == [7, 8]
        assert opened.result(scaled(30)).read(0, 1).tolist() == [1]


@pytest.mark.usefixtures("patient")
def test_a_file_that_seems_empty_is_waited_for(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    corpus, part = Corpus.open(tmp_path), tmp_path / "part-0.tokens"
    corpus.read(0, 1)
    content = part.read_bytes()
    os.truncate(part, 0)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(corpus.read, 0, 2)
        wait_until(lambda: "it is empty" in storage_waits().waiting_for, "it to wait")
        part.with_name("back").write_bytes(content)
        part.with_name("back").rename(part)
        assert read.result(scaled(30)).tolist() == [1, 2]


def test_an_evaluation_stays_in_step_when_a_stop_ends_its_wait(
    tmp_path: Path, patient: StorageWaits
) -> None:
    """Each rank makes the same forward passes, whatever it could read."""
    write_corpus(tmp_path)
    corpus, stop = Corpus.open(tmp_path), threading.Event()
    patient.configure(60.0, stop.is_set)
    options = {"seq_len": 2, "global_batch_size": 2, "micro_batch_size": 1, "max_batches": 2}
    whole = list(eval_batches(corpus, **options))
    corpus.close()
    tmp_path.rename(away := tmp_path.with_name("away"))
    with ThreadPoolExecutor(1) as pool:
        batches = pool.submit(lambda: list(eval_batches(corpus, **options)))
        wait_until(lambda: patient.waiting_for, "it to wait")
        stop.set()
        found = batches.result(scaled(30))
    away.rename(tmp_path)
    assert [len(batch) for batch in found] == [len(batch) for batch in whole]
    assert all((micro.targets == IGNORE).all() for batch in found for micro in batch)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_feed_waits_and_goes_on_with_the_same_samples(tmp_path: Path, workers: int) -> None:
    write_tokens(tmp_path / "data", [list(range(40)), list(range(40, 90))], "uint16", 257)
    here, away = tmp_path / "data", tmp_path / "away"

    def open_feed() -> Feed:
        return Feed(here, Slicing(4, 2), seq_len=4, seed=1, workers=workers, shards_open=1)

    def tokens(feed: Feed, steps: int) -> list[object]:
        taken = [feed.take() for _ in range(steps)]
        return [micro.inputs.tolist() for step in taken if step for micro in step.micro]

    with closing(open_feed()) as feed:
        expected = tokens(feed, 30)
    with closing(open_feed()) as feed:
        found = tokens(feed, 5)
        here.rename(away)
        with ThreadPoolExecutor(1) as pool:  # takes what was read ahead, and then waits
            others = pool.submit(tokens, feed, 25)
            wait_until(lambda: storage_waits().waiting_for, "it to wait")
            away.rename(here)
            assert found + others.result(scaled(30)) == expected
