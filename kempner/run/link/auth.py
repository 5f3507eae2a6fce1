"""How the two sides of a link prove to each other who they are.

The listener speaks first (`Challenge`), the caller proves that it knows the secret (`Hello`), the
listener proves the same (`Welcome`); the secret itself is never sent. A proof is HMAC-SHA256 (RFC
2104) over both sides' nonces, so that none can be used twice, and over both roles, the listener's
endpoint and all that the caller says of itself. Its key is derived from the secret for the roles,
in their order, and the endpoint. So a proof for one listener is invalid at another, even if both
know the same secret: a handshake cannot be relayed between them.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from kempner.run.link.messages import (
    PROTOCOL,
    Caller,
    Challenge,
    Hello,
    Message,
    MessageError,
    Role,
    Welcome,
    decoder,
)
from kempner.run.link.wire import PATIENCE, Connection

decode_hello = decoder(Hello)
_decode_opening = decoder(Challenge | Welcome)

_Opening = TypeVar("_Opening", bound=Message)


@dataclass(frozen=True)
class Endpoint:
    """What a listener is for: the role of its owner, the roles of its callers, and a name that
    tells listeners with the same secret apart."""

    owner: Role
    purpose: str
    callers: tuple[Role, ...]
    name: str = ""


AGENTS = Endpoint(Role.SUPERVISOR, "agents", (Role.AGENT, Role.GUEST))
"""Where agents call the supervisor, those of other jobs, too."""


def ranks_at(socket: str) -> Endpoint:
    """Where the ranks of one node call their agent. Each attempt has its own secret, and no two
    sockets have the same name."""
    return Endpoint(Role.AGENT, "ranks", (Role.RANK,), socket)


def copies_of(node: str) -> Endpoint:
    """Where the agent of a node receives copies; all agents of a supervisor have one secret."""
    return Endpoint(Role.KEEPER, "copies", (Role.SENDER,), node)


@dataclass(frozen=True)
class Secret:
    """The token that only the two sides of a link know.

    An attempt's is passed only in the environment of its ranks, which no other user can read.
    """

    token: str = field(repr=False)

    @classmethod
    def new(cls) -> Secret:
        """A new secret of 256 random bits."""
        return cls(secrets.token_hex(32))

    def seal(self, token: str) -> tuple[str, str]:
        """Encrypt a token of 256 bits with a one-time pad; returns it and the nonce for `unseal`.

        The pad is HMAC-SHA256 of a nonce that is used once; without the secret it looks random.
        """
        nonce = new_nonce()
        return self._under_pad(token, nonce), nonce

    def unseal(self, sealed: tuple[str, str]) -> str:

        return self._under_pad(*sealed)

    def _under_pad(self, text: str, nonce: str) -> str:
        pad = self.derived("pad", nonce)
        return bytes(a ^ b for a, b in zip(bytes.fromhex(text), pad, strict=True)).hex()

    def derived(self, *purpose: str) -> bytes:
        """A key for one purpose, which reveals nothing about the secret or another key."""
        return hmac.digest(self.token.encode(), json.dumps(purpose).encode(), "sha256")


def new_nonce() -> str:
    """128 random bits, in hexadecimal."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Door:
    """Admits callers that know the secret and have a role that may call here."""

    secret: Secret
    endpoint: Endpoint

    def refusal(self, hello: Hello, challenge: str) -> str:
        """Why a caller is refused; empty if it is admitted."""
        if hello.version != PROTOCOL:
            return f"it speaks version {hello.version} of the protocol, this is {PROTOCOL}"
        expected = self._proof(hello.caller, challenge, hello.nonce)
        if not hmac.compare_digest(hello.proof, expected):
            return "it does not know the token"
        if hello.caller.role not in self.endpoint.callers:
            return f"it calls as {hello.caller.role}"
        return ""

    def welcome(self, hello: Hello, challenge: str) -> Welcome:

        return Welcome(self._proof(hello.caller, challenge, hello.nonce, of_caller=False))

    def admit(self, wire: Connection) -> Caller:
        """Have a caller prove itself over a new connection. Raises `OSError`, and `MessageError` if
        it cannot."""
        challenge = Challenge(new_nonce())
        wire.send(challenge)
        hello: Hello = decode_hello(wire.wait_for_line(PATIENCE))
        if refusal := self.refusal(hello, challenge.nonce):
            raise MessageError(refusal)
        wire.send(self.welcome(hello, challenge.nonce))
        return hello.caller

    def introduce(self, caller: Caller, challenge: str) -> Hello:
        """The caller's first message; `challenge` is the listener's nonce."""
        nonce = new_nonce()
        return Hello(nonce, self._proof(caller, challenge, nonce), caller)

    def open(self, connection: socket.socket, caller: Caller) -> Connection:
        """The connection, once both sides have proved who they are on it.

        Raises `OSError` if it breaks, `MessageError` if it does not lead to this endpoint.
        """
        wire = Connection(connection)
        try:
            self._open(wire, caller)
        except (OSError, MessageError):
            wire.close()
            raise
        return wire

    def _open(self, wire: Connection, caller: Caller) -> None:
        challenge = _expect(wire, Challenge)
        if challenge.version != PROTOCOL:
            theirs = challenge.version
            raise MessageError(f"it speaks version {theirs} of the protocol, not {PROTOCOL}")
        hello = self.introduce(caller, challenge.nonce)
        wire.send(hello)
        expected = self.welcome(hello, challenge.nonce).proof
        if not hmac.compare_digest(_expect(wire, Welcome).proof, expected):
            raise MessageError("the listener there does not know the token")

    def _proof(self, caller: Caller, challenge: str, nonce: str, of_caller: bool = True) -> str:
        roles = (caller.role, self.endpoint.owner)
        by, to = roles if of_caller else reversed(roles)
        between = (by, to, self.endpoint.purpose, self.endpoint.name)
        statement = (*between, PROTOCOL, challenge, nonce, asdict(caller))
        key = self.secret.derived("proof", *between)
        return hmac.new(key, json.dumps(statement).encode(), "sha256").hexdigest()


def _expect(wire: Connection, kind: type[_Opening]) -> _Opening:
    message = _decode_opening(wire.wait_for_line(PATIENCE))
    if not isinstance(message, kind):
        raise MessageError(f"it says {message.kind} instead of {kind.__name__.lower()}")
    return message
