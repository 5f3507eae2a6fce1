"""Where a process is: its world, a port, an interface."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kempner.cluster.network.interfaces import (
    INFINIBAND,
    Interface,
    InterfaceChoice,
    InterfaceNetwork,
    choose,
    disagreement,
    read_interfaces,
    route_address,
)
from kempner.cluster.network.ports import FIRST, LAST, free_port
from kempner.cluster.world import discover

PLACED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_alone_without_a_launcher() -> None:
    world = discover({})
    assert (world.rank, world.size, world.local_rank, world.launcher) == (0, 1, 0, "none")
    assert world.on_one_node
    assert world.warning == ""


@pytest.mark.parametrize(
    ("mark", "launcher"),
    [
        ("TORCHELASTIC_RUN_ID", "torchrun"),
        ("KEMPNER_SUPERVISOR_PID", "kempner"),
        ("KEMPNER_OF_AGENT", "agent"),
    ],
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


# Interfaces


LOOPBACK = Interface("lo", 772, True, "127.0.0.1/8")
MANAGEMENT = Interface("em4", 1, True, "10.20.0.11/24")
IB = Interface("ib0", INFINIBAND, True, "10.10.0.11/24")


def pick(
    *interfaces: Interface,
    on_one_node: bool = False,
    configured: str | None = None,
    route_address: str = "10.20.0.11",
    **environ: str,
) -> InterfaceChoice:
    return choose(
        [LOOPBACK, MANAGEMENT, *interfaces],
        on_one_node=on_one_node,
        configured=configured,
        environ=environ,
        route_address=route_address,
    )


@pytest.mark.parametrize(
    ("interfaces", "chosen"),
    [
        ([IB], "ib0"),
        ([replace(IB, name="ibp65s0")], "ibp65s0"),
        ([replace(IB, name="ibs2", kind=1)], "ibs2"),
        ([replace(IB, name="enp1s0")], "enp1s0"),
        ([replace(IB, name="hsn0", kind=1)], "hsn0"),
        ([replace(IB, name="bond0", kind=1)], "bond0"),
        ([replace(IB, name="bond0"), replace(IB, name="ib1", up=False)], "bond0"),
        ([replace(IB, name="ib10"), replace(IB, name="ib2")], "ib2"),
        ([replace(IB, name="ib0.8001"), IB], "ib0"),
        ([replace(IB, name="ib0.8001"), replace(IB, address="")], "ib0.8001"),
        ([replace(IB, name="bond0", kind=1), replace(IB, name="hsn1", kind=1)], "hsn1"),
        ([replace(IB, name="ib0", kind=1), replace(IB, name="ib1")], "ib1"),
    ],
)
def test_the_fabric_is_found_by_type_and_name(interfaces: list[Interface], chosen: str) -> None:
    choice = pick(*interfaces)
    assert choice.interface is not None
    assert (choice.interface.name, choice.warning) == (chosen, "")


@pytest.mark.parametrize(
    "useless",
    [
        replace(IB, up=False),
        replace(IB, address=""),
        Interface("ibmveth0", 1, True, "10.9.0.1/24"),
        Interface("docker0", 1, True, "172.17.0.1/16"),
    ],
)
def test_without_a_fabric_the_way_to_the_master_is_taken(useless: Interface) -> None:
    choice = pick(useless)
    assert choice.interface == MANAGEMENT
    assert "em4 (10.20.0.11), which leads to the master" in choice.warning


def test_without_a_way_to_the_master_gloo_is_left_alone() -> None:
    choice = pick(route_address="")
    assert choice.interface is None
    assert choice.environment({}) == {}
    assert "no InfiniBand" in choice.warning


def test_one_node_talks_over_loopback() -> None:
    choice = pick(IB, on_one_node=True)
    assert choice.environment({}) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_nccl_is_told_the_whole_name() -> None:
    assert pick(IB).environment({}) == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
    }


@pytest.mark.parametrize(
    ("configured", "environ", "chosen", "set_now"),
    [
        ("em4", {}, "em4", {"GLOO_SOCKET_IFNAME": "em4", "NCCL_SOCKET_IFNAME": "=em4"}),
        ("ib0@if8", {}, "ib0", {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}),
        (None, {"GLOO_SOCKET_IFNAME": "em4"}, "em4", {"NCCL_SOCKET_IFNAME": "=em4"}),
        ("ib0", {"GLOO_SOCKET_IFNAME": "em4"}, "em4", {"NCCL_SOCKET_IFNAME": "=em4"}),
        (None, {"NCCL_SOCKET_IFNAME": "eth"}, "ib0", {"GLOO_SOCKET_IFNAME": "ib0"}),
        (None, {"NCCL_SOCKET_IFNAME": "^docker,lo"}, "ib0", {"GLOO_SOCKET_IFNAME": "ib0"}),
        (None, {"NCCL_SOCKET_IFNAME": "ib0,ib1"}, "ib0", {"GLOO_SOCKET_IFNAME": "ib0"}),
        (None, {"GLOO_SOCKET_IFNAME": "em4,ib0"}, "em4", {"NCCL_SOCKET_IFNAME": "=em4"}),
        ("em4", {"GLOO_SOCKET_IFNAME": "ib7,ib0"}, "ib0", {"NCCL_SOCKET_IFNAME": "=ib0"}),
        ("em4", {"GLOO_SOCKET_IFNAME": ""}, "em4", {"NCCL_SOCKET_IFNAME": "=em4"}),
    ],
)
def test_what_the_user_says_wins(
    configured: str | None, environ: dict[str, str], chosen: str, set_now: dict[str, str]
) -> None:
    choice = pick(IB, configured=configured, **environ)
    assert choice.interface is not None
    assert choice.interface.name == chosen
    assert choice.environment(environ) == set_now


@pytest.mark.parametrize(
    ("configured", "environ", "sentence"),
    [
        ("ib7", {}, r"distributed.interface=ib7 does not exist on this node; it has ib0 .*, em4 "),
        (None, {"GLOO_SOCKET_IFNAME": "ib7"}, r"GLOO_SOCKET_IFNAME=ib7 does not exist"),
        (None, {"GLOO_SOCKET_IFNAME": "ib7,ib1"}, r"GLOO_SOCKET_IFNAME=ib7,ib1 does not exist"),
        ("ib1", {}, r"distributed.interface=ib1 is down or has no IPv4 address"),
    ],
)
def test_an_interface_that_cannot_be_used_is_refused(
    configured: str | None, environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        pick(IB, replace(IB, name="ib1", up=False), configured=configured, **environ)


def test_nodes_may_name_the_same_network_differently() -> None:
    assert disagreement({"node1": IB, "node2": replace(IB, name="ibp65s0")}) == ""
    assert disagreement({"node1": MANAGEMENT, "node2": None}) == ""


def test_a_node_off_the_fabric_is_named_with_all_interfaces() -> None:
    sentence = disagreement({"node1": IB, "node2": MANAGEMENT, "node3": IB})
    assert "fix the interface of node2, leave it out" in sentence
    for part in ("node1: ib0 (10.10.0.11)", "node2: em4 (10.20.0.11)", "node3: ib0"):
        assert part in sentence


def test_this_machines_interfaces_are_read() -> None:
    loopback = next(i for i in read_interfaces() if i.name == "lo")
    assert (loopback.address, loopback.network, loopback.usable) == (
        "127.0.0.1/8",
        InterfaceNetwork.LOOPBACK,
        True,
    )


def test_type_and_state_are_read_from_sysfs(tmp_path: Path) -> None:
    for name, kind, state in (("ib0", "32", "up"), ("ib1", "32", "down"), ("lo", "772", "unknown")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    (tmp_path / "bonding_masters").write_text("bond0\n")
    found = {i.name: (i.kind, i.up) for i in read_interfaces(tmp_path)}
    assert found == {"ib0": (32, True), "ib1": (32, False), "lo": (772, True)}


def test_the_kernel_says_from_where_a_host_is_reached() -> None:
    assert route_address("127.0.0.1") == "127.0.0.1"
    assert route_address("::1") == ""
