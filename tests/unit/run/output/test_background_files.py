"""Files of lines on storage that fails for a moment, hangs, or was left with half a line."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness import wait_until
from patience import scaled

from kempner.run.output import background_files, console
from kempner.run.output.background_files import JsonLines, LatestContent, open_lines
from kempner.run.output.console import settle_all


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
        lines.append(json.dumps({"n": number}))


@contextmanager
def files_of(size: int) -> Iterator[None]:
    """A write beyond so many bytes writes what fits, as on a full disk."""
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
    monkeypatch.setattr(background_files, "KEPT", 3 * len('{"n": 0}'))
    path, told = tmp_path / "lines.jsonl", SaidSentences()
    path.symlink_to("/dev/full")
    lines = open_lines(path, told)
    append(lines, *range(5))
    assert background_files.unwritten_lines()[path] == 3
    path.unlink()
    append(lines, 5)
    append(lines, 6)
    settle_all(10)
    assert numbers(path) == [0, 1, 2, 6]
    assert told[1][1] == {"file": str(path), "late": 3, "lost": 3}


def test_storage_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody reads hangs like a file server that does not answer."""
    monkeypatch.setattr(console, "PATIENCE", 0.05)
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
    monkeypatch.setattr(console, "PATIENCE", 0.05)
    stuck, free = tmp_path / "stuck.jsonl", tmp_path / "free.jsonl"
    go_on, open_file = threading.Event(), background_files._open
    monkeypatch.setattr(
        background_files,
        "_open",
        lambda path: (path == free or go_on.wait(scaled(60))) and open_file(path),
    )
    first, second = open_lines(stuck, SaidSentences()), open_lines(free, SaidSentences())
    append(first, 1)
    append(second, 2)
    settle_all(0.1)
    assert numbers(free) == [2]
    assert not stuck.exists()
    go_on.set()
    settle_all(60)
    assert numbers(stuck) == [1]
