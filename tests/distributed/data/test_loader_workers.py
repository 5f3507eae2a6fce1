"""Loader workers: the same stream as without, deaf to signals, and gone when they should be."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import harness
import psutil
import pytest
import torch
import warm
from harness import Job, drills
from patience import scaled

from kempner.data.order.batch_slices import Slicing
from kempner.data.prepare import sources
from kempner.data.prepare.pipeline import prepare
from kempner.data.serve.loader import Feed, StepBatch
from kempner.run.process.exit_codes import DataError, RunError

SAMPLES = 23
PATIENCE = 60.0

# A rank in a process of its own. It says what it has reached as lines of JSON.
RANK = """
import json, os, signal, sys, threading, time
from multiprocessing import resource_tracker
import psutil
from kempner.data.order.batch_slices import Slicing
from kempner.data.serve.loader import Feed


def say(**facts):
    print(json.dumps(facts), flush=True)


def workers():
    tracker = resource_tracker._resource_tracker._pid
    return [child.pid for child in psutil.Process().children() if child.pid != tracker]


def make():
    return Feed(sys.argv[1], Slicing(8, 2), seq_len=8, seed=1, workers=2)


def main():
    {body}


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """23 samples of eight tokens, no two alike, in four shards."""
    monkeypatch.setattr(sources, "_UNIT", 50)
    text = b"".join(b"sample%02d" % number for number in range(SAMPLES))
    (tmp_path / "a.txt").write_bytes(text)
    prepare(tmp_path / "tokens", [tmp_path / "a.txt"])
    return tmp_path / "tokens"


def feed(tokens: Path, workers: int, cursor: int = 0, rank: int = 0, world: int = 1) -> Feed:
    return Feed(
        tokens,
        Slicing(8, 2, rank, world),
        seq_len=8,
        seed=1,
        cursor=cursor,
        workers=workers,
    )


def stream(source: Feed, count: int) -> list[tuple[list[int], int, list[Any]]]:
    with closing(source):
        taken = [source.take() for _ in range(count)]
    return [
        (
            step.positions,
            step.cursor_after,
            [[m.inputs.tolist(), m.targets.tolist()] for m in step.micro],
        )
        for step in taken
        if isinstance(step, StepBatch)
    ]


def worker_processes() -> list[psutil.Process]:
    """All children but multiprocessing's resource tracker, which stays as long as Python, and the
    template, which has a session of its own: tests/warm.
    """
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    children = [child for child in psutil.Process().children() if child.pid != tracker]
    return [child for child in children if os.getsid(child.pid) == os.getsid(0)]


@dataclass
class Rank(Job):
    """A rank, and how many of its facts were heard."""

    heard: int = 0

    def hear(self) -> dict[str, Any]:
        """The next of its facts."""
        facts = lambda: [f for f in self.output().split("\n")[:-1] if f[:1] == "{"]  # noqa: E731
        self.heard += 1
        harness.wait_until(lambda: len(facts()) >= self.heard, "the rank to speak", PATIENCE, self)
        return json.loads(facts()[self.heard - 1])  # type: ignore[no-any-return]

    def errors(self) -> str:
        """What else it printed."""
        return "".join(line for line in self.output().splitlines(True) if line[:1] != "{")


Start = Callable[[str], Rank]


@pytest.fixture
def start(tmp_path: Path, tokens: Path) -> Iterator[Start]:
    """Starts ranks; what a failed test leaves of them is killed."""
    started: list[Rank] = []

    def start_one(body: str) -> Rank:
        script, log = tmp_path / "rank.py", tmp_path / "rank.out"
        script.write_text(RANK.replace("{body}", "\n    ".join(body.strip().splitlines())))
        with open(log, "wb") as output:
            command = [sys.executable, str(script), str(tokens)]
            started.append(Rank(warm.start(command, os.environ, output), log))
        return started[-1]

    yield start_one
    for rank in started:
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.wait()


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=scaled(PATIENCE))[1]


def with_ids(pids: list[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def test_two_workers_give_the_stream_of_none(tokens: Path) -> None:
    before = torch.get_rng_state()
    whole = stream(feed(tokens, workers=0), 12)
    assert stream(feed(tokens, workers=2), 12) == whole
    # 40 is in the middle of the second of three epochs
    assert stream(feed(tokens, workers=2, cursor=40), 7) == whole[5:]
    assert torch.equal(before, torch.get_rng_state())
    assert all_gone(worker_processes())


def test_uneven_ranks_with_workers_give_the_stream_of_none(tokens: Path) -> None:
    for rank in (0, 2):
        assert stream(feed(tokens, 2, 16, rank, 3), 4) == stream(feed(tokens, 0, 16, rank, 3), 4)


def test_an_error_of_a_worker_keeps_its_sentence(tokens: Path) -> None:
    os.truncate(tokens / "shard-00001.tokens", 100)
    with (
        closing(feed(tokens, workers=2)) as source,
        pytest.raises(DataError) as error,
    ):
        drain(source)
    assert str(error.value) == (
        f"token file {tokens}/shard-00001.tokens is not the one its index describes: "
        "it has 100 bytes, the index says 164, its header 164"
    )


def drain(source: Feed) -> None:
    while True:
        source.take()


def test_a_worker_that_is_killed_is_noticed_where_it_matters(tokens: Path) -> None:
    with closing(feed(tokens, workers=2)) as source:
        assert source.take() is not None
        killed = worker_processes()[0]
        killed.kill()
        # SIGCHLD comes here, and must raise nothing.
        wait_until(lambda: not killed.is_running() or killed.status() == psutil.STATUS_ZOMBIE)
        with pytest.raises(RunError, match=f"worker {killed.pid} has died with exit code -9"):
            drain(source)
    assert all_gone(worker_processes())


def test_workers_stuck_on_storage_are_left(tokens: Path) -> None:
    make_stuck(tokens)
    with closing(feed(tokens, workers=2)) as source:
        stuck = worker_processes()
        assert len(stuck) == 2
        pids = [worker.pid for worker in stuck]
        assert source.take(give_up=lambda: all(map(blocked_in_open, pids))) is None
    assert all_gone(stuck)


def make_stuck(tokens: Path) -> None:
    for shard in tokens.glob("*.tokens"):
        shard.unlink()
        os.mkfifo(shard)


def blocked_in_open(pid: int) -> bool:
    """Whether a worker has started up, and waits for a FIFO to be opened at its other end."""
    ignored = Path(f"/proc/{pid}/status").read_text().split("SigIgn:")[1].split()[0]
    openat = {"x86_64": "257", "aarch64": "56"}[os.uname().machine]
    return (
        int(ignored, 16) >> (signal.SIGTERM - 1) & 1 == 1
        and Path(f"/proc/{pid}/syscall").read_text().split()[0] == openat
    )


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(PATIENCE)
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


SIGNALLED_FROM_BIRTH = """
received = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
               signal.SIGQUIT):
    signal.signal(number, lambda number, frame: received.append(number))
ready = threading.Event()
def bombard():
    while not ready.is_set():
        for number in (15, 2, 1, 10, 12, 3):
            os.killpg(0, number)
        time.sleep(0.001)
shooter = threading.Thread(target=bombard)
shooter.start()
feed = make()
young = workers()
steps = [feed.take().cursor_after for _ in range(3)]
ready.set()
shooter.join()
say(steps=steps, received=len(received), same=workers() == young, workers=len(young))
feed.close()
left = [psutil.Process(pid) for pid in workers()]
say(left=len(psutil.wait_procs(left, timeout=60)[1]))
"""


def test_signals_to_the_whole_group_from_birth_on_kill_no_worker(start: Start) -> None:
    rank = start(SIGNALLED_FROM_BIRTH)
    facts = rank.hear()
    assert facts.pop("received") > 100
    assert facts == {"steps": [8, 16, 24], "same": True, "workers": 2}
    assert rank.hear() == {"left": 0}
    assert (rank.wait(PATIENCE), rank.errors()) == (0, "")


def test_a_killed_rank_takes_its_stuck_workers_along(start: Start, tokens: Path) -> None:
    make_stuck(tokens)
    rank = start("feed = make()\nsay(workers=workers())\nsignal.pause()")
    workers = rank.hear()["workers"]
    assert len(workers) == 2
    wait_until(lambda: all(map(blocked_in_open, workers)))
    rank.signal(signal.SIGKILL)
    rank.wait(PATIENCE)
    assert all_gone(with_ids(workers))


def test_workers_notice_that_their_rank_died_while_they_were_born(
    start: Start, tokens: Path
) -> None:
    make_stuck(tokens)
    rank = start("feed = make()\nsay(workers=workers())\nsignal.pause()")
    workers = rank.hear()["workers"]
    rank.signal(signal.SIGKILL)  # they still import torch
    rank.wait(PATIENCE)
    assert all_gone(with_ids(workers))


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(3)", 3), ("os._exit(4)", 4), ("1 / 0", 1), *drills(("raise SystemExit(75)", 75))],
)
def test_a_rank_leaves_at_once_though_the_feed_is_open_and_stuck(
    start: Start, tokens: Path, ending: str, code: int
) -> None:
    make_stuck(tokens)
    rank = start(f"feed = make()\nsay(workers=workers())\n{ending}")
    workers = rank.hear()["workers"]
    assert rank.wait(PATIENCE) == code, rank.output()
    assert rank.errors().count("Traceback") == (code == 1)
    assert all_gone(with_ids(workers))


HALF_STARTED = """
import multiprocessing.popen_spawn_posix as spawn
launch = spawn.Popen._launch
def only_once(self, process):
    if "-2" in process.name:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    launch(self, process)
spawn.Popen._launch = only_once
try:
    make()
except BlockingIOError:
    say(workers=workers(), blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""


def test_workers_that_cannot_all_be_started_do_not_stay(start: Start) -> None:
    rank = start(HALF_STARTED)
    assert rank.hear() == {"workers": [], "blocked": 0}
    assert rank.wait(PATIENCE) == 0


def test_an_unkillable_child_is_waited_for_no_longer_than_agreed() -> None:
    from multiprocessing import active_children, process

    from kempner.run.process.worker_process import kill

    class Stuck:
        """As a process in an uninterruptible sleep: SIGKILL is pending, it goes on living."""

        killed = False

        def kill(self) -> None:
            self.killed = True

        def join(self, timeout: float) -> None:
            assert timeout <= 0.2

        def is_alive(self) -> bool:
            return True

    child: Any = Stuck()
    process._children.add(child)  # type: ignore[attr-defined]
    try:
        kill([child], patience=0.2)
        assert child.killed
        assert child not in process._children  # type: ignore[attr-defined]
    finally:
        process._children.discard(child)  # type: ignore[attr-defined]
    assert active_children() == []
