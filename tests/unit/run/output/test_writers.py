"""Files of lines on storage that fails for a moment, hangs, or was left with half a line."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness import wait_until
from patience import scaled

from kempner.run.output import writers
from kempner.run.output.writers import JsonLines, LatestContent, Writer, open_lines, settle_all


class SaidSentences(list[tuple[str, Mapping[str, object]]]):
    """What was said about a file."""

    def __call__(self, sentence: str, facts: Mapping[str, object]) -> None:
        self.append((sentence, facts))

    @property
    def sentences(self) -> list[str]:
        return [sentence for sentence, _ in self]


def numbers(path: Path) -> list[int]:
    """As a reader who expects nothing but JSON lines finds them."""
    return [json.loads(line)["n"] for line in path.read_text().split("\n")[:-1]]


def append(lines: JsonLines, *entries: int) -> None:
    for number in entries:
        lines.append({"n": number})


@contextmanager
def files_of(size: int) -> Iterator[None]:
    """A write beyond `size` bytes writes what fits, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", range(30, 41))
def test_a_line_for_half_of_which_there_was_room_comes_whole_and_once(
    tmp_path: Path, room: int
) -> None:
    path, told = tmp_path / "lines.jsonl", SaidSentences()
    lines = open_lines(path, told)
    with files_of(room):
        append(lines, *range(10, 20))
        assert told.sentences == ["cannot write to file, keeping its lines"]
        assert len(lines.unwritten()) == 10 - room // 10  # a line has ten bytes
    append(lines, 20)
    assert numbers(path) == list(range(10, 21))
    assert told.sentences[1:] == ["can write to file again"]


def test_what_a_killed_writer_left_is_cut_off_unless_it_is_whole(tmp_path: Path) -> None:
    for number, tail in enumerate((b'{"n": 2, "lo', b"\0" * 5000, b'{"n": 7}', b"", b'"a" ')):
        path = tmp_path / str(number)
        path.write_bytes(b'{"n": 1}\n' + tail)
        append(open_lines(path, SaidSentences()), 3)
        settle_all(10)
        assert numbers(path) == ([1, 7, 3] if b"7" in tail else [1, 3])


def test_lines_beyond_what_can_be_kept_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "KEPT", 3 * len('{"n": 0}'))
    path, told = tmp_path / "lines.jsonl", SaidSentences()
    path.symlink_to("/dev/full")
    lines = open_lines(path, told)
    append(lines, *range(5))
    assert writers.unwritten_lines()[path] == 3
    path.unlink()
    append(lines, 5)
    append(lines, 6)
    settle_all(10)
    assert numbers(path) == [0, 1, 2, 6]
    assert told[1][1] == {"file": str(path), "late": 3, "lost": 3}


def test_storage_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that is not read hangs like a file server that does not answer."""
    monkeypatch.setattr(writers, "PATIENCE", 0.05)
    path = tmp_path / "lines.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    lines = open_lines(path, SaidSentences())
    append(lines, *range(20_000))
    assert lines.unwritten()
    taken = bytearray()

    def look() -> bool:
        with suppress(BlockingIOError):
            taken.extend(os.read(reader, 1 << 20))
        return taken.endswith(b"19999}\n")

    wait_until(look, "the last line")
    assert [json.loads(line)["n"] for line in taken.splitlines()] == list(range(20_000))
    os.close(reader)


def test_there_is_one_writer_for_a_file(tmp_path: Path) -> None:
    first = open_lines(tmp_path / "lines.jsonl", SaidSentences())
    assert open_lines(tmp_path / "lines.jsonl", SaidSentences()) is first
    assert open_lines(tmp_path / "others.jsonl", SaidSentences()) is not first


def test_only_the_newest_content_is_written_once_it_can_be(tmp_path: Path) -> None:
    folder, told = tmp_path / "folder", SaidSentences()
    latest = LatestContent(folder / "ranks.json", told)
    latest.replace("[1]")
    latest.replace("[2]")
    assert told.sentences == ["cannot be written"]
    folder.mkdir()
    settle_all(10)
    assert (folder / "ranks.json").read_text() == "[2]"
    assert [entry.name for entry in folder.iterdir()] == ["ranks.json"]


def test_a_file_whose_storage_hangs_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "PATIENCE", 0.05)
    stuck, free = tmp_path / "stuck.jsonl", tmp_path / "free.jsonl"
    go_on, write = threading.Event(), JsonLines._write_lines

    def write_once_it_goes_on(lines: JsonLines) -> None:
        assert lines.path == free or go_on.wait(scaled(60))
        write(lines)

    monkeypatch.setattr(JsonLines, "_write_lines", write_once_it_goes_on)
    first, second = open_lines(stuck, SaidSentences()), open_lines(free, SaidSentences())
    append(first, 1)
    append(second, 2)
    settle_all(0.1)
    assert numbers(free) == [2]
    assert not stuck.exists()
    go_on.set()
    settle_all(60)
    assert numbers(stuck) == [1]


class Works(Writer[None]):
    """A writer whose work a test describes."""

    def __init__(self, work: Callable[[], float | None]) -> None:
        super().__init__("works")
        self._work = work

    def _write(self) -> float | None:
        return self._work()


def test_a_stuck_write_keeps_its_caller_for_a_moment_and_nothing_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writers, "PATIENCE", 0.05)
    go_on, done = threading.Event(), list[str]()
    pauses = iter([None, 0.01, 0.01, None, None])

    def work() -> float | None:
        if done:
            go_on.wait(scaled(60))
        done.append("done")
        return next(pauses)

    worker = Works(work)
    worker.prompt()
    assert done == ["done"]
    worker.prompt()
    worker.prompt()
    assert done == ["done"]
    assert not worker.wait_for(worker.ask_again(), 0.01)
    go_on.set()
    wait_until(lambda: len(done) >= 4, "the last try")
    assert worker.wait_for(worker.ask_again(), 60)


def test_a_thread_that_has_nothing_to_write_ends_and_another_one_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writers, "IDLE", 0.0)
    done = list[str]()
    worker = Works(lambda: done.append("done"))
    for number in range(3):
        worker.prompt()
        assert len(done) == number + 1
        wait_until(lambda: "works" not in {t.name for t in threading.enumerate()}, "its end")
