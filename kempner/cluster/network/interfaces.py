"""Chooses the network interface for Gloo and NCCL.

Decided on each node by its own ranks: interfaces are named differently on different nodes. Gloo
would otherwise bind to whatever address the host's name resolves to, which on most clusters is the
management network.
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

# Names of the compute fabric by custom; an interface that is bonded or plays InfiniBand in a
# virtual machine has Ethernet's type.
_NAMES = (re.compile(r"ib[ps]?\d"), re.compile(r"hsn\d"), re.compile(r"bond\d"))
_NO_FABRIC = len(_NAMES) + 1


class InterfaceNetwork(Enum):
    LOOPBACK = "loopback"
    FABRIC = "the compute fabric"
    OTHER = "another network"


@dataclass(frozen=True)
class Interface:
    """An interface of this node: `kind` is the number in its sysfs `type`, `address` its first IPv4
    address with the length of its prefix (`10.10.0.11/24`), empty if it has none."""

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
    """The interface to bind to, None to leave it to Gloo; `reason` says why, `warning` is a
    sentence for the log, empty if all is well."""

    interface: Interface | None
    reason: str
    warning: str = ""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        if self.interface is None:
            return {}
        wanted = {"GLOO_SOCKET_IFNAME": self.interface.name}
        if self.interface.network is not InterfaceNetwork.LOOPBACK:
            # NCCL takes a name for the beginning of one: `=` asks for this interface alone.
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
    """The interface for this node's ranks. What the user exported, one name or several with commas
    between, wins over `configured` (the key distributed.interface), and that over what is found:
    loopback if all ranks are here, the fabric, and at last the interface that has `route_address`,
    the local address from which this node reaches the master (empty if unknown). Raises
    `ValueError` with a sentence if the wanted interface cannot be used here."""
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
    """The interface that a person means: `ip` shows a virtual one as `ib0@if8`. Raises `ValueError`
    with a sentence, in which `source` says who wants it, if it cannot be used."""
    if (found := _usable(interfaces, wanted)) is not None:
        return found
    name = _name(wanted)
    there = ", ".join(_described(i) for i in sorted(interfaces, key=_order)) or "none"
    known = any(interface.name == name for interface in interfaces)
    trouble = "is down or has no IPv4 address" if known else "does not exist"
    raise ValueError(f"{source}={wanted} {trouble} on this node; it has {there}")


def nodes_off_network(bound: Mapping[str, Interface | None]) -> list[str]:
    """The nodes that are not on the network that most of them are on; none if all agree. `bound`
    maps a node's name to what its ranks are bound to. Names may differ between nodes."""
    other = InterfaceNetwork.OTHER
    networks = {node: other if i is None else i.network for node, i in bound.items()}
    if len(set(networks.values())) < 2:
        return []
    rare = min(set(networks.values()), key=lambda n: (list(networks.values()).count(n), n.value))
    return [node for node, network in networks.items() if network is rare]


def common_address(bound: Mapping[str, Interface | None], nodes: Sequence[str]) -> str:
    """Where all `nodes` reach the first of them, on the network that their ranks use. `bound` is as
    for `nodes_off_network`, as far as it is known. Empty, so that the node's name is used, if the
    first is not known, some use another network, or there are no others."""
    known = {node: bound[node] for node in nodes if node in bound}
    first = known.get(nodes[0])
    if first is None or len(nodes) == 1 or nodes_off_network(known):
        return ""
    return first.ip


def disagreement(bound: Mapping[str, Interface | None]) -> str:
    """One sentence if some nodes (`bound` as above) are on the fabric and others are not, else
    nothing."""
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
    """How likely an interface leads to the fabric; the smaller the better."""
    if interface.kind == INFINIBAND:
        return 0
    matches = (place for place, name in enumerate(_NAMES, 1) if name.match(interface.name))
    return next(matches, _NO_FABRIC)


def _order(interface: Interface) -> tuple[int, bool, int, str]:
    """By likelihood; then a parent before its VLANs and partitions, ib2 before ib10."""
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
        except (FileNotFoundError, NotADirectoryError):  # a file, or an interface that just left
            continue
        # A loopback's state is "unknown"; an interface without a carrier is not up.
        up = state in ("up", "unknown")
        found.append(Interface(entry.name, kind, up, addresses.get(entry.name, "")))
    return found


def route_address(host: str) -> str:
    """The local IPv4 address from which packets to `host` leave; empty if there is no way."""
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
