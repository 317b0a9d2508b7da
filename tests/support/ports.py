"""Ports for servers that are told theirs when they start."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom


def free_port() -> int:
    """A port that nobody listens on, and that no connection is given by chance before somebody does."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)  # Hypothesis seeds all other numbers
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
