"""Token files stay open: a step asks the servers of shared storage for samples and nothing else."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import wait_until, write_tokens

from kempner.data.files.token_file import Corpus
from kempner.data.order.batch_slices import Slicing
from kempner.data.serve.loader import Feed, shards_per_reader
from kempner.run.process.exit_codes import UsageError


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The token files that were opened, in order."""
    names: list[str] = []
    really = os.open

    def counted(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".tokens"):
            names.append(Path(path).name)
        return really(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", counted)
    return names


@contextmanager
def file_limit(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def token_files_open(directory: Path) -> int:
    files = [Path(file.path) for file in psutil.Process().open_files()]
    return sum(file.parent == directory for file in files)


def files_in_use() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_step_opens_a_file_once_all_are_open(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    write_tokens(tmp_path, [[number % 256] * 8 for number in range(1024)])
    samples = Corpus.open(tmp_path).samples(4)
    with file_limit(2048):
        feed = Feed(tmp_path, Slicing(64, 64), seq_len=4, seed=1)
        with closing(feed):
            # Two steps are read ahead of the one that is taken.
            for _ in range(-(-samples // 64) + 2):
                feed.take()
            assert len(set(opened)) == len(opened) == 1024
            for _ in range(20):
                feed.take()
    assert len(opened) == 1024
    wait_until(lambda: not token_files_open(tmp_path), "the thread of the feed to close its files")


def test_a_low_limit_of_open_files_is_enough(tmp_path: Path, opened: list[str]) -> None:
    index = write_tokens(tmp_path, [[number] * 2 for number in range(40)])
    with file_limit(files_in_use() + 20), closing(Corpus.open(tmp_path)) as corpus:
        assert corpus.read(0, index.tokens).tolist() == [n for n in range(40) for _ in range(2)]
        os.close(os.dup(0))  # and there is one left for others
    assert len(opened) == 40


def test_where_others_have_taken_all_files_one_is_given_up(tmp_path: Path) -> None:
    write_tokens(tmp_path, [[number] * 2 for number in range(40)])
    with closing(Corpus.open(tmp_path)) as corpus:
        corpus.read(0, 6)
        os.close(lowest := os.dup(0))
        with file_limit(lowest):
            assert corpus.read(6, 4).tolist() == [3, 3, 4, 4]
        assert token_files_open(tmp_path) == 3


def test_every_reader_keeps_as_many_files() -> None:
    assert shards_per_reader(None, 3, 10) is None
    assert [shards_per_reader(limit, 3, 10) for limit in (1, 3, 4, 10)] == [1, 1, 2, 4]
    with pytest.raises(UsageError, match=r"num_shards_per_rank=11 is more than the 10 samples"):
        shards_per_reader(11, 3, 10)
