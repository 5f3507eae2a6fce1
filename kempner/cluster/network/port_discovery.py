"""Lets the ranks of a launch find the port on which rank 0 hosts their store.

All ranks compute the same short list of ports. On the first that is free on its node rank 0 answers
every connection with one line, which names the launch and the store's port; the others try the
ports in turn until one says that line. Whatever else listens there, another run's beacon or a
service that never says a word, costs a few seconds, not the attempt.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time

from kempner.cluster.network.ports import candidates, claim

_ANSWER = 5.0
"""Seconds to wait for an answer on one port; one that nobody listens on refuses at once."""
_PAUSE = 0.1
"""Seconds between rounds over the ports while rank 0 is not there yet."""
_LONGEST = 128
"""Bytes of an answer."""


def announce(salt: str, port: int) -> None:
    """Tell whoever of this launch asks that the store is on `port`, as long as this process lives.

    Raises `OSError` with a sentence if all ports of the launch are taken.
    """
    listener = claim(candidates(salt))
    threading.Thread(
        target=_answer, args=(listener, _line(salt, port)), name="beacon", daemon=True
    ).start()


def find(address: str, salt: str, timeout: float) -> int:
    """The port of the launch's store on the host `address`; blocks until rank 0 says it.

    Raises `TimeoutError` with a sentence after `timeout` seconds.
    """
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
        except (ConnectionError, TimeoutError):  # this caller hung up; the next one may not
            continue


def _ask(address: str, port: int, salt: str) -> int | None:
    """The store's port, if this port is the launch's beacon."""
    try:
        with socket.create_connection((address, port), _ANSWER) as connection:
            said = connection.makefile("rb").readline(_LONGEST)
    except OSError:
        return None
    known = _line(salt, 0).removesuffix(b"0\n")
    number = said.removeprefix(known).removesuffix(b"\n")
    return int(number) if said.startswith(known) and number.isdigit() else None


def _line(salt: str, port: int) -> bytes:
    launch = hashlib.sha256(salt.encode()).hexdigest()[:32]
    return f"kempner {launch} {port}\n".encode()
