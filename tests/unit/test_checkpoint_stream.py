"""A buffer becomes a durable file with checksums, or an error that names it."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest

from kempner.checkpoint import stream
from kempner.checkpoint.manifest import BLOCK_BYTES, sum_file
from kempner.checkpoint.stream import SLAB_BYTES, WRITE_BEHIND, write_stream, yield_to_training


@pytest.mark.parametrize(
    "length",
    [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, SLAB_BYTES + 5, (WRITE_BEHIND + 3) * SLAB_BYTES + 77],
)
def test_the_file_is_the_buffer_and_the_sums_are_the_file_s(tmp_path: Path, length: int) -> None:
    content = random.Random(length).randbytes(min(length, SLAB_BYTES + 5))
    content = (content * (length // max(1, len(content)) + 1))[:length]
    path = tmp_path / "data"
    sums = write_stream(path, memoryview(content))
    assert path.read_bytes() == content
    assert sums == sum_file(path)


def test_an_existing_file_is_never_written_to(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"committed")
    with pytest.raises(FileExistsError, match="data"):
        write_stream(path, memoryview(b"other"))
    assert path.read_bytes() == b"committed"


def test_a_full_disk_speaks_before_anything_is_written(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left") as failure:
        write_stream(small_disk / "data", memoryview(bytes(9 << 20)))
    assert failure.value.errno == errno.ENOSPC
    assert failure.value.filename == str(small_disk / "data")
    assert (small_disk / "data").stat().st_size == 0


def test_a_full_disk_speaks_where_space_cannot_be_reserved(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "reserve", lambda descriptor, length: None)
    with pytest.raises(OSError, match="No space left"):
        write_stream(small_disk / "data", memoryview(bytes(9 << 20)))


def test_a_file_system_without_reservation_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        def __getattr__(self, name: str) -> object:
            def refuse(*arguments: object) -> int:
                stream.ctypes.set_errno(errno.EOPNOTSUPP)
                return -1

            return refuse

    monkeypatch.setattr(stream, "_libc", Libc())
    content = bytes(range(256)) * 1000
    assert write_stream(tmp_path / "data", memoryview(content)) == sum_file(tmp_path / "data")
    assert (tmp_path / "data").read_bytes() == content


def test_any_other_refusal_to_reserve_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        def fallocate(self, *arguments: object) -> int:
            stream.ctypes.set_errno(errno.EDQUOT)
            return -1

    monkeypatch.setattr(stream, "_libc", Libc())
    with pytest.raises(OSError, match="quota"):
        write_stream(tmp_path / "data", memoryview(b"x"))


def test_only_the_writing_thread_steps_back() -> None:
    nice: list[int] = []

    def work() -> None:
        yield_to_training()
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert nice == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
