"""The control channel in real runs: which process learns what, and what none may see."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from harness import Run, assert_named, wait_until
from patience import scaled, slowed

from kempner.insight.run_reader import RunReader
from kempner.insight.status.summary import summarise
from kempner.run.link.auth import Door, Secret, ranks_at
from kempner.run.link.messages import (
    LINE_LIMIT,
    OPENING_LIMIT,
    Caller,
    Challenge,
    Hello,
    Role,
    decoder,
    encode,
)
from kempner.run.link.wire import Connection, connect_here
from kempner.run.process.exit_codes import StopReason
from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(300)

LONG = "--train.max_steps=100000"
ONCE = "--supervise.max_restarts_without_progress=0"


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def ends(run: Run) -> list[tuple[int, str]]:
    """Ranks and how they ended."""
    log = read_lines(run.record.supervisor_log(1))
    return [(line["rank"], line["how"]) for line in log if line["event"] == "rank ended"]


def test_peers_of_a_killed_rank_are_told_and_leave_by_themselves(run: Run) -> None:
    # No rank is killed for staying: with this grace the test would time out.
    job = run.supervise(
        3, LONG, ONCE, "--supervise.crash_grace=100000", "--train.global_batch_size=6"
    )
    victim = run.ready_pid(1, 1, job)
    run.reach(3, job)
    os.kill(victim, signal.SIGSTOP)
    dead_collective(run)
    os.kill(victim, signal.SIGKILL)
    assert job.wait() == 1
    assert "rank 1 was killed by SIGKILL" in job.output()
    how = dict(ends(run))
    assert how[1] == "was killed by SIGKILL"
    assert all("exited with code 76" in how[rank] for rank in (0, 2))
    (ended,) = run.events("attempt_ended")
    assert (ended["culprit"], ended["exits"]) == (1, {"1": -9, "0": 76, "2": 76})


def dead_collective(run: Run) -> None:
    """Wait until the ranks that can run have nothing left to do but to wait."""
    pids = [run.ready_pid(1, rank, run.jobs[-1]) for rank in (0, 2)]
    used = lambda: [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]  # noqa: E731
    last = [0.0]

    def idle() -> bool:
        last[:], before = used(), list(last)
        return last == before

    for _ in range(3):
        wait_until(idle, "the others to be stuck")


def test_a_crash_is_reported_in_the_ranks_own_words(run: Run) -> None:
    run.complete(1)
    for step in run.committed():
        (run.checkpoints / f"step-{step:08d}" / "manifest.json").write_text("{}")
    job = run.supervise(1)
    assert job.wait() == 65
    *_, ended = run.events("attempt_ended")
    assert "exited with code 65 (bad_data): no checkpoint in" in ended["reason"]


def test_a_stopped_supervisor_holds_nobody_up_and_the_ledger_misses_nothing(run: Run) -> None:
    job = run.supervise(2, "--train.max_steps=80")
    run.reach(5, job)
    job.signal(signal.SIGSTOP)
    run.reach(max(run.steps()) + 30, job)
    job.signal(signal.SIGCONT)
    assert job.wait(120) == 0, job.output()
    assert [e["step"] for e in run.events("checkpoint_committed")] == list(range(10, 81, 10))
    assert len(run.events("completed")) == 1
    assert all(e["attempt"] == 1 for e in read_lines(run.record.ledger))


def test_ranks_that_hear_nothing_for_too_long_commit_and_leave(run: Run) -> None:
    job = run.supervise(2, LONG, f"--supervise.supervisor_timeout={slowed(10)}")
    ranks = [run.ready_pid(1, rank, job) for rank in range(2)]
    run.reach(3, job)
    job.signal(signal.SIGSTOP)
    wait_until(lambda: not any(alive(pid) for pid in ranks), "the ranks to leave")
    job.signal(signal.SIGCONT)
    assert job.wait() == 75, job.output()
    assert run.latest() == max(run.steps())
    assert len(run.events("stopped")) == 1
    assert_named(run.record, StopReason.SUPERVISOR_LOST, 1, 2, job.output())


def test_ranks_of_a_killed_supervisor_tell_how_the_run_ended(run: Run) -> None:
    job = run.supervise(2, LONG, "--supervise.supervisor_timeout=100000")
    ranks = [run.ready_pid(1, rank, job) for rank in range(2)]
    run.reach(13, job)
    job.signal(signal.SIGKILL)
    job.process.wait()
    wait_until(lambda: not any(alive(pid) for pid in ranks), "the ranks to leave")
    (stopped,) = run.events("stopped")
    last = stopped["step"]
    assert (stopped["reason"], stopped["lost_steps"]) == ("supervisor_lost", 0)
    assert run.events("checkpoint_committed")[-1]["step"] == last == run.latest()
    places = json.loads(run.record.ranks(1).read_text())
    assert [(p["step"], p["phase"]) for p in places] == 2 * [(last, "exit")]
    status = summarise(RunReader(run.record).read())
    assert (status.facts.live.alive, status.ranks.groups) == (False, ())
    assert status.state == "stopped (supervisor lost)"


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


STOPPED = "exited with code 75 (stopped)"
ELSEWHERE = [sys.executable, str(Path(__file__).with_name("told_by_channel_alone.py"))]


def test_a_stop_by_channel_alone_is_enough(run: Run) -> None:
    job = run.start(ELSEWHERE, LONG, "--supervise.stop_grace=300", spare=True)
    run.reach(3, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert run.latest() == max(run.steps())
    asked = [e for e in read_lines(run.record.log(1, 0)) if e["event"] == "asked to stop"]
    told = [(e["reason"], e["sentence"], round(e["seconds_left"])) for e in asked]
    assert told == [("signal", "SIGTERM", 300)]
    assert_named(run.record, StopReason.SIGNAL, 1, 2, job.output())


@pytest.mark.drill
def test_ranks_stopped_before_they_know_each_other_say_so(run: Run) -> None:
    """`make check` stops ranks before their first step in ../stops/test_stop_and_resume.py."""
    job = run.start(ELSEWHERE, LONG, spare=True)
    log = run.record.supervisor_log(1)
    wait_until(
        lambda: [e for e in read_lines(log) if e["event"] == "rank connected"], "a rank", job=job
    )
    job.signal()
    assert job.wait() == 75, job.output()
    words = f"{STOPPED}: stopped before training began (signal)"
    assert sorted(ends(run)) == [(rank, words) for rank in (0, 1)]
    assert run.committed() == []


def test_a_death_that_no_launcher_sees_is_seen_by_the_channel(run: Run) -> None:
    job = run.start(ELSEWHERE, LONG, ONCE, spare=True)
    victim = run.ready_pid(1, 1, job)
    run.reach(3, job)
    os.kill(victim, signal.SIGKILL)
    assert job.wait() == 1
    (ended,) = run.events("attempt_ended")
    assert ended["reason"] == "rank 1 disappeared without a message"
    assert (ended["culprit"], ended["exits"]) == (1, {"1": None, "0": 76})


def test_the_token_stays_secret_and_strangers_change_nothing(
    run: Run, undisturbed: Callable[..., Run]
) -> None:
    steps, slow = "--train.max_steps=60", "slow rank 1 by 4 from step 2"  # not over too soon
    # Of a rank that is forked not even its own user sees the token.
    own = ("--supervise.fork=false", "--data.num_dataloader_workers=1")
    job = run.supervise(2, *own, steps, KEMPNER_FAULTS=slow)
    ranks = [run.ready_pid(1, rank, job) for rank in range(2)]
    variables = environment_of(ranks[1])
    token, name = variables["KEMPNER_CONTROL_TOKEN"], variables["KEMPNER_CONTROL_SOCKET"]
    processes = psutil.Process(job.process.pid).children(recursive=True)
    workers = [p for p in processes if p.pid not in ranks]
    assert workers
    assert not any(token in " ".join(p.cmdline()) for p in processes)
    assert not any(token in environment_of(worker.pid).values() for worker in workers)
    molest(name)
    assert job.wait(200) == 0, job.output()
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert run.record.ledger in files
    assert not [path for path in files if token.encode() in path.read_bytes()]
    (ended,) = run.events("attempt_ended")
    assert ended["exits"] == {"0": 0, "1": 0}
    joined = [e for e in read_lines(run.record.supervisor_log(1)) if e["event"] == "rank connected"]
    assert sorted(e["rank"] for e in joined) == [0, 1]
    refused = [
        e["reason"]
        for e in read_lines(run.record.supervisor_log(1))
        if e["event"] == "connection refused"
    ]
    assert "it does not know the token" in refused
    assert f"a line exceeds {OPENING_LIMIT} bytes" in refused
    assert run.steps() == undisturbed(2, steps).steps()


def molest(name: str) -> None:
    """Wrong proofs, endless lines, garbage, silence, and a byte now and then, under a flood."""
    dripping = [knock(name) for _ in range(50)]
    for rank in range(4):
        with knock(name) as stranger:
            (line,) = Connection(stranger).lines()
            challenge: Challenge = decoder(Challenge)(line)
            caller = Caller(Role.RANK, 1, rank % 2, "x", 1)
            door = Door(Secret.new(), ranks_at(name))
            stranger.send(encode(door.introduce(caller, challenge.nonce)))
            assert hung_up(stranger)
    endless, garbage = b"x" * 4 * LINE_LIMIT, secrets.token_bytes(LINE_LIMIT)
    forged = encode(Hello("0" * 32, "0" * 64, Caller(Role.RANK, 1, 0, "x", 1)))
    with knock(name) as stranger, suppress(OSError):
        stranger.sendall(endless)
        assert hung_up(stranger)
    for position, content in enumerate((endless, garbage, b"", forged)):
        strangers = [knock(name) for _ in range(200)]
        for stranger in strangers:
            with suppress(OSError):  # hung up on already
                stranger.sendall(content)
        for stranger in dripping:
            with suppress(OSError):
                stranger.send(forged[position : position + 1])
        for stranger in strangers:
            stranger.close()
    for stranger in dripping:
        stranger.close()


def knock(name: str) -> socket.socket:
    """A connection that has proved nothing yet; its challenge has come."""
    stranger = connect_here(name)
    stranger.settimeout(scaled(10))
    with suppress(OSError):  # one of too many
        stranger.recv(1, socket.MSG_PEEK)
    return stranger


def hung_up(stranger: socket.socket) -> bool:
    """Whether the other side ends the connection; `TimeoutError` if it does not."""
    stranger.settimeout(scaled(30))
    with suppress(ConnectionResetError):
        while stranger.recv(4096):
            pass
    return True
