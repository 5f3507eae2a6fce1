"""Chooses the network interface for Gloo and NCCL.

Each node's ranks choose for themselves, since interfaces are named differently on different nodes.
Gloo would otherwise bind to the address to which the host's name resolves, which on most clusters
is on the management network.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_interface
from pathlib import Path

import psutil

INFINIBAND = 32
"""ARPHRD_INFINIBAND of linux/if_arp.h, as /sys/class/net/*/type shows it."""

# Customary names of the compute fabric: bonded interfaces, and those that emulate InfiniBand in a
# virtual machine, have Ethernet's type.
_NAMES = (re.compile(r"ib[ps]?\d"), re.compile(r"hsn\d"), re.compile(r"bond\d"))
_NO_FABRIC = len(_NAMES) + 1


class InterfaceNetwork(Enum):
    LOOPBACK = "loopback"
    FABRIC = "the compute fabric"
    OTHER = "another network"


@dataclass(frozen=True)
class Interface:
    """An interface of this node: `kind` is its sysfs `type`, `address` its first IPv4 address with
    the prefix length (`10.10.0.11/24`), empty if it has none, and `ip` the address alone."""

    name: str
    kind: int
    up: bool
    address: str

    @property
    def ip(self) -> str:
        return self.address.partition("/")[0]

    @property
    def usable(self) -> bool:
        return self.up and bool(self.address)

    @property
    def network(self) -> InterfaceNetwork:
        if self.address and ipaddress.ip_interface(self.address).is_loopback:
            return InterfaceNetwork.LOOPBACK
        return InterfaceNetwork.FABRIC if _place(self) < _NO_FABRIC else InterfaceNetwork.OTHER


@dataclass(frozen=True)
class InterfaceChoice:
    """The interface to bind to (None: leave it to Gloo), the `reason`, and a `warning` for the log,
    or empty."""

    interface: Interface | None
    reason: str
    warning: str = ""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        if self.interface is None:
            return {}
        wanted = {"GLOO_SOCKET_IFNAME": self.interface.name}
        if self.interface.network is not InterfaceNetwork.LOOPBACK:
            # NCCL takes a name as a prefix; `=` means exactly this interface.
            wanted["NCCL_SOCKET_IFNAME"] = f"={self.interface.name}"
        return {name: value for name, value in wanted.items() if name not in environ}


def choose(
    interfaces: Sequence[Interface],
    *,
    on_one_node: bool,
    configured: str | None,
    environ: Mapping[str, str],
    route_address: str,
) -> InterfaceChoice:
    """The interface for this node's ranks. In order of precedence: the exported GLOO_SOCKET_IFNAME
    (one name or a comma-separated list), `configured` (the key distributed.interface), the loopback
    if all ranks are on this node, the compute fabric, and the interface with `route_address`, the
    local address from which this node reaches the master (empty if unknown). Raises `ValueError`
    with a sentence if an exported or configured interface cannot be used."""
    if exported := environ.get("GLOO_SOCKET_IFNAME"):
        usable = (name for name in exported.split(",") if _usable(interfaces, name))
        found = named(interfaces, next(usable, exported), "GLOO_SOCKET_IFNAME")
        return InterfaceChoice(found, f"GLOO_SOCKET_IFNAME={exported}")
    if configured:
        found = named(interfaces, configured, "distributed.interface")
        return InterfaceChoice(found, f"distributed.interface={configured}")
    if on_one_node:
        # The address of the host's name may belong to a network that is down.
        loopback = (i for i in interfaces if i.usable and i.network is InterfaceNetwork.LOOPBACK)
        return InterfaceChoice(next(loopback, None), "all ranks are on this node")
    fabric = [i for i in interfaces if i.usable and i.network is InterfaceNetwork.FABRIC]
    if fabric:
        return InterfaceChoice(min(fabric, key=_order), "it leads to the compute fabric")
    return _routed(interfaces, route_address)


def named(interfaces: Sequence[Interface], wanted: str, source: str) -> Interface:
    """The interface of this name; as `ip` shows it, too, such as `ib0@if8`. Raises `ValueError`
    with a sentence that names the `source` if it cannot be used."""
    if (found := _usable(interfaces, wanted)) is not None:
        return found
    name = _name(wanted)
    there = ", ".join(_described(i) for i in sorted(interfaces, key=_order)) or "none"
    known = any(interface.name == name for interface in interfaces)
    trouble = "is down or has no IPv4 address" if known else "does not exist"
    raise ValueError(f"{source}={wanted} {trouble} on this node; it has {there}")


def nodes_off_network(bound: Mapping[str, Interface | None]) -> list[str]:
    """The nodes whose ranks use another network than most; empty if all agree. `bound` has each
    node's interface, whose names may differ."""
    other = InterfaceNetwork.OTHER
    networks = {node: other if i is None else i.network for node, i in bound.items()}
    if len(set(networks.values())) < 2:
        return []
    rare = min(set(networks.values()), key=lambda n: (list(networks.values()).count(n), n.value))
    return [node for node, network in networks.items() if network is rare]


def common_address(bound: Mapping[str, Interface | None], nodes: Sequence[str]) -> str:
    """The address at which all `nodes` reach the first, on the network that their ranks use.
    `bound` as in `nodes_off_network`, possibly incomplete. Empty, so that the node's name is used,
    if the first node's interface is unknown, if some use another network, or if there is one node
    only."""
    known = {node: bound[node] for node in nodes if node in bound}
    first = known.get(nodes[0])
    if first is None or len(nodes) == 1 or nodes_off_network(known):
        return ""
    return first.ip


def disagreement(bound: Mapping[str, Interface | None]) -> str:
    """A sentence if some nodes (`bound` as above) use the fabric and others do not, else empty."""
    odd = nodes_off_network(bound)
    if not odd:
        return ""
    listed = "; ".join(f"{node}: {_described(interface)}" for node, interface in bound.items())
    return (
        f"the nodes would not all use the same network ({listed}): fix the interface of "
        f"{', '.join(odd)}, leave {'it' if len(odd) == 1 else 'them'} out with "
        "`sbatch --exclude`, or set distributed.interface"
    )


def _usable(interfaces: Sequence[Interface], wanted: str) -> Interface | None:
    there = (each for each in interfaces if each.name == _name(wanted) and each.usable)
    return next(there, None)


def _name(wanted: str) -> str:
    return wanted.partition("@")[0].removeprefix("=")


def _routed(interfaces: Sequence[Interface], route_address: str) -> InterfaceChoice:
    missing = "no InfiniBand or other fabric interface is up on this node"
    for interface in interfaces:
        if interface.usable and interface.ip == route_address:
            return InterfaceChoice(
                interface,
                "it leads to the master",
                f"{missing}: process groups use {_described(interface)}, which leads to the master",
            )
    return InterfaceChoice(
        None, "nothing better was found", f"{missing}: Gloo binds to the host's name"
    )


def _place(interface: Interface) -> int:
    """Rank of an interface as a candidate for the fabric; lower is better."""
    if interface.kind == INFINIBAND:
        return 0
    matches = (place for place, name in enumerate(_NAMES, 1) if name.match(interface.name))
    return next(matches, _NO_FABRIC)


def _order(interface: Interface) -> tuple[int, bool, int, str]:
    """Sort key: by `_place`, then a parent before its VLANs and partitions, ib2 before ib10."""
    digits = re.findall(r"\d+", interface.name)
    return (
        _place(interface),
        "." in interface.name,
        int(digits[-1]) if digits else 0,
        interface.name,
    )


def _described(interface: Interface | None) -> str:
    if interface is None:
        return "left to Gloo"
    details = interface.ip or "no IPv4 address"
    return f"{interface.name} ({details}{'' if interface.up else ', down'})"


_SYSFS = Path("/sys/class/net")


def read_interfaces(sysfs: Path = _SYSFS) -> list[Interface]:
    """The interfaces of this node. Raises `OSError` if the kernel does not show them."""
    addresses = _addresses()
    found = []
    for entry in sorted(sysfs.iterdir()):
        try:
            kind = int((entry / "type").read_text())
            state = (entry / "operstate").read_text().strip()
        except (FileNotFoundError, NotADirectoryError):  # a file, or a removed interface
            continue
        # A loopback's state is "unknown"; an interface without a carrier is not up.
        up = state in ("up", "unknown")
        found.append(Interface(entry.name, kind, up, addresses.get(entry.name, "")))
    return found


def route_address(host: str) -> str:
    """The local IPv4 address from which packets to `host` leave; empty if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: the kernel only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _addresses() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family is socket.AF_INET and name not in found:
                found[name] = ip_interface(
                    f"{address.address}/{address.netmask or 32}"
                ).with_prefixlen
    return found
