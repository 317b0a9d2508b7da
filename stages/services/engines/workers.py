"""vLLM's own processes: they end with the server, however it ends.

By itself vLLM never notices that whoever started it was killed.  It would go on with what was asked, and keep the
memory of the GPU, so that no other server could start.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

MARK = "_PENSTOCK_ENGINE"
"""Set in the environment of the processes that are ours."""

_SET_PARENT_DEATH_SIGNAL = 1


def mark_workers() -> None:
    """Have the vLLM processes that this one starts from now on end with it; call it from the main thread.

    They are started anew instead of forked, as a copy of a server would keep its port.
    """
    os.environ[MARK] = "1"
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def end_with_parent() -> None:
    """Ask the kernel to kill this process once the one that started it is gone.

    A plugin of vLLM, by ``pyproject.toml``, which each of its processes calls before it does anything else; in those
    of other programs it does nothing.
    """
    parent = multiprocessing.parent_process()
    if parent is None or MARK not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it was gone before
        os.kill(os.getpid(), signal.SIGKILL)
