"""What Gloo and NCCL are told on a node, and where the ranks of several nodes meet."""

from __future__ import annotations

import pytest

from kempner.cluster.network.interfaces import Interface
from kempner.cluster.network.ports import choose_master
from kempner.cluster.world import World
from kempner.config.site import DistributedSection
from kempner.supervisor.launchers.rank_network import variables

LOOPBACK = Interface("lo", 772, True, "127.0.0.1/8")
MANAGEMENT = Interface("em4", 1, True, "10.20.0.11/24")
FABRIC = Interface("ib0", 1, True, "10.10.0.11/24")
DOWN = Interface("ib0", 1, False, "10.10.0.11/24")
ALL = (LOOPBACK, MANAGEMENT, FABRIC)
ALONE, HERE, SPREAD = (World(0, size, 0, local, "srun") for size, local in ((1, 1), (2, 2), (4, 2)))
ON_FABRIC = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
ON_MANAGEMENT = {"GLOO_SOCKET_IFNAME": "em4", "NCCL_SOCKET_IFNAME": "=em4"}
DEBUG = {"nccl": {"debug": "INFO"}}


@pytest.mark.parametrize(
    ("world", "interfaces", "section", "exported", "added"),
    [
        (SPREAD, ALL, {}, {}, ON_FABRIC),
        (SPREAD, ALL, DEBUG, {}, {**ON_FABRIC, "NCCL_DEBUG": "INFO"}),
        (SPREAD, ALL, DEBUG, {"NCCL_DEBUG": "WARN"}, ON_FABRIC),
        (SPREAD, ALL, {"interface": "em4"}, {}, ON_MANAGEMENT),
        (SPREAD, ALL, {}, {"GLOO_SOCKET_IFNAME": "em4"}, {"NCCL_SOCKET_IFNAME": "=em4"}),
        (SPREAD, ALL, {}, {"NCCL_SOCKET_IFNAME": "ib"}, {"GLOO_SOCKET_IFNAME": "ib0"}),
        (SPREAD, ALL, {}, {"GLOO_SOCKET_IFNAME": "ib9,em4,ib0"}, {"NCCL_SOCKET_IFNAME": "=em4"}),
        (SPREAD, ALL, {}, {"GLOO_SOCKET_IFNAME": "ib9"}, {}),  # it may use NCCL alone
        (SPREAD, (LOOPBACK, MANAGEMENT, DOWN), {}, {"MASTER_ADDR": ""}, {}),
        (HERE, ALL, DEBUG, {}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO"}),
        # It may be a launcher of ranks on other nodes.
        (ALONE, ALL, DEBUG, {}, {"NCCL_DEBUG": "INFO"}),
        (ALONE, ALL, {"interface": "ib9"}, {}, {}),
    ],
)
def test_a_program_gets_its_nodes_network_unless_the_user_says_another(
    world: World,
    interfaces: tuple[Interface, ...],
    section: dict[str, object],
    exported: dict[str, str],
    added: dict[str, str],
) -> None:
    configured = DistributedSection.model_validate(section)
    assert variables(exported, configured, world, interfaces) == added


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"distributed\.interface=ib9 does not exist on this node"):
        variables({}, DistributedSection(interface="ib9"), SPREAD, ALL)


@pytest.mark.parametrize(
    ("nodes", "bound", "exported", "address"),
    [
        (("a", "b"), {"a": FABRIC, "b": FABRIC}, {}, "10.10.0.11"),
        (("a", "b"), {"a": FABRIC}, {}, "10.10.0.11"),
        (("a", "b"), {"a": FABRIC, "b": FABRIC}, {"MASTER_ADDR": "10.20.0.11"}, "10.20.0.11"),
        # By their name they all meet, and can say what is wrong.
        (("a", "b"), {"a": FABRIC, "b": MANAGEMENT}, {}, "a"),
        (("a", "b"), {"a": None, "b": None}, {}, "a"),
        (("a", "b"), {"b": FABRIC}, {}, "a"),
        (("a", "b"), {}, {}, "a"),
        (("a", "b"), {"a": MANAGEMENT, "b": FABRIC}, {}, "a"),
        (("a", "b"), {"a": FABRIC, "b": None}, {}, "a"),
        (("a", "b"), {"a": MANAGEMENT, "b": MANAGEMENT}, {}, "10.20.0.11"),
        (("a",), {"a": FABRIC}, {}, "a"),
        # A node without ranks of this attempt has no say.
        (("a", "b"), {"a": FABRIC, "b": FABRIC, "c": MANAGEMENT}, {}, "10.10.0.11"),
    ],
)
def test_ranks_meet_on_the_network_that_all_of_them_use(
    nodes: tuple[str, ...],
    bound: dict[str, Interface | None],
    exported: dict[str, str],
    address: str,
) -> None:
    assert choose_master(exported, nodes, "salt", bound)[0] == address
