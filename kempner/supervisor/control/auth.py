"""Where the supervisor listens, and how a rank authenticates."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from kempner.run.control.protocol import PROTOCOL, Hello, Secret, same_proof
from kempner.run.process.exit_codes import UsageError


@dataclass(frozen=True)
class Membership:
    """Who is let in: the ranks of one attempt."""

    secret: Secret
    attempt: int
    size: int

    def refusal(self, hello: Hello, challenge: str) -> str | None:
        """Why this is none of ours; None if it is."""
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


def listen(address: str, ports: range | None) -> socket.socket:
    """A listening socket on `address`, on the first free port of `ports` (None: any).

    Raises `UsageError` if there is none.
    """
    refused = None
    for port in ports if ports is not None else (0,):
        try:
            return socket.create_server((address, port), backlog=1024)
        except OSError as error:
            refused = error.strerror
    where = f"{address}, ports {ports.start} to {ports.stop - 1}" if ports else address
    raise UsageError(
        f"the supervisor cannot listen on {where} ({refused}); "
        "set supervise.control_ports to a range with a free port"
    )
