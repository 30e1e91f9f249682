"""Ports for the servers that tests start. The system gives any port above its lowest ephemeral one to whoever connects next, so
one that was found free there may be gone when it is used; these lie below."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_000)
_given: set[int] = set()
_dice = random.SystemRandom()  # no two processes begin alike, whatever tests do to the usual one


def free_port() -> int:
    """One that nobody listens on, and that this process was not given before."""
    while True:
        port = _dice.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port
