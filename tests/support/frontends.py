"""The frontends of a server: their processes, and what they share in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.api.frontends import supervisor
from penstock.api.start.share import FrontendState
from tests.support.processes import open_files
from tests.support.server_process import penstock

SEEN = 5.0
"""Seconds without a sign of life that no frontend of a busy machine lasts."""

SERVES = re.compile(r"frontend (\d+) of \d+ serves, as process (\d+)")


def frontends_in(log: str) -> dict[int, int]:
    """Return the processes of the frontends by number: the latest of each that has served."""
    return {int(number): int(pid) for number, pid in SERVES.findall(log)}


def patient_penstock(*arguments: str) -> None:
    """Run the ``penstock`` command, whose supervisor waits for signs of life for ``SEEN`` seconds."""
    supervisor.SEEN = SEEN
    penstock(*arguments)


def states_of(server: int, count: int) -> Sequence[FrontendState]:
    """Return the states of the frontends at their last signs of life, which the process of the server shares."""
    memory, *_ = (each for each, place in open_files(server) if "/pym-" in str(place))
    return list((FrontendState * count).from_buffer_copy(memory.read_bytes()))
