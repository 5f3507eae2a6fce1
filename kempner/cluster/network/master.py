"""Where the ranks meet if the user says so, by MASTER_ADDR and MASTER_PORT in the environment.

What is exported wins; otherwise rank 0's node is the address, on the network that the ranks use,
and the port follows from the job and the launch (`ports.py`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kempner.cluster.network.interfaces import Interface, common_address
from kempner.cluster.network.ports import free_port

_GIVEN_PORT = "KEMPNER_MASTER_PORT"
"""Is in the environment of a rank whose user has chosen the port: MASTER_PORT is always there."""

_HERE = ("localhost", "localhost.localdomain", "ip6-localhost")


@dataclass(frozen=True)
class ExportedMaster:
    """What the user says; None where the choice is left to kempner. `warning` is a sentence about
    what is ignored, empty if nothing is."""

    address: str | None = None
    port: int | None = None
    warning: str = ""

    def variables(self) -> dict[str, str]:
        """What tells a rank of our own that the port is the user's choice."""
        return {} if self.port is None else {_GIVEN_PORT: str(self.port)}


def exported_master(environ: Mapping[str, str], nodes: Sequence[str]) -> ExportedMaster:
    """What a user has exported for ranks on these nodes, of which the first has rank 0.

    An address that cannot be rank 0's is ignored: that of another node, as after a restart without
    the one that was named, and of "this machine" where there are several, as from a login shell.
    What torchrun has set for its own ranks is not the user's word. Raises `ValueError` with a
    sentence if the port is none.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return ExportedMaster()
    port = _port(environ.get("MASTER_PORT", ""))
    address = environ.get("MASTER_ADDR") or None
    wrong = "" if address is None else _why_not(address, nodes)
    if wrong:
        return ExportedMaster(None, port, f"MASTER_ADDR={address} is ignored: {wrong}")
    return ExportedMaster(address, port)


def choose_master(
    environ: Mapping[str, str],
    nodes: Sequence[str],
    salt: str,
    bound: Mapping[str, Interface | None] = MappingProxyType({}),
) -> tuple[str, int]:
    """Address and port for ranks on these nodes, the first of which has rank 0.

    `bound` is what the ranks of nodes will bind to, as far as it is known: the address is on the
    network that all of them use, and else the name of the first. Raises `ValueError` as
    `exported_master`, `OSError` if no port is free.
    """
    said = exported_master(environ, nodes)
    address = said.address or common_address(bound, nodes) or nodes[0]
    return address, said.port or free_port("", salt=salt)


def given_port(environ: Mapping[str, str]) -> int | None:
    """The port that the user has chosen, in a rank that a supervisor has started."""
    return _port(environ.get(_GIVEN_PORT, ""))


def _why_not(address: str, nodes: Sequence[str]) -> str:
    """Why ranks on these nodes cannot meet there; empty if they may."""
    if len(nodes) > 1 and _is_loopback(address):
        return f"the ranks are on {len(nodes)} nodes"
    names = (address, address.partition(".")[0])  # with or without its domain
    if any(node in names for node in nodes[1:]):
        return f"rank 0 is on {nodes[0]}"
    return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in _HERE


def _port(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(f"MASTER_PORT={text} in the environment is not a port")
    return int(text)
