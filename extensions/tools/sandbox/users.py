"""The users that sandboxes run as, if the server is root: each sandbox has a user id of its own.

Landlock restricts neither changes of a file's mode and times by its owner, nor, in old kernels, signals to processes of
the same user.  So no two sandboxes, and nothing else on the machine, may have the same user.
"""

from __future__ import annotations

import ctypes
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

USERS: Final = range(60578, 61184)
"""User ids that no distribution and no service manager gives away (https://systemd.io/UIDS-GIDS)."""

_LIBC: Final = ctypes.CDLL(None)


class SandboxUser:
    """A user id that no other sandbox of this machine has until `release`.

    A name in the kernel's abstract namespace holds the place, also among several servers; it is gone with the server.
    """

    def __init__(self) -> None:
        for number in random.sample(USERS, len(USERS)):
            self._place = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._place.bind(f"\0penstock-sandbox-{number}")
            except OSError:
                self._place.close()
            else:
                self.id = number
                return
        raise OSError("all users of sandboxes are in use")

    def release(self) -> None:
        """Let another sandbox have the user id."""
        self._place.close()


@contextmanager
def reading_as(user: int | None) -> Iterator[None]:
    """Access files and ``/proc`` as ``user`` in this thread; None changes nothing.

    Root in a container may lack the right to look at the processes of others (CAP_SYS_PTRACE).
    """
    if user is None:
        yield
        return
    _LIBC.setfsgid(user)
    _LIBC.setfsuid(user)
    try:
        yield
    finally:
        _LIBC.setfsuid(0)
        _LIBC.setfsgid(0)
