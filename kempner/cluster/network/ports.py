"""The rendezvous address of a launch: as exported by the user, or a port of rank 0's node.

All ranks compute the same short list of ports. On the first one that is free, rank 0 answers every
connection with a line that names the launch and the store's port (the beacon); the others try the
ports in turn until one answers with that line. Another service on one of the ports, such as another
run's beacon, costs a few seconds, not the attempt."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import random
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kempner.cluster.network.interfaces import Interface, common_address

FIRST, LAST = 15_000, 32_000
"""Below Linux's ephemeral range, so that no outgoing connection takes the port meanwhile."""

_TRIES = 8


def job_salt(environ: Mapping[str, str], attempt: str = "") -> str:
    """A text that identifies this launch among all on the same nodes (job, step, restart, attempt),
    the same for all its ranks. `attempt` is given by the launcher, such as its nonce."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ":".join([*(environ.get(name, "") for name in names), attempt])


def candidates(salt: str) -> list[int]:
    """Ports to try in this order, derived from the salt."""
    return random.Random(os.fsencode(salt)).sample(range(FIRST, LAST), _TRIES)


def claim(ports: Sequence[int]) -> socket.socket:
    """Listen on the first free one of `ports`, on all addresses. The socket stays bound, so that no
    other process can take the port. Raises `OSError` if all are taken."""
    for port in ports:
        try:
            return _listen(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"all ports that this launch may use are taken: {', '.join(map(str, ports))}",
    )


def free_port(address: str, salt: str) -> int:
    """A free port on `address`. Ports are tried in an order derived from `salt`, so that two runs
    try different ones. Raises `OSError` if none is free."""
    for port in random.Random(os.fsencode(salt)).sample(range(FIRST, LAST), LAST - FIRST):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {FIRST} and {LAST} on {address}")


def _listen(port: int) -> socket.socket:
    """Listen on IPv4 and, if available, IPv6; a port in TIME_WAIT can be used."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    return socket.create_server(("", port))


_ANSWER = 5.0
"""Seconds to wait for an answer on one port; a port without a listener refuses at once."""
_PAUSE = 0.1
"""Seconds between rounds over the ports until rank 0 answers."""
_LONGEST = 128
"""Bytes of an answer."""


def announce(salt: str, port: int) -> None:
    """Run the beacon in a thread: tell other ranks that the store is on `port`. Raises `OSError` if
    all ports of the launch are taken."""
    listener = claim(candidates(salt))
    threading.Thread(
        target=_answer, args=(listener, _line(salt, port)), name="beacon", daemon=True
    ).start()


def find(address: str, salt: str, timeout: float) -> int:
    """Wait for rank 0's beacon on the host `address`; the port of the launch's store. Raises
    `TimeoutError`."""
    end = time.monotonic() + timeout
    ports = candidates(salt)
    while time.monotonic() < end:
        for port in ports:
            store = _ask(address, port, salt)
            if store is not None:
                return store
        time.sleep(_PAUSE)
    raise TimeoutError(
        f"rank 0 was not found on {address} within {timeout:g} s, on none of the ports "
        f"{', '.join(map(str, ports))}"
    )


def _answer(listener: socket.socket, line: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_ANSWER)
                connection.sendall(line)
        except (ConnectionError, TimeoutError):  # this caller hung up
            continue


def _ask(address: str, port: int, salt: str) -> int | None:
    """The store's port, if the launch's beacon answers on `port`, else None."""
    try:
        with socket.create_connection((address, port), _ANSWER) as connection:
            answer = connection.makefile("rb").readline(_LONGEST)
    except OSError:
        return None
    known = _line(salt, 0).removesuffix(b"0\n")
    number = answer.removeprefix(known).removesuffix(b"\n")
    return int(number) if answer.startswith(known) and number.isdigit() else None


def _line(salt: str, port: int) -> bytes:
    launch = hashlib.sha256(salt.encode()).hexdigest()[:32]
    return f"kempner {launch} {port}\n".encode()


_GIVEN_PORT = "KEMPNER_MASTER_PORT"
"""Set in a rank's environment if the user has chosen the port; MASTER_PORT is always set."""

_HERE = ("localhost", "localhost.localdomain", "ip6-localhost")


@dataclass(frozen=True)
class ExportedMaster:
    """The exported MASTER_ADDR and MASTER_PORT; None if kempner chooses. `warning` is a sentence
    about an ignored address, or empty."""

    address: str | None = None
    port: int | None = None
    warning: str = ""

    def variables(self) -> dict[str, str]:
        """The variables that tell a rank that the user has chosen the port."""
        return {} if self.port is None else {_GIVEN_PORT: str(self.port)}


def exported_master(environ: Mapping[str, str], nodes: Sequence[str]) -> ExportedMaster:
    """The address and port that the user exported, for ranks on these nodes, the first of which has
    rank 0. Ignored are the address of another node than the first (as after a restart without that
    one) and, on several nodes, loopback addresses (as from a login shell), and variables that
    torchrun has set for its ranks. Raises `ValueError` with a sentence if MASTER_PORT is no valid
    port."""
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
    """The rendezvous address and port for ranks on these nodes, the first of which has rank 0.
    `bound` has the interfaces that ranks will use, by node, where known: the address is on the
    network that all of them use, else it is the name of the first node. Raises `ValueError` as
    `exported_master`, and `OSError` if no port is free."""
    exported = exported_master(environ, nodes)
    address = exported.address or common_address(bound, nodes) or nodes[0]
    return address, exported.port or free_port("", salt=salt)


def given_port(environ: Mapping[str, str]) -> int | None:
    """The port that the user has chosen, in a rank that a supervisor started; else None."""
    return _port(environ.get(_GIVEN_PORT, ""))


def _why_not(address: str, nodes: Sequence[str]) -> str:
    """Why the rendezvous of ranks on these nodes cannot be at `address`; empty if it can."""
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
