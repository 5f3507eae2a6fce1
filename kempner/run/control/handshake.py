"""Opens the control channel from a rank: connect, and mutual authentication."""

from __future__ import annotations

import os
import socket
from typing import TypeVar

from kempner.run.control.launch_env import Control, Launch
from kempner.run.control.protocol import (
    PROTOCOL,
    Challenge,
    Hello,
    MessageError,
    Secret,
    Welcome,
    decode_from_rank,
    decode_from_supervisor,
    new_nonce,
    same_proof,
)
from kempner.run.control.transport import Connection

PATIENCE = 2.0
"""Seconds that each step of it may take."""

AFTER_REFUSAL = 0.5
"""Seconds for a further address once one was refused: as a rule the supervisor is gone."""

T = TypeVar("T")


def open_wire(launch: Launch, rank: int) -> Connection:
    """A connection on which both sides have proved that they belong to one attempt.

    Raises `OSError` if there is no connection, `MessageError` if it is not to the supervisor.
    """
    wire = Connection(connect(launch.control))
    try:
        _open(wire, launch, rank)
    except (OSError, MessageError):
        wire.close()
        raise
    return wire


def introduce(launch: Launch, rank: int, challenge: str) -> Hello:
    """What a rank says first; `challenge` is the supervisor's nonce, empty in a file."""
    number, nonce = launch.attempt.number, new_nonce()
    proof = launch.control.secret.proof_of_rank(challenge, nonce, number, rank)
    return Hello(nonce, proof, number, rank, socket.gethostname(), os.getpid())


def admit(wire: Connection, secret: Secret) -> int:
    """Have who connects prove that it knows the secret; its rank. Raises `OSError`, and
    `MessageError` if it cannot."""
    nonce = new_nonce()
    wire.send(Challenge(nonce))
    hello = decode_from_rank(wire.wait_for_line(PATIENCE))
    if not isinstance(hello, Hello):
        raise MessageError("it did not authenticate")
    proof = secret.proof_of_rank(nonce, hello.nonce, hello.attempt, hello.rank)
    if not same_proof(hello.proof, proof):
        raise MessageError("it does not know the token")
    wire.send(Welcome(secret.proof_of_supervisor(nonce, hello.nonce)))
    return hello.rank


def connect(control: Control) -> socket.socket:
    """To the first address that takes the call: which networks connect two nodes is only known when
    it is tried. Raises `OSError`; `ConnectionRefusedError` if one of them was refused."""
    failure: OSError | None = None
    for address in control.addresses:
        refused = isinstance(failure, ConnectionRefusedError)
        within = AFTER_REFUSAL if refused else PATIENCE
        try:
            connection = socket.create_connection((address, control.port), timeout=within)
        except OSError as error:
            failure = failure if refused else error
            continue
        connection.settimeout(PATIENCE)
        return connection
    assert failure is not None  # a supervisor names one address at least
    raise failure


def _open(wire: Connection, launch: Launch, rank: int) -> None:
    challenge = _expect(wire, Challenge)
    if challenge.version != PROTOCOL:
        raise MessageError(f"it speaks version {challenge.version} of the protocol, not {PROTOCOL}")
    hello = introduce(launch, rank, challenge.nonce)
    wire.send(hello)
    proof = launch.control.secret.proof_of_supervisor(challenge.nonce, hello.nonce)
    if not same_proof(_expect(wire, Welcome).proof, proof):
        raise MessageError("the server there does not know the token")


def _expect(wire: Connection, kind: type[T]) -> T:
    message = decode_from_supervisor(wire.wait_for_line(PATIENCE))
    if not isinstance(message, kind):
        raise MessageError(f"it says {message.kind} instead of {kind.__name__.lower()}")
    return message
