"""Where the supervisor listens, and how a rank authenticates."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kempner.run.control.protocol import PROTOCOL, Hello, Secret, same_proof
from kempner.run.process.exit_codes import UsageError

_TRIES = 8
"""A port that the kernel chose for one address may be taken on another."""


@dataclass(frozen=True)
class Membership:
    """Accepts the ranks of one attempt."""

    secret: Secret
    attempt: int
    size: int

    def refusal(self, hello: Hello, challenge: str) -> str | None:
        """Why a connection is not of a rank of this attempt; None if it is."""
        expected = self.secret.proof_of_rank(challenge, hello.nonce, hello.attempt, hello.rank)
        if hello.version != PROTOCOL:
            return f"it speaks version {hello.version} of the protocol, this is {PROTOCOL}"
        if not same_proof(hello.proof, expected):
            return "it does not know the token"
        if hello.attempt != self.attempt:
            return f"it belongs to attempt {hello.attempt}"
        if hello.rank >= self.size:
            return f"it claims to be rank {hello.rank} of {self.size}"
        return None


def listen(addresses: Sequence[str], ports: range | None) -> list[socket.socket]:
    """A listening socket on each address, all on the first port of `ports` that is free (None:
    any).

    Raises `UsageError` if there is none.
    """
    refused = None
    for port in ports if ports is not None else (0,) * _TRIES:
        try:
            return _listen(addresses, port)
        except OSError as error:
            refused = error.strerror
    where = " and ".join(addresses)
    where = f"{where}, ports {ports.start} to {ports.stop - 1}" if ports else where
    raise UsageError(
        f"the supervisor cannot listen on {where} ({refused}); "
        "set supervise.control_ports to a range with a free port"
    )


def _listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    with ExitStack() as opened:
        for address in addresses:
            listeners.append(socket.create_server((address, port), backlog=1024))
            opened.enter_context(listeners[-1])
            port = int(listeners[-1].getsockname()[1])
        opened.pop_all()
    return listeners
