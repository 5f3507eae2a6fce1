"""Errors of GPUs, told by a driver that is made up: what is said of them, and of which nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from harness import wait_until
from patience import scaled

from kempner.probe.gpu_events import GpuTrouble, GpuWatch, trouble_of

FAKE = Path(__file__).with_name("fake_nvml")
Watch = Callable[..., tuple[SimpleQueue[GpuTrouble], GpuWatch]]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Starts the real process on a driver that says so."""
    watches: list[GpuWatch] = []

    def start(**told: Any) -> tuple[SimpleQueue[GpuTrouble], GpuWatch]:
        (tmp_path / "told.json").write_text(json.dumps(told))
        monkeypatch.setenv("FAKE_NVML", str(tmp_path / "told.json"))
        monkeypatch.setenv("PYTHONPATH", str(FAKE))
        heard: SimpleQueue[GpuTrouble] = SimpleQueue()
        watches.append(GpuWatch(heard.put, Path("/dev/null")))
        watches[-1].start()
        return heard, watches[-1]

    yield start
    for one in watches:
        one.close()


def next_of(heard: SimpleQueue[GpuTrouble]) -> GpuTrouble:
    return heard.get(timeout=scaled(60))


@pytest.mark.parametrize(
    ("xid", "words", "broken"),
    [
        (79, "Xid 79 of GPU 1: it has fallen off the bus", True),
        (48, "Xid 48 of GPU 1: an uncorrectable memory error", True),
        (94, "Xid 94 of GPU 1: a contained memory error", False),
        (999, "Xid 999 of GPU 1: see NVIDIA's list of them", False),
    ],
)
def test_an_xid_names_its_gpu_and_says_whether_it_is_broken(
    xid: int, words: str, broken: bool
) -> None:
    assert trouble_of(1, xid) == GpuTrouble(1, xid, words, broken)


def test_what_a_program_did_says_nothing_of_the_gpu() -> None:
    assert [trouble_of(0, xid) for xid in (13, 31, 43, 45, 68)] == [None] * 5


def test_events_come_from_a_process_of_their_own_which_ends_with_the_watch(watch: Watch) -> None:
    heard, process = watch(events=[[1, 79], [0, 31], [0, 94]], silent=[0])
    assert [next_of(heard).xid for _ in range(2)] == [79, 94]  # 31 is a program's
    process.close()
    wait_until(lambda: not process.alive(), "its end")


@pytest.mark.parametrize(
    ("told", "reason", "broken"),
    [
        (
            {"rows": {"1": [True, False]}},
            "a row of its memory is replaced at the next reset",
            False,
        ),
        ({"rows": {"1": [False, True]}}, "memory cannot be replaced", True),
        ({"lost": [1]}, "does not answer any more", True),
    ],
)
def test_what_is_no_event_is_seen_by_a_look(
    watch: Watch, told: Mapping[str, Any], reason: str, broken: bool
) -> None:
    heard, _ = watch(**told)
    found = next_of(heard)
    assert (found.gpu, found.xid, found.broken) == (1, 0, broken)
    assert reason in found.reason


def test_a_driver_that_does_not_work_ends_the_process_and_nothing_else(
    watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard, process = watch(driver="broken")
    wait_until(lambda: not process.alive(), "its end")
    assert "the GPUs are watched no longer (reason error 9)" in capsys.readouterr().err
    with pytest.raises(Empty):
        heard.get_nowait()


def test_without_a_driver_nothing_is_started(tmp_path: Path) -> None:
    watch = GpuWatch(lambda _: None, tmp_path / "nvidiactl")
    watch.start()
    assert not watch.alive()
