"""Where a process is: its world, a port, an interface."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kempner.cluster.interfaces import interface_environment
from kempner.cluster.ports import FIRST, LAST, free_port
from kempner.cluster.world import discover

PLACED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_alone_without_a_launcher() -> None:
    world = discover({})
    assert (world.rank, world.size, world.local_rank, world.launcher) == (0, 1, 0, "none")
    assert world.on_one_node
    assert world.warning == ""


@pytest.mark.parametrize(
    ("mark", "launcher"),
    [("TORCHELASTIC_RUN_ID", "torchrun"), ("KEMPNER_SUPERVISOR_PID", "kempner")],
)
def test_placed_by_a_launcher(mark: str, launcher: str) -> None:
    world = discover({**PLACED, mark: "1"})
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert world.launcher == launcher
    assert not world.on_one_node


def test_stale_variables_of_a_login_shell_lose_with_a_warning() -> None:
    world = discover({"RANK": "0", "WORLD_SIZE": "99"})
    assert world.size == 1
    assert "RANK=0 WORLD_SIZE=99" in world.warning


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"RANK": None}, "RANK"),
        ({"WORLD_SIZE": "many"}, "many"),
        ({"RANK": "8"}, "RANK=8 of 8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 of 4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "of 9"),
        ({"RANK": "-1"}, "RANK=-1"),
    ],
)
def test_contradictory_variables_are_refused(change: dict[str, str | None], culprit: str) -> None:
    environ = {**PLACED, "TORCHELASTIC_RUN_ID": "x", **change}
    with pytest.raises(ValueError, match=culprit):
        discover({name: value for name, value in environ.items() if value is not None})


def test_a_taken_port_is_passed_over() -> None:
    first = free_port("127.0.0.1", salt="a run")
    assert FIRST <= first < LAST
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        listener.listen()
        assert free_port("127.0.0.1", salt="a run") != first


def test_two_runs_look_at_different_ports() -> None:
    assert len({free_port("127.0.0.1", salt=f"run {n}") for n in range(20)}) > 15


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for name in ("lo", "ib0", "em4"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_one_node_talks_over_loopback(sysfs: Path) -> None:
    assert interface_environment(None, True, {}, sysfs) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_several_nodes_are_left_to_the_environment(sysfs: Path) -> None:
    assert interface_environment(None, False, {}, sysfs) == {}


def test_configured_interface_goes_to_gloo_and_nccl(sysfs: Path) -> None:
    found = interface_environment("ib0", False, {}, sysfs)
    assert found == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}


def test_what_the_user_exported_wins(sysfs: Path) -> None:
    found = interface_environment("ib0", False, {"GLOO_SOCKET_IFNAME": "em4"}, sysfs)
    assert found == {"NCCL_SOCKET_IFNAME": "ib0"}


def test_an_absent_interface_is_named_with_those_that_exist(sysfs: Path) -> None:
    with pytest.raises(ValueError, match=r"ib7 does not exist .* em4, ib0, lo"):
        interface_environment("ib7", False, {}, sysfs)
