"""Plug-ins of vLLM, which each of its processes calls first (see ``pyproject.toml``).

One makes worker processes end with the server, even if it is killed, and not before.  vLLM itself does not notice that
its parent process was killed.  Its workers would go on generating and keep the GPU memory, so that no other server
could start.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import sys
import threading
from multiprocessing.process import BaseProcess

MARK = "_PENSTOCK_ENGINE"
"""Environment variable that marks the processes that this server starts."""

NO_REPORTS = "VLLM_NO_USAGE_STATS"
"""Variable of vLLM, which otherwise reports the model, the GPU and the cloud to its makers.

vLLM takes ``1`` alone as a no: with ``true`` or an empty text it reports.  So all but ``0`` become ``1`` here.
"""

OUTPUTS_AT_ONCE = 4096
"""Outputs of one step that vLLM processes before it lets other tasks of the loop run.

With vLLM's own number, 128, the streams of a part run before the next part is processed.  Then each token is sent by
itself, however many steps wait, and a loop that cannot keep up falls behind by more and more.  With whole steps, all
that wait are processed first, and a stream sends the tokens together that have come meanwhile.
"""

_SET_PARENT_DEATH_SIGNAL = 1
"""The number of ``PR_SET_PDEATHSIG`` in prctl(2)."""

_ARCH_PRCTL = 158
"""The number of the system call on x86-64."""
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18
"""The number of the processor state that AMX needs."""


def mark_workers() -> None:
    """Make vLLM processes and frontends that are started from now on end with this one, and report no usage.

    Start them from the main thread: to the kernel, a process loses its parent when the thread that started it ends.
    They are spawned instead of forked, because a forked copy of the server would keep its port open.
    """
    os.environ[MARK] = "1"
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if os.environ.get(NO_REPORTS) != "0":
        os.environ[NO_REPORTS] = "1"


def take_steps_whole() -> None:
    """Make vLLM process `OUTPUTS_AT_ONCE`, unless the operator has set another number."""
    os.environ.setdefault("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", str(OUTPUTS_AT_ONCE))


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, and leave the terminal's process group.

    Ctrl-C would otherwise end the engine while the server still waits for running responses.

    It does nothing in processes of other programs, and only works on Linux.
    """
    parent = multiprocessing.parent_process()
    if parent is None or MARK not in os.environ or sys.platform != "linux":
        return
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent.pid:  # the parent died before the call, or had this process forked by another one
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def permit_amx() -> None:
    """Request the permission to use AMX, the matrix instructions of newer Intel processors.

    Linux ends a process that uses them without a permission (``Documentation/arch/x86/xstate.rst``).  vLLM's attention
    on the CPU uses them for bfloat16 if the processor has them, and requests none.
    """
    if sys.platform == "linux" and platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
