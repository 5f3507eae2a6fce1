"""Network interfaces of this node, read from the kernel."""

from __future__ import annotations

import socket
from ipaddress import ip_interface
from pathlib import Path

import psutil

from kempner.cluster.network.interfaces import Interface

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
    """Interface to its first IPv4 address and prefix length."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family is socket.AF_INET and name not in found:
                found[name] = ip_interface(
                    f"{address.address}/{address.netmask or 32}"
                ).with_prefixlen
    return found
