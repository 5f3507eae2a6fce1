"""Chooses ports for what a launch hosts on rank 0's node."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping, Sequence

FIRST, LAST = 15_000, 32_000
"""Below Linux's ephemeral range, so that no outgoing connection takes the port in between."""

_TRIES = 8


def job_salt(environ: Mapping[str, str], attempt: str = "") -> str:
    """What tells this launch from every other on the same nodes: job, step, requeue, attempt.

    The same for all its ranks. `attempt` is whatever the launcher says (its nonce, say).
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ":".join([*(environ.get(name, "") for name in names), attempt])


def candidates(salt: str) -> list[int]:
    """Different ports to try in this order, the same wherever the salt is."""
    return random.Random(salt).sample(range(FIRST, LAST), _TRIES)


def claim(ports: Sequence[int]) -> socket.socket:
    """A socket that listens on the first of `ports` that is free on this machine, on all addresses.

    It is bound for good: unlike with a port that was only probed, nobody can take it before its
    use. Raises `OSError` with a sentence if all are taken.
    """
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
    """A port on `address` (of this machine) that nobody listens on.

    The search starts at a place derived from `salt`, so that two runs that look at the same moment
    look at different ports. Raises `OSError` if none is free.
    """
    for port in random.Random(salt).sample(range(FIRST, LAST), LAST - FIRST):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {FIRST} and {LAST} on {address}")


def _listen(port: int) -> socket.socket:
    """On IPv4 and IPv6 where the machine has both; a port in TIME_WAIT is no obstacle."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    return socket.create_server(("", port))
