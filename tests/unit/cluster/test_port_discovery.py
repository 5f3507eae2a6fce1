"""Ports that a launch agrees on without a word, and the beacon by which its ranks find rank 0."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from patience import scaled

from kempner.cluster.network.ports import FIRST, LAST, announce, candidates, claim, find, job_salt

HERE = "127.0.0.1"
_NUMBERS = count()


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """A launch that no other test is."""
    return f"{request.node.name} {next(_NUMBERS)} {id(request)}"


def test_launches_on_one_node_try_different_ports() -> None:
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    salts = [
        job_salt(step),
        job_salt({**step, "SLURM_JOB_ID": "10001"}),
        job_salt({**step, "SLURM_STEP_ID": "1"}),
        job_salt({**step, "SLURM_RESTART_COUNT": "1"}),
        job_salt(step, attempt="a1"),
    ]
    firsts = [candidates(salt)[0] for salt in salts]
    assert len(set(firsts)) == len(firsts)


def test_ports_are_the_same_for_all_ranks_and_outside_the_ephemeral_range() -> None:
    ports = candidates("7:0::")
    assert ports == candidates("7:0::")
    assert len(set(ports)) == len(ports)
    assert all(FIRST <= port < LAST for port in ports)


def test_a_taken_port_costs_a_try() -> None:
    ports = candidates("a launch")
    with claim(ports) as first, claim(ports) as second:
        assert [first.getsockname()[1], second.getsockname()[1]] == ports[:2]
        socket.create_connection(("127.0.0.1", ports[1])).close()


def test_ports_that_are_all_taken_are_named() -> None:
    ports = candidates("a busy node")[:1]
    with claim(ports), pytest.raises(OSError, match=f"all ports .* are taken: {ports[0]}"):
        claim(ports)


@contextmanager
def stranger(port: int, says: bytes) -> Iterator[None]:
    """A service of another program on a port."""
    with socket.create_server(("", port)) as listener:
        listener.settimeout(scaled(20))

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def test_a_rank_learns_the_stores_port(salt: str) -> None:
    announce(salt, 12345)
    assert [find(HERE, salt, 20) for _ in range(3)] == [12345] * 3


def test_a_rank_waits_for_rank_0(salt: str) -> None:
    later = threading.Timer(0.2, announce, (salt, 12345))
    later.start()
    assert find(HERE, salt, 20) == 12345
    later.join()


@pytest.mark.parametrize(
    "says", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"kempner 0123 80\n", b"x" * 4096]
)
def test_a_stranger_on_the_port_is_passed_over(salt: str, says: bytes) -> None:
    with stranger(candidates(salt)[0], says):
        announce(salt, 12345)
        assert find(HERE, salt, 20) == 12345


def test_another_launchs_beacon_is_passed_over(salt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = candidates(salt)
    monkeypatch.setattr("kempner.cluster.network.ports.candidates", lambda _: ports)
    announce("another launch", 80)
    announce(salt, 12345)
    assert find(HERE, salt, 20) == 12345
    assert find(HERE, "another launch", 20) == 80


def test_without_a_rank_0_the_ports_are_named(salt: str) -> None:
    with pytest.raises(TimeoutError, match=f"rank 0 was not found .* {candidates(salt)[0]}"):
        find(HERE, salt, 0.01)
