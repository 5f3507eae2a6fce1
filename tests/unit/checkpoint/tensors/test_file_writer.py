"""A buffer becomes a durable file with checksums, or an error that names it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from kempner.checkpoint.format.manifest import BLOCK_BYTES, sum_file
from kempner.checkpoint.io import file_writer
from kempner.checkpoint.io.file_writer import (
    SLAB_BYTES,
    WRITE_BEHIND,
    write_stream,
    yield_to_training,
)
from kempner.checkpoint.tensors.file_buffer import page_aligned


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


@pytest.mark.parametrize("length", [1, 4095, 4096, 5000, SLAB_BYTES, SLAB_BYTES + 4097])
@pytest.mark.parametrize("refusal", ["none", "flag", "write"])
def test_from_whole_pages_it_bypasses_the_cache_where_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, refusal: str
) -> None:
    bypassed: list[int] = []

    def pwrite(descriptor: int, data: memoryview, at: int, write=os.pwrite) -> int:  # type: ignore[no-untyped-def]
        if direct := bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT):
            if refusal == "write":
                raise OSError(errno.EINVAL, "Invalid argument")
            bypassed.append(len(data))
        written: int = write(descriptor, data, at)
        assert not direct or written == len(data)
        return written

    def set_flags(descriptor: int, command: int, flags: int = 0, call=fcntl.fcntl) -> int:  # type: ignore[no-untyped-def]
        if refusal == "flag" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(call(descriptor, command, flags))

    monkeypatch.setattr(file_writer.os, "pwrite", pwrite)
    monkeypatch.setattr(file_writer.fcntl, "fcntl", set_flags)
    buffer = page_aligned(length)
    buffer.random_(generator=torch.Generator().manual_seed(length))
    sums = write_stream(tmp_path / "data", buffer.numpy().data)
    assert (tmp_path / "data").read_bytes() == buffer.numpy().tobytes()
    assert sums == sum_file(tmp_path / "data")
    assert sum(bypassed) == (length // 4096 * 4096 if refusal == "none" else 0)


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
    monkeypatch.setattr(file_writer, "reserve", lambda descriptor, length: None)
    with pytest.raises(OSError, match="No space left"):
        write_stream(small_disk / "data", memoryview(bytes(9 << 20)))
    with pytest.raises(OSError, match="No space left"):
        write_stream(small_disk / "more", page_aligned(9 << 20).numpy().data)


def test_a_file_system_without_reservation_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        def __getattr__(self, name: str) -> object:
            def refuse(*arguments: object) -> int:
                file_writer.ctypes.set_errno(errno.EOPNOTSUPP)
                return -1

            return refuse

    monkeypatch.setattr(file_writer, "_libc", Libc())
    content = bytes(range(256)) * 1000
    assert write_stream(tmp_path / "data", memoryview(content)) == sum_file(tmp_path / "data")
    assert (tmp_path / "data").read_bytes() == content


def test_any_other_refusal_to_reserve_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        def fallocate(self, *arguments: object) -> int:
            file_writer.ctypes.set_errno(errno.EDQUOT)
            return -1

    monkeypatch.setattr(file_writer, "_libc", Libc())
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
